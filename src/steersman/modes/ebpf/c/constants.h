// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Numbers that the programs share with layout.py; none of them is the kernel's.
#pragma once

enum verdict { FORWARD = 0, DROP = 1, REJECT = 2 };
enum source_class { POD = 0, NODE = 1, EXTERNAL = 2 };
enum pool_index { CLUSTER_POOL = 0, LOCAL_POOL = 1 };

// An Action is four bits of frontend.actions, POD in the lowest.
#define ACTION_BITS 4
#define ACTION_VERDICT 3
#define ACTION_LOCAL 4
#define ACTION_MASQUERADE 8

// frontend.flags
#define FRONTEND_RANGES 1 // only sources in `prefixes` of its service may use it
#define FRONTEND_CLUSTER_IP 2
#define FRONTEND_MARKER 4 // stands for a whole address: a clusterIP

// config.flags
#define CONFIG_DETECTOR_CIDR 1 // pods are recognised by their address
#define CONFIG_DETECTOR_DEVICE 2 // pods are recognised by the device of their packets
#define CONFIG_LOCALHOST_NODE_PORTS 4
#define CONFIG_GUARD_NODE_PORTS 8 // refuse bind() to a node port in use
#define CONFIG_FAST_PATH 16 // send packets of known connections on (fast_path.h)

// device.flags
#define DEVICE_POD 1
#define DEVICE_NO_ETHERNET 2
#define DEVICE_XDP 4 // sm_xdp is attached, too
#define DEVICE_PEER 8 // a veth whose other end is in another network namespace

// Ids in `prefixes` that are no number of a service.
#define PREFIXES_PODS 0xfffffffc
#define PREFIXES_SERVICE_CIDRS 0xffffffff

#define MAGLEV_SIZE 4093 // places of a table (render.py)
#define MAGLEV_ROOM 4096

#define CHOICES 32 // attempts to choose an endpoint that a connection can have

// Maximum of connections that have begun and are not complete; of more, the oldest is deleted
// (flow.h). Their entries take a quarter of `flows`, and leave ports to masquerade others.
#define HALF_OPEN 16384

#define SOCKET_SLOTS 65536 // places of connected sockets (peers.h)

// The fast path (fast_path.h)
#define BALANCED_PLACES 32768 // places of balanced connections
#define HOP_PLACES 1024 // of next hops, for each CPU

// The presence filter, the map `marks` (presence.h)
#define PRESENCE_BITS 16 // 2^16 places of addresses
#define PRESENCE_FACTOR 0x9e3779b1u // 2^32 divided by the golden ratio: spreads similar addresses
#define L3_DEVICE_PLACES 256 // places of devices

enum hook { INGRESS = 0, EGRESS = 1 };

// The rewriting of a flow entry. The node's own packets have TO_ENDPOINT at EGRESS.
enum flow_kind {
	TO_ENDPOINT = 1, // ingress, client to Service
	FROM_SERVICE = 2, // egress, endpoint to client
	MASQUERADE = 3, // egress, client to endpoint
	TO_CLIENT = 4, // ingress, endpoint to this node
};
enum flow_state {
	OPENING = 0,
	ESTABLISHED = 1,
	CLOSING = 2,
	WAITING = 3,
	FINISHED = 4,
	REFUSED = 5,
	ANSWERED = 6,
	RESET = 7,
};
// WAITING: a MASQUERADE entry without an address, because its first packet has not left yet.
// FINISHED: this direction has ended, the opposite one has not.
// REFUSED: a TO_ENDPOINT entry; its endpoint has reset the connection before it was ESTABLISHED.
// RESET: CLOSING, by a RST in this direction; a forged one if its sender goes on.
// ANSWERED: a FROM_SERVICE entry of TCP; its endpoint has answered the SYN, and sent nothing since.

enum failure_kind { FAILED_SILENT = 1, FAILED_REFUSED, FAILED_UNREACHABLE };

enum counter {
	SOCKET_FORWARDED = 0,
	SOCKET_REJECTED,
	SOCKET_DROPPED,
	PACKET_FORWARDED,
	PACKET_REJECTED,
	PACKET_DROPPED,
	DROPPED_BY_RANGES,
	DROPPED_UNASSIGNED,
	DROPPED_NO_FLOW,
	DROPPED_NO_ENDPOINT,
	ERRORS_TRANSLATED,
	BIND_REFUSED,
	FRAGMENTS,
	FLOWS_MADE, // entries, not connections
	FLOWS_ENDED, // by programs; others expire, or are evicted (LRU)
	FLOWS_EXPIRED, // counted by counts.py
	DROPPED_LOOPBACK,
	PACKET_ACCELERATED,
	PACKET_FAST,
	COUNTERS,
};
