// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// The XDP program forwards packets of known connections before the network stack sees them, on
// devices that were named for it. It decides nothing: packets that begin or end a connection,
// fragments, and packets that leave by other devices are left to device.h.
#pragma once

// The parts of a packet that change.
struct view {
	struct ethhdr *ethernet;
	void *ip;
	__u32 version; // the verifier allows no test by pointer
	__be16 *ports;
	__u16 *checksum; // of TCP or UDP
	__u32 length; // of the IP packet
};

// Fill a view and the key; 0 if the packet is left to device.h.
INLINE int view_ports(struct view *view, void *start, void *end, struct flow_key *key)
{
	__u8 *flags = start + 13;

	view->ports = start;
	if (key->protocol == IPPROTO_TCP) {
		if (start + 18 > end || *flags & (TCP_SYN | TCP_FIN | TCP_RST))
			return 0;
		view->checksum = start + 16;
	} else if (key->protocol == IPPROTO_UDP) {
		if (start + 8 > end)
			return 0;
		view->checksum = start + 6;
	} else {
		return 0;
	}
	key->source_port = view->ports[0];
	key->destination_port = view->ports[1];
	return 1;
}

INLINE int view_ipv4(struct view *view, void *end, struct flow_key *key)
{
	struct iphdr *ip = (void *)(view->ethernet + 1);

	if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl != 5 || ip->ttl < 2 ||
	    ip->frag_off & bpf_htons(0x3fff))
		return 0;
	view->ip = ip;
	view->version = 4;
	view->length = bpf_ntohs(ip->tot_len);
	set_ipv4(&key->source, ip->saddr);
	set_ipv4(&key->destination, ip->daddr);
	key->protocol = ip->protocol;
	return view_ports(view, ip + 1, end, key);
}

INLINE int view_ipv6(struct view *view, void *end, struct flow_key *key)
{
	struct ipv6hdr *ip = (void *)(view->ethernet + 1);

	if ((void *)(ip + 1) > end || ip->version != 6 || ip->hop_limit < 2)
		return 0;
	view->ip = ip;
	view->version = 6;
	view->length = sizeof(*ip) + bpf_ntohs(ip->payload_len);
	__builtin_memcpy(&key->source, &ip->saddr, 16);
	__builtin_memcpy(&key->destination, &ip->daddr, 16);
	key->protocol = ip->nexthdr;
	return view_ports(view, ip + 1, end, key);
}

INLINE int view_packet(struct xdp_md *ctx, struct view *view, struct flow_key *key)
{
	void *end = (void *)(long)ctx->data_end;

	view->ethernet = (void *)(long)ctx->data;
	if ((void *)(view->ethernet + 1) > end)
		return 0;
	if (view->ethernet->h_proto == bpf_htons(ETH_P_IP))
		return view_ipv4(view, end, key);
	return view->ethernet->h_proto == bpf_htons(ETH_P_IPV6) && view_ipv6(view, end, key);
}

INLINE void refresh_flow(struct flow *flow)
{
	flow->last = now();
	if (flow->state == OPENING || flow->state == ANSWERED)
		flow->state = ESTABLISHED;
}

// Rewrite a key as device.h does at ingress and then at egress. Return the kind of the flow, or 0
// to leave the packet to device.h.
NOINLINE int translate(const struct flow_key *before, struct flow_key *after, __u32 *service)
{
	struct flow *in = bpf_map_lookup_elem(&flows, before), *out;

	if (!in || side_of(in) != DESTINATION || in->state == WAITING || is_over(in))
		return 0;
	*after = *before;
	after->destination = in->address;
	after->destination_port = in->port;
	after->hook = EGRESS;
	out = bpf_map_lookup_elem(&flows, after);
	if (out && (side_of(out) != SOURCE || out->state == WAITING || is_over(out)))
		return 0;
	if (in->kind == TO_CLIENT && !out)
		return 0;
	refresh_flow(in);
	*service = in->service;
	if (out) {
		refresh_flow(out);
		after->source = out->address;
		after->source_port = out->port;
	}
	return in->kind;
}

// Count a forwarded packet; device.h counts the others.
INLINE void count_sent(int kind, const struct flow_key *before, const struct flow_key *after,
		       __u32 service, __u32 length)
{
	struct slot slot = {};

	count(PACKET_ACCELERATED);
	if (kind == TO_ENDPOINT) {
		slot.address = after->destination;
		slot.port = after->destination_port;
		tally(service, &slot, DESTINATION, 1, length);
	} else {
		slot.address = before->source;
		slot.port = before->source_port;
		tally(service, &slot, SOURCE, 1, length);
	}
}

