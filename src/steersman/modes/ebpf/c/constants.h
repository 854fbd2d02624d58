// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Numbers that the programs and layout.py share; nothing here is of the kernel's.
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
#define FRONTEND_MARKER 4 // stands for a whole address: it is some Service's clusterIP

// config.flags
#define CONFIG_DETECTOR_CIDR 1 // pods are told by their address
#define CONFIG_DETECTOR_DEVICE 2 // pods are told by the device that their packets come in by
#define CONFIG_LOCALHOST_NODE_PORTS 4
#define CONFIG_GUARD_NODE_PORTS 8 // bind() to a node port in use is refused

// device.flags
#define DEVICE_POD 1
#define DEVICE_NO_ETHERNET 2
#define DEVICE_XDP 4 // sm_xdp is there, too

// Ids in `prefixes` that are no index of a service.
#define PREFIXES_PODS 0xfffffffc
#define PREFIXES_SERVICE_CIDRS 0xffffffff

#define MAGLEV_SIZE 4093 // places of a table (maglev.py)
#define MAGLEV_ROOM 4096

#define CHOICES 32 // of an endpoint for one connection, while those chosen cannot be

// Connections that have begun and were not completed; of more, the oldest is forgotten (flow.h).
// All entries of them are a quarter of `flows`, and they leave ports to masquerade others with.
#define HALF_OPEN 16384

#define SOCKET_SLOTS 65536 // of connected sockets (peers.h)

// Of `marks`
#define PRESENCE_BITS 16 // there are 2^16 places of addresses
#define PRESENCE_FACTOR 0x9e3779b1u // 2^32 divided by the golden ratio: it spreads what is similar
#define L3_DEVICE_PLACES 256 // of devices

enum hook { INGRESS = 0, EGRESS = 1 };

// What a flow entry rewrites: at INGRESS always the destination, at EGRESS the source.
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
};
// WAITING: a MASQUERADE entry whose first packet has not left, so that it has no address yet.
// FINISHED: this way has ended, the one back has not.
// REFUSED: a TO_ENDPOINT entry whose endpoint has reset the connection before it was ESTABLISHED.

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
	FLOWS_ENDED, // by programs; the other ends are FLOWS_EXPIRED, and those that LRU took
	FLOWS_EXPIRED, // by flows.py: no program writes it
	DROPPED_LOOPBACK,
	PACKET_ACCELERATED,
	COUNTERS,
};
