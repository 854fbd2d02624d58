// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// The fast path, on request (CONFIG_FAST_PATH): packets of known connections are sent on where they
// come in. The network stack of the node does not see them, nor do its filters (netfilter, and with
// it conntrack and network policies) and the programs of others.
//
//   usually   ingress (device.h) > route > netfilter > egress (device.h) > device > backlog > pod
//   fast      ingress (device.h) > bpf_redirect_peer > pod        to pods here, by a veth
//                                > bpf_redirect_neigh > device    to all others
//
// All packets of a connection take it, from the first one. If conntrack saw only some of them, it
// would take others for invalid, and many firewalls drop those.
//
// Packets with anything unusual are left to the network stack, which can handle them, and knows
// the right ICMP error:
//
//   - packets that are not plain: fragments, IP options, extension headers, ICMP, SCTP;
//   - packets to another Ethernet address than the device's own, or with a VLAN tag;
//   - a time to live that ends here;
//   - a packet larger than the MTU of its route;
//   - no route, or one to this node itself, into a tunnel, or by a device without Ethernet.
//
// A route is looked up once in a tick of the clock (`hops`), so a change of routes or neighbours
// applies after some milliseconds.
//
// TCP connections that were balanced at a socket have no flow, as nothing in their packets is
// rewritten. The first packet still belongs to the socket, so it is known to be balanced, and its
// ends are noted in the array `balanced`. A connection whose place there is taken by another one
// goes the usual way.
#pragma once

// After this time without a packet, a connection loses its place to another one; in ns.
#define BALANCED_IDLE 300000000000ull
#define BALANCED_ENDED 1000000000ull

INLINE int has_fast_path(void)
{
	const struct config *config = get_config();

	return config && config->flags & CONFIG_FAST_PATH;
}

INLINE int same_ends(const struct flow_key *a, const struct flow_key *b)
{
	return a->source_port == b->source_port && a->destination_port == b->destination_port &&
	       a->protocol == b->protocol && same_address(&a->source, &b->source) &&
	       same_address(&a->destination, &b->destination);
}

// The start of an Ethernet frame, up to the addresses of IP; of IPv6 also a part of them.
struct start {
	__u8 addresses[2 * ETH_ALEN]; // destination, source
	__be16 protocol;
	union {
		__be32 word; // of IPv6: the flow label
		struct {
			__u8 version;
			__u8 tos;
			__u8 zero[6];
			__u8 ttl;
			__u8 protocol;
			__u16 checksum;
		} ipv4;
		struct {
			__u8 zero[7];
			__u8 ttl;
		} ipv6;
	};
} __attribute__((packed, aligned(2)));

// Look up the route of a packet, and write the next hop; without a device if packets are left to
// the network stack.
VERIFIED_ONCE int look_up_hop(struct __sk_buff *skb, const struct packet *packet,
			      const struct start *start, struct hop *hop)
{
	struct bpf_fib_lookup route = { .tot_len = 1 }; // any length: fills in the MTU
	struct device *device;
	long result;
	__u32 index;

	if (!packet || !start || !hop)
		return 0;
	hop->key = packet->key;
	hop->from = route.ifindex = skb->ifindex;
	hop->looked_up = now();
	hop->device = 0;
	route.l4_protocol = packet->key.protocol;
	route.sport = packet->key.source_port;
	route.dport = packet->key.destination_port;
	if (packet->ipv4) {
		route.family = 2; // AF_INET
		route.tos = start->ipv4.tos;
		route.ipv4_src = packet->key.source.words[3];
		route.ipv4_dst = packet->key.destination.words[3];
	} else {
		route.family = 10; // AF_INET6
		route.flowinfo = start->word & bpf_htonl(0x0fffffff);
		__builtin_memcpy(route.ipv6_src, &packet->key.source, 16);
		__builtin_memcpy(route.ipv6_dst, &packet->key.destination, 16);
	}
	result = bpf_fib_lookup(skb, &route, sizeof(route), 0);
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH)
		return 0;
	index = route.ifindex;
	device = bpf_map_lookup_elem(&devices, &index);
	if (!device || device->flags & DEVICE_NO_ETHERNET)
		return 0;
	hop->mtu = route.mtu_result;
	hop->to_peer = result == BPF_FIB_LKUP_RET_SUCCESS && device->flags & DEVICE_PEER;
	if (hop->to_peer) {
		__builtin_memcpy(hop->addresses, route.dmac, ETH_ALEN);
		__builtin_memcpy(hop->addresses + ETH_ALEN, route.smac, ETH_ALEN);
	} else {
		hop->family = route.family; // of the gateway, which may be another one
		__builtin_memcpy(hop->gateway, route.ipv6_dst, 16);
	}
	hop->device = index;
	return 0;
}

