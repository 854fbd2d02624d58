// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Programs of devices: for clients outside this node, and for connections of its pods that cannot
// be balanced at the socket.
#pragma once

INLINE __u32 device_flags(struct __sk_buff *skb)
{
	__u32 index = skb->ifindex;
	struct device *device = bpf_map_lookup_elem(&devices, &index);

	return device ? device->flags : 0;
}

// Return the length of the link's header. L3 devices share their place with some that have one.
INLINE __u32 link_header(struct __sk_buff *skb, const struct marks *all)
{
	if (all && !all->bare[skb->ifindex % L3_DEVICE_PLACES])
		return ETH_HLEN;
	return device_flags(skb) & DEVICE_NO_ETHERNET ? 0 : ETH_HLEN;
}

// Whether a plain packet certainly belongs to no flow, and opens none.
INLINE int concerns_no_flow(const struct marks *all, const struct packet *packet)
{
	__u32 source = presence_place(&packet->key.source);
	__u32 destination = presence_place(&packet->key.destination);

	if (!all->trusted)
		return 0;
	if (all->places[source].client || all->places[destination].client)
		return 0;
	return !opens(packet) || serves_nothing(&packet->key.destination);
}

INLINE __u32 class_of(struct __sk_buff *skb, const struct packet *packet)
{
	const struct config *config = get_config();

	if (!config)
		return EXTERNAL;
	if (config->flags & CONFIG_DETECTOR_CIDR && in_prefixes(PREFIXES_PODS, &packet->key.source))
		return POD;
	if (config->flags & CONFIG_DETECTOR_DEVICE && device_flags(skb) & DEVICE_POD)
		return POD;
	return EXTERNAL;
}

// Send a packet of this node to its new destination, by the device of the route.
NOINLINE int redirect_to_endpoint(struct __sk_buff *skb, const struct packet *packet)
{
	struct bpf_fib_lookup route = {
		.ifindex = skb->ifindex,
		.l4_protocol = packet->key.protocol,
	};
	long result;

	if (packet->ipv4) {
		route.family = 2; // AF_INET
		route.ipv4_src = packet->key.source.words[3];
		route.ipv4_dst = packet->key.destination.words[3];
	} else {
		route.family = 10; // AF_INET6
		__builtin_memcpy(route.ipv6_src, &packet->key.source, 16);
		__builtin_memcpy(route.ipv6_dst, &packet->key.destination, 16);
	}
	result = bpf_fib_lookup(skb, &route, sizeof(route), 0);
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH)
		return drop(DROPPED_NO_FLOW);
	return bpf_redirect_neigh(route.ifindex, NULL, 0, 0);
}

struct opening {
	struct packet *packet;
	struct slot slot;
	__u32 service;
	__u16 action; // small fields, as frames on a path share 512 bytes
	__u8 by_table; // use its Maglev table, if it has one
	__u8 failed; // 0, or the counter of the reason for dropping it
};

// Try to open a connection; 0 if another endpoint should be tried.
static __noinline long try_endpoint(__u32 round, struct opening *own)
{
	struct packet *packet = own->packet;

	if (!(own->by_table && choose_by_table(packet, own->service, own->action, &own->slot)) &&
	    !choose(own->service, own->action, &packet->key.source, &own->slot)) {
		own->failed = DROPPED_NO_ENDPOINT;
		return 1;
	}
	own->failed = open_flow(packet, own->service, own->action, &own->slot);
	own->by_table = 0;
	return !own->failed;
}

#define OPENED -2 // new_packet() has rewritten the packet, which goes on

// Handle a packet that opens a connection, of this node (`own`) or of others. If the client
// has a connection from the same port to the same endpoint through another Service, their answers
// would be indistinguishable: then choose another endpoint, if there is one.
NOINLINE int new_packet(struct __sk_buff *skb, struct packet *packet, int own)
{
	struct frontend_key key = {
		.address = packet->key.destination,
		.port = packet->key.destination_port,
		.protocol = packet->key.protocol,
	};
	struct frontend frontend = {};
	struct opening opening = { .packet = packet, .failed = DROPPED_NO_FLOW };
	const struct marks *all = presence_filter();
	__u32 class, action;
	int found;

	if (!all || !all->attached)
		return NEXT;
	found = find_frontend(&key, own, &frontend);
	if (found == NOTHING)
		return NEXT;
	if (found == UNKNOWN_PORT)
		return refuse_packet(skb, packet);
	if (found == UNASSIGNED)
		return drop(DROPPED_UNASSIGNED);
	if (frontend.flags & FRONTEND_RANGES && !in_prefixes(frontend.service, &packet->key.source))
		return drop(DROPPED_BY_RANGES);
	class = own ? NODE : class_of(skb, packet);
	action = action_of(&frontend, class);
	if ((action & ACTION_VERDICT) == REJECT)
		return refuse_packet(skb, packet);
	if ((action & ACTION_VERDICT) == DROP)
		return drop(DROPPED_NO_ENDPOINT);
	opening.service = frontend.service;
	opening.action = action;
	opening.by_table = class == EXTERNAL;
	if (!try_endpoint(0, &opening)) // the verifier looks at one round of a bpf_loop
		bpf_loop(CHOICES - 1, try_endpoint, &opening, 0);
	if (opening.failed)
		return drop(opening.failed);
	add_half_open(packet);
	count(PACKET_FORWARDED);
	count_connection(&key, frontend.service, &opening.slot, segments(skb),
			 skb->len - packet->l3);
	rewrite(skb, packet, DESTINATION, &opening.slot.address, opening.slot.port);
	return own ? redirect_to_endpoint(skb, packet) : OPENED;
}

