// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Keys and values of the maps. layout.py declares the same structs; loader.py compares them by BTF.
#pragma once

// An address of either family; IPv4 is written as ::ffff:a.b.c.d.
struct address {
	union {
		__be32 words[4];
		__u64 halves[2];
	};
};

struct frontend_key {
	struct address address; // unspecified for a node port
	__be16 port;
	__u8 protocol;
	__u8 zero;
	__u32 zero2;
};

// One word: programs read either the old or the new value while it is replaced.
struct frontend {
	__u32 service;
	__u16 actions;
	__u8 flags;
	__u8 zero;
};

// One word, as well.
struct pool {
	__u32 base;
	__u32 count;
};

struct service {
	struct pool pools[2];
	__u32 affinity_seconds;
	__u32 zero;
};

struct slot {
	struct address address;
	__be16 port;
	__u16 zero;
	__u32 zero2;
};

struct maglev {
	__u16 places[MAGLEV_ROOM]; // positions in the pool
};

struct service_name {
	char text[240];
};

struct member_key {
	__u32 service;
	__u32 zero;
	struct address address;
	__be16 port;
	__u16 zero2[3];
};

// Traffic of an endpoint of a ServicePort: connections, and packets and bytes (with IP headers) of
// those connections whose packets are rewritten.
struct tally {
	__u64 connections;
	__u64 packets_in;
	__u64 packets_out;
	__u64 bytes_in;
	__u64 bytes_out;
};

struct affinity_key {
	struct address client;
	__u32 service;
	__u32 zero;
};

// The endpoint of a client with affinity, or of an unconnected socket.
struct affinity {
	struct address address;
	__u64 last;
	__be16 port;
	__u16 zero[3];
};

struct prefix {
	__u32 length; // includes the 32 bits of id
	__u32 id;
	struct address address;
};

struct device {
	struct address masquerade4;
	struct address masquerade6;
	__u32 flags;
	__u32 zero;
};

struct config {
	__u64 host_cookie; // network namespace of the node; 0 if sockets are not balanced
	struct address node_ip4;
	struct address node_ip6;
	__u32 flags;
	__u16 first_port; // first and last port for sockets that ask for none
	__u16 last_port;
	char pod_interface[16]; // of the detector; devices.py finds the devices
	char pod_prefix[16];
	__u8 programs[16]; // digest of the attached object
};

struct flow_key {
	struct address source;
	struct address destination;
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 hook;
	__u16 zero;
};

// The key of the packets that go the other way, at a hook.
static __always_inline void reversed(const struct flow_key *key, __u8 hook, struct flow_key *out)
{
	*out = (struct flow_key){
		.source = key->destination,
		.destination = key->source,
		.source_port = key->destination_port,
		.destination_port = key->source_port,
		.protocol = key->protocol,
		.hook = hook,
	};
}

struct flow {
	struct address address;
	__u64 last;
	__be16 port;
	__u8 kind;
	__u8 state;
	__u32 service;
};

// A connection that was balanced at a socket (fast_path.h).
struct balanced {
	struct flow_key key; // from the client to the endpoint; without protocol: free
	__u64 last;
	__u32 ended;
	__u32 zero;
};

// Where packets with these ends, from a device, go next (fast_path.h).
struct hop {
	struct flow_key key; // the client's port is 0 if all of its ports share the hop
	__u64 looked_up; // the tick in which this was true
	__u32 from;
	__u32 device; // 0: leave packets to the network stack
	__u16 mtu;
	__u8 to_peer; // 1: to the other end of the device, a veth
	__u8 family; // of the gateway
	union {
		__u8 addresses[12]; // of Ethernet, destination and source, for the peer
		__be32 gateway[4]; // for others
	};
	__u32 zero;
};

// The peer that a socket's owner sees, and the endpoint that gets the packets.
struct peer {
	struct address endpoint;
	struct address frontend;
	__be16 endpoint_port;
	__be16 frontend_port;
};

// The first of the sockets whose cookies have the same remainder.
struct socket_slot {
	__u64 cookie; // 0: free
	struct peer peer;
	__u32 crowded; // others are or were in `crowded`
};

struct reverse_key {
	__u64 cookie;
	struct address endpoint;
	__be16 port;
	__u16 zero[3];
};

struct reverse {
	struct address frontend;
	__be16 port;
	__u16 zero[3];
};

struct fragment_key {
	struct address source;
	struct address destination;
	__u32 id;
	__u8 protocol;
	__u8 hook;
	__u16 zero;
};

struct fragment {
	__be16 source_port;
	__be16 destination_port;
};

// A place of the presence filter, shared by several addresses (presence.h).
struct mark {
	__u8 client; // of flows
	__u8 served; // addresses of frontends
};

struct marks {
	__u8 trusted; // 0: any packet may belong to a flow
	__u8 attached; // 0: some device has no programs, so no flow may begin
	__u8 zero[6];
	__u8 bare[L3_DEVICE_PLACES]; // L3 devices (without Ethernet), by the remainder of their
				     // index
	struct mark places[1 << PRESENCE_BITS];
};

// Failing connections (failures.h)

// Whether anybody watches; failures.py writes the first two, and renews them.
struct watching {
	__u64 until;
	__u64 answers; // until when answers are noted, too: while something fails
	__u64 window; // the second in which `errors` are counted
	__u32 errors;
	__u32 zero;
};

// The state of an endpoint that has failed or answered while something fails.
struct health {
	__u64 answered; // the last SYN
	__u64 window; // the second in which `events` are counted
	__u32 events;
	__u32 zero;
};

// The last answer that a CPU has seen.
struct answer {
	struct slot endpoint;
	__u64 time;
};

struct failure {
	struct address endpoint;
	struct address client;
	__u64 time;
	__be16 port; // of the endpoint
	__u8 protocol;
	__u8 kind;
	__u32 zero;
};