// The length of an IP packet; of one that will be divided, that of its parts.
INLINE __u32 length_on_wire(struct __sk_buff *skb, const struct packet *packet)
{
	__u32 header = 8;
	__u8 words;

	if (!skb->gso_size)
		return skb->len - packet->l3;
	if (packet->key.protocol == IPPROTO_TCP) {
		if (!LOAD(skb, packet->l4 + 12, words))
			return 0xffff;
		header = words >> 4 << 2;
	}
	return packet->l4 - packet->l3 + header + skb->gso_size;
}

// Return the place of a hop: another one for each client of an endpoint, and for the way back.
INLINE struct hop *hop_at(const struct flow_key *key)
{
	__u32 ends = presence_place(&key->destination) + 3 * presence_place(&key->source);
	__u32 place = (ends + bpf_ntohs(key->source_port ^ key->destination_port)) % HOP_PLACES;

	return bpf_map_lookup_elem(&hops, &place);
}

INLINE int is_fresh(const struct hop *hop, struct __sk_buff *skb, const struct flow_key *key)
{
	return hop->looked_up == now() && hop->from == skb->ifindex && same_ends(&hop->key, key);
}

// Find the next hop of a packet; NULL if the packet is left to the network stack. All connections
// of a client to one port of a pod here share a hop: only a route with several hops depends on the
// client's port.
static __noinline struct hop *find_hop(struct __sk_buff *skb, const struct packet *packet,
				       int to_endpoint, struct start *start)
{
	struct flow_key key = packet->key;
	struct hop *hop, *shared;

	if (!packet->plain || packet->l3 != ETH_HLEN || skb->pkt_type || skb->vlan_present)
		return NULL;
	if (!LOAD(skb, 0, *start) || (packet->ipv4 ? start->ipv4.ttl : start->ipv6.ttl) < 2)
		return NULL;
	if (to_endpoint)
		key.source_port = 0;
	else
		key.destination_port = 0;
	hop = shared = hop_at(&key);
	if (shared && !is_fresh(shared, skb, &key)) {
		hop = hop_at(&packet->key);
		if (hop && !is_fresh(hop, skb, &packet->key)) {
			look_up_hop(skb, packet, start, hop);
			if (hop->device && hop->to_peer) {
				*shared = *hop;
				shared->key = key;
			}
		}
	}
	return hop && hop->device && length_on_wire(skb, packet) <= hop->mtu ? hop : NULL;
}

// Send a packet to its next hop, as a router does: with a shorter time to live (RFC 1624).
static __noinline int send_on(struct __sk_buff *skb, const struct packet *packet,
			      const struct hop *hop, struct start *start)
{
	__u32 sum, length = sizeof(*start);
	struct bpf_redir_neigh gateway;

	count(PACKET_FAST);
	if (packet->ipv4) {
		sum = packet->checksum + (__u32)bpf_htons(0x0100);
		start->ipv4.checksum = sum + (sum >= 0xffff);
		start->ipv4.ttl--;
	} else {
		start->ipv6.ttl--;
		length = sizeof(*start) - sizeof(start->ipv4) + sizeof(start->ipv6);
	}
	if (hop->to_peer)
		__builtin_memcpy(start->addresses, hop->addresses, sizeof(start->addresses));
	bpf_skb_store_bytes(skb, 0, start, length, 0);
	if (hop->to_peer)
		return bpf_redirect_peer(hop->device, 0);
	gateway.nh_family = hop->family;
	__builtin_memcpy(gateway.ipv6_nh, hop->gateway, sizeof(hop->gateway));
	return bpf_redirect_neigh(hop->device, &gateway, sizeof(gateway), 0);
}