INLINE int is_accelerated(__u32 index)
{
	struct device *device = bpf_map_lookup_elem(&devices, &index);

	return device && device->flags & DEVICE_XDP;
}

// Find the route of a packet; 0 if it does not leave by one of the named devices.
INLINE int find_route(struct xdp_md *ctx, const struct view *view, const struct flow_key *key,
		      struct bpf_fib_lookup *route)
{
	route->ifindex = ctx->ingress_ifindex;
	route->l4_protocol = key->protocol;
	route->tot_len = view->length;
	if (view->version == 4) {
		route->family = 2; // AF_INET
		route->tos = ((struct iphdr *)view->ip)->tos;
		route->ipv4_src = key->source.words[3];
		route->ipv4_dst = key->destination.words[3];
	} else {
		route->family = 10; // AF_INET6
		__builtin_memcpy(route->ipv6_src, &key->source, 16);
		__builtin_memcpy(route->ipv6_dst, &key->destination, 16);
	}
	if (bpf_fib_lookup(ctx, route, sizeof(*route), 0) != BPF_FIB_LKUP_RET_SUCCESS)
		return 0;
	return is_accelerated(route->ifindex);
}

// Return how much a checksum over 32-bit words has to change; words that stay cancel out. Two calls
// of bpf_csum_diff() instead take 65 ns more, of 460 in all.
INLINE __u64 difference(const __u32 *before, const __u32 *after, __u32 words)
{
	__u64 sum = 0;

#pragma unroll
	for (__u32 n = 0; n < words; n++)
		sum += (__u64)after[n] + (__u32)~before[n];
	return sum;
}

INLINE __u16 changed(__u16 checksum, __u64 difference)
{
	__u64 sum = difference + (__u16)~checksum;

	return fold((sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32));
}

// A router decrements the time to live; update the checksum by 16-bit words (RFC 1624).
INLINE void write_ipv4(struct iphdr *ip, const struct flow_key *after, __u64 addresses)
{
	__u32 sum = changed(ip->check, addresses) + (__u32)bpf_htons(0x0100);

	ip->check = sum + (sum >= 0xffff);
	ip->ttl--;
	ip->saddr = after->source.words[3];
	ip->daddr = after->destination.words[3];
}

INLINE void write_ipv6(struct ipv6hdr *ip, const struct flow_key *after)
{
	ip->hop_limit--;
	__builtin_memcpy(&ip->saddr, &after->source, 16);
	__builtin_memcpy(&ip->daddr, &after->destination, 16);
}

// In a key, addresses and ports are consecutive.
INLINE void write_packet(struct view *view, const struct flow_key *before,
			 const struct flow_key *after, const struct bpf_fib_lookup *route)
{
	const __u32 *old = (const __u32 *)before, *new = (const __u32 *)after;
	__u64 addresses = difference(old, new, 8);
	int none = before->protocol == IPPROTO_UDP && !*view->checksum;

	if (!none) {
		*view->checksum =
			changed(*view->checksum, addresses + difference(old + 8, new + 8, 1));
		if (before->protocol == IPPROTO_UDP && !*view->checksum)
			*view->checksum = 0xffff;
	}
	view->ports[0] = after->source_port;
	view->ports[1] = after->destination_port;
	if (view->version == 4)
		write_ipv4(view->ip, after, addresses);
	else
		write_ipv6(view->ip, after);
	__builtin_memcpy(view->ethernet->h_dest, route->dmac, ETH_ALEN);
	__builtin_memcpy(view->ethernet->h_source, route->smac, ETH_ALEN);
}

SEC("xdp") int sm_xdp(struct xdp_md *ctx)
{
	struct flow_key before = { .hook = INGRESS }, after = {};
	struct bpf_fib_lookup route = {};
	struct view view = {};
	__u32 service = 0;
	int kind;

	if (!view_packet(ctx, &view, &before))
		return XDP_PASS;
	kind = translate(&before, &after, &service);
	if (!kind || !find_route(ctx, &view, &after, &route))
		return XDP_PASS;
	write_packet(&view, &before, &after, &route);
	count_sent(kind, &before, &after, service, view.length);
	if (route.ifindex == ctx->ingress_ifindex)
		return XDP_TX;
	return bpf_redirect(route.ifindex, 0);
}
