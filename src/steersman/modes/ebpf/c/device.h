// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Packets that come in by a device and leave by one: for clients outside this node, and for those
// of its pods' connections that sockets cannot see to.
#pragma once

INLINE __u32 class_of(struct __sk_buff *skb, const struct packet *packet)
{
	const struct config *config = settings();

	if (!config)
		return EXTERNAL;
	if (config->flags & CONFIG_DETECTOR_CIDR && in_prefixes(PREFIXES_PODS, &packet->key.source))
		return POD;
	if (config->flags & CONFIG_DETECTOR_DEVICE && device_flags(skb) & DEVICE_POD)
		return POD;
	return EXTERNAL;
}

INLINE int drop(__u32 reason)
{
	count(PACKET_DROPPED);
	count(reason);
	return TC_ACT_SHOT;
}

// Send a packet of this node to its new destination, by the device that leads there.
CALLED int send_elsewhere(struct __sk_buff *skb, const struct packet *packet)
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

// A packet that opens a connection: `class` is NODE for this node's own. Where its client has a
// connection of this port to the same endpoint by another Service, answers of the two could not be
// told apart: then it gets another endpoint, if there is one.
CALLED int new_packet(struct __sk_buff *skb, struct packet *packet, __u32 class)
{
	struct frontend_key key = {
		.address = packet->key.destination,
		.port = packet->key.destination_port,
		.protocol = packet->key.protocol,
	};
	struct frontend frontend = {};
	struct slot slot = {};
	const struct marks *all = all_marks();
	__u32 action;
	int found, failed = DROPPED_NO_FLOW;

	if (!all || !all->attached)
		return NEXT;
	found = find_frontend(&key, class == NODE, &frontend);
	if (found == NOTHING)
		return NEXT;
	if (found == UNKNOWN_PORT)
		return refuse_packet(skb, packet);
	if (found == UNASSIGNED)
		return drop(DROPPED_UNASSIGNED);
	if (frontend.flags & FRONTEND_RANGES && !in_prefixes(frontend.service, &packet->key.source))
		return drop(DROPPED_BY_RANGES);
	action = action_of(&frontend, class);
	if ((action & ACTION_VERDICT) == REJECT)
		return refuse_packet(skb, packet);
	if ((action & ACTION_VERDICT) == DROP)
		return drop(DROPPED_NO_ENDPOINT);
	for (int try = 0; failed && try < CHOICES; try++) {
		if (!(class == EXTERNAL && !try &&
		      choose_by_table(packet, frontend.service, action, &slot)) &&
		    !choose(frontend.service, action, &packet->key.source, &slot))
			return drop(DROPPED_NO_ENDPOINT);
		failed = open_flow(packet, frontend.service, action, &slot);
	}
	if (failed)
		return drop(failed);
	note_half_open(packet);
	count(PACKET_FORWARDED);
	count_connection(&key, frontend.service, &slot);
	count_traffic(skb, packet, frontend.service, &slot, DESTINATION);
	rewrite(skb, packet, DESTINATION, &slot.address, slot.port);
	return class == NODE ? send_elsewhere(skb, packet) : NEXT;
}

// An association that was not made in time; netfilter gives up as early.
INLINE int is_given_up(const struct packet *packet, const struct flow *flow)
{
	return packet->key.protocol == IPPROTO_SCTP && flow->state == OPENING &&
	       since(flow->last) > SCTP_OPENING;
}

// Find the flow of a packet. A connection that begins where one has ended is another one: what is
// left of the old one must not rewrite it, it may not even be for a Service.
INLINE struct flow *find_flow(struct packet *packet)
{
	struct flow_key key = packet->key;
	struct flow *flow = bpf_map_lookup_elem(&flows, &key);

	if (flow && packet->flags & TCP_SYN && (has_ended(flow) || is_given_up(packet, flow))) {
		delete_flow(&key);
		return NULL;
	}
	return flow;
}

// Whether it is us who sent a socket to the destination of this packet.
INLINE int was_sent(struct __sk_buff *skb, const struct packet *packet)
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

// Whether this node made a packet that the sockets' programs have not translated: by SCTP, by a
// process outside their cgroup, or by the kernel itself. A datagram that they have sent to an
// endpoint stays there, though that may be some other Service's address.
INLINE int is_own(struct __sk_buff *skb, const struct packet *packet)
{
	return !skb->ingress_ifindex &&
	       (packet->key.protocol != IPPROTO_UDP || !was_sent(skb, packet));
}

// A socket bound to 127.0.0.1 that was sent to an endpoint of a node port: its packets leave, for
// route_localnet lets them, and get an address that answers can come to. 1 where there is a flow.
ALONE int leave_loopback(struct __sk_buff *skb, struct packet *packet)
{
	struct slot slot = {};

	if (!packet || !is_loopback4(&packet->key.source) || !was_sent(skb, packet))
		return 0;
	slot.address = packet->key.destination;
	slot.port = packet->key.destination_port;
	return keep_masquerade(packet, &slot, 0);
}

// route_localnet, which localhost node ports need, would let anybody reach what listens on
// loopback. That goes for packets of any protocol and for fragments whose ports are not known: the
// kernel would put them together.
INLINE int is_for_loopback(const struct packet *packet)
{
	const struct config *config = settings();

	return is_loopback4(&packet->key.destination) && config &&
	       config->flags & CONFIG_LOCALHOST_NODE_PORTS;
}

// All packets but those that are certainly nobody's. Looked at alone, whatever is known of them.
ALONE int come_in(struct __sk_buff *skb, struct packet *packet)
{
	struct address address;
	struct flow *flow;

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
		return drop(DROPPED_LOOPBACK);
	if (!flow && !opens(packet))
		return NEXT;
	if (!flow)
		return new_packet(skb, packet, class_of(skb, packet));
	note_packet(skb, flow, packet);
	address = flow->address;
	rewrite(skb, packet, side_of(flow), &address, flow->port);
	return NEXT;
}

ALONE int leave(struct __sk_buff *skb, struct packet *packet)
{
	struct address address;
	struct flow *flow;

	if (!packet || (!packet->plain && !parse(skb, packet)))
		return NEXT;
	if (packet->icmp_error) {
		translate_error(skb, packet);
		return NEXT;
	}
	flow = find_flow(packet);
	if (!flow && !opens(packet))
		return NEXT;
	if (!flow && leave_loopback(skb, packet))
		flow = find_flow(packet);
	if (!flow)
		return is_own(skb, packet) ? new_packet(skb, packet, NODE) : NEXT;
	if (flow->state == WAITING && !settle_masquerade(skb, packet, flow))
		return drop(DROPPED_NO_FLOW);
	note_packet(skb, flow, packet);
	address = flow->address;
	if (side_of(flow) == DESTINATION) {
		rewrite(skb, packet, DESTINATION, &address, flow->port);
		return send_elsewhere(skb, packet);
	}
	rewrite(skb, packet, SOURCE, &address, flow->port);
	return NEXT;
}

#define DEVICE_PROGRAM(name, where, look) \
	SEC("tc") int name(struct __sk_buff *skb) \
	{ \
		struct packet packet = { .key.hook = where }; \
		const struct marks *all = all_marks(); \
\
		packet.l3 = link_header(skb, all); \
		if (all && glance(skb, &packet) && concerns_no_flow(all, &packet)) \
			return NEXT; \
		return look(skb, &packet); \
	}

DEVICE_PROGRAM(sm_ingress, INGRESS, come_in)
DEVICE_PROGRAM(sm_egress, EGRESS, leave)