// Connections that were balanced at a socket

// Whether the destination of a packet was chosen by a socket program.
INLINE int was_balanced(struct __sk_buff *skb, const struct packet *packet)
{
	struct reverse_key key = {
		.cookie = bpf_get_socket_cookie(skb),
		.endpoint = packet->key.destination,
		.port = packet->key.destination_port,
	};

	if (packet->key.protocol == IPPROTO_UDP)
		return bpf_map_lookup_elem(&reverses, &key) != NULL;
	return find_peer(key.cookie) != NULL;
}

// The place of a connection, the same in both directions.
INLINE __u32 balanced_place(const struct flow_key *key)
{
	return ((presence_place(&key->source) ^ presence_place(&key->destination)) +
		bpf_ntohs(key->source_port ^ key->destination_port)) %
	       BALANCED_PLACES;
}

// Note a connection by its first packet, if it was balanced and its place is free.
INLINE void note_balanced(struct __sk_buff *skb, const struct packet *packet,
			  struct balanced *known)
{
	int same = same_ends(&known->key, &packet->key);

	if (!same && known->key.protocol &&
	    since(known->last) < (known->ended ? BALANCED_ENDED : BALANCED_IDLE))
		return;
	if (was_balanced(skb, packet)) {
		known->ended = 0;
		known->last = now();
		known->key = packet->key;
	} else if (same) {
		known->key.protocol = 0; // it has the ends of an earlier one
	}
}

// Send a packet of a balanced connection on; NEXT if it belongs to none, or is left to the stack.
NOINLINE int pass_balanced(struct __sk_buff *skb, const struct packet *packet)
{
	__u32 place = balanced_place(&packet->key);
	struct balanced *known = bpf_map_lookup_elem(&balanced, &place);
	struct flow_key back;
	struct start start;
	int to_endpoint;
	struct hop *hop;

	if (!known)
		return NEXT;
	if (opens(packet))
		note_balanced(skb, packet, known);
	to_endpoint = same_ends(&known->key, &packet->key);
	reversed(&packet->key, INGRESS, &back);
	if (!to_endpoint && !same_ends(&known->key, &back))
		return NEXT;
	known->last = now();
	if (packet->flags & (TCP_FIN | TCP_RST))
		known->ended = 1;
	hop = find_hop(skb, packet, to_endpoint, &start);
	return hop ? send_on(skb, packet, hop, &start) : NEXT;
}

// Connections whose packets are rewritten

// Find the entry that a packet has at egress.
static __noinline struct flow *find_exit(struct packet *packet)
{
	struct flow *found;

	packet->key.hook = EGRESS;
	found = find_flow(packet);
	packet->key.hook = INGRESS;
	return found;
}

// Send a packet on that has passed ingress by a flow of `kind` (0: it has none there), and rewrite
// its source as egress would; NEXT if it is left to the stack.
NOINLINE int pass_flow(struct __sk_buff *skb, struct packet *packet, int kind)
{
	struct flow *exit = find_exit(packet);
	struct start start;
	struct hop *hop;

	if (exit ? side_of(exit) != SOURCE : kind != TO_ENDPOINT)
		return NEXT;
	hop = find_hop(skb, packet, kind == TO_ENDPOINT, &start);
	if (!hop)
		return NEXT;
	if (exit) {
		packet->key.hook = EGRESS;
		if (exit->state == WAITING && !choose_masquerade(hop->device, packet, exit))
			return drop(DROPPED_NO_FLOW);
		update_flow(skb, exit, packet);
		rewrite(skb, packet, SOURCE, &exit->address, exit->port);
	}
	return send_on(skb, packet, hop, &start);
}