// Whether a packet comes from this node, and no socket program has balanced it: SCTP, a process
// outside the cgroup, the kernel itself. A datagram that was balanced keeps its endpoint, even if
// that is the address of another Service.
INLINE int is_own(struct __sk_buff *skb, const struct packet *packet)
{
	return !skb->ingress_ifindex &&
	       (packet->key.protocol != IPPROTO_UDP || !was_balanced(skb, packet));
}

// Masquerade packets of a socket that is bound to 127.0.0.1 and was balanced to an endpoint of a
// node port: route_localnet lets them leave. Return 1 if they have a flow.
VERIFIED_ONCE int masquerade_loopback(struct __sk_buff *skb, struct packet *packet)
{
	struct slot slot = {};

	if (!packet || !is_loopback4(&packet->key.source) || !was_balanced(skb, packet))
		return 0;
	slot.address = packet->key.destination;
	slot.port = packet->key.destination_port;
	return add_masquerade_flow(packet, &slot, 0);
}

// Whether a packet must be dropped: route_localnet, which localhost node ports need, would let
// anybody reach programs that listen on loopback. This includes packets of any protocol, and
// fragments without ports, which the kernel would reassemble.
INLINE int is_for_loopback(const struct packet *packet)
{
	const struct config *config = get_config();

	return is_loopback4(&packet->key.destination) && config &&
	       config->flags & CONFIG_LOCALHOST_NODE_PORTS;
}

// Whether a packet to 127.0.0.0/8 is an answer that was masqueraded there: it has got back its
// destination at a port of a bridge, and comes in by the bridge, too.
NOINLINE int is_translated_answer(const struct packet *packet)
{
	struct flow_key there;
	struct flow *flow;

	reversed(&packet->key, EGRESS, &there);
	flow = bpf_map_lookup_elem(&flows, &there);
	return flow && flow->kind == MASQUERADE && flow->state != WAITING;
}

// Handle a packet that comes in, unless the presence filter lets it pass.
VERIFIED_ONCE int handle_ingress(struct __sk_buff *skb, struct packet *packet)
{
	struct address address;
	struct flow *flow;
	int fast, kind, verdict;

	if (!packet)
		return NEXT;
	if (!packet->plain && !parse(skb, packet))
		return is_for_loopback(packet) ? drop(DROPPED_LOOPBACK) : NEXT;
	if (packet->icmp_error) {
		if (!translate_error(skb, packet) && is_for_loopback(packet))
			return drop(DROPPED_LOOPBACK);
		return NEXT;
	}
	flow = find_flow(packet);
	if (!flow && is_for_loopback(packet))
		return is_translated_answer(packet) ? NEXT : drop(DROPPED_LOOPBACK);
	fast = has_fast_path();
	if (!flow) {
		verdict = fast ? pass_flow(skb, packet, 0) : NEXT; // an answer of a pod here?
		if (verdict != NEXT || !opens(packet))
			return verdict;
		verdict = new_packet(skb, packet, 0);
		if (verdict != OPENED)
			return verdict;
		return fast ? pass_flow(skb, packet, TO_ENDPOINT) : NEXT;
	}
	update_flow(skb, flow, packet);
	address = flow->address;
	kind = flow->kind;
	rewrite(skb, packet, side_of(flow), &address, flow->port);
	return fast ? pass_flow(skb, packet, kind) : NEXT;
}

VERIFIED_ONCE int handle_egress(struct __sk_buff *skb, struct packet *packet)
{
	struct address address;
	struct flow *flow;

	if (!packet || (!packet->plain && !parse(skb, packet)))
		return NEXT;
	if (packet->icmp_error) // of this node about an answer to it: to the endpoint
		return translate_error(skb, packet) == TO_ENDPOINT ?
			       redirect_to_endpoint(skb, packet) :
			       NEXT;
	flow = find_flow(packet);
	if (!flow && !opens(packet))
		return NEXT;
	if (!flow && masquerade_loopback(skb, packet))
		flow = find_flow(packet);
	if (!flow)
		return is_own(skb, packet) ? new_packet(skb, packet, 1) : NEXT;
	if (flow->state == WAITING && !choose_masquerade(skb->ifindex, packet, flow))
		return drop(DROPPED_NO_FLOW);
	update_flow(skb, flow, packet);
	address = flow->address;
	if (side_of(flow) == DESTINATION) {
		rewrite(skb, packet, DESTINATION, &address, flow->port);
		return redirect_to_endpoint(skb, packet);
	}
	rewrite(skb, packet, SOURCE, &address, flow->port);
	return NEXT;
}

// Start to parse a packet. Return 1 if it is plain; then the presence filter can tell more.
INLINE int start_packet(struct __sk_buff *skb, struct packet *packet, const struct marks *all)
{
	packet->l3 = link_header(skb, all);
	return all && parse_plain(skb, packet);
}

SEC("tc") int sm_ingress(struct __sk_buff *skb)
{
	struct packet packet = { .key.hook = INGRESS };
	const struct marks *all = presence_filter();
	int verdict;

	if (start_packet(skb, &packet, all)) {
		if (packet.key.protocol == IPPROTO_TCP && has_fast_path()) {
			verdict = pass_balanced(skb, &packet);
			if (verdict != NEXT)
				return verdict;
		}
		if (concerns_no_flow(all, &packet))
			return NEXT;
	}
	return handle_ingress(skb, &packet);
}

SEC("tc") int sm_egress(struct __sk_buff *skb)
{
	struct packet packet = { .key.hook = EGRESS };
	const struct marks *all = presence_filter();

	if (start_packet(skb, &packet, all) && concerns_no_flow(all, &packet))
		return NEXT;
	return handle_egress(skb, &packet);
}
