// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// ICMP errors about rewritten packets, such as path MTU: the quoted packet is rewritten back.
#pragma once

// Parse the quoted packet, after the eight bytes of the ICMP header.
INLINE int parse_quoted(struct __sk_buff *skb, const struct packet *outer, struct packet *inner)
{
	struct ports ports;

	inner->l3 = outer->l4 + 8;
	inner->key.hook = outer->key.hook;
	if (!(outer->ipv4 ? parse_ipv4(skb, inner) : parse_ipv6(skb, inner)))
		return 0;
	if (!is_transport(inner->key.protocol) || !inner->has_ports || !LOAD(skb, inner->l4, ports))
		return 0;
	inner->key.source_port = ports.source;
	inner->key.destination_port = ports.destination;
	return 1;
}

// The TCP or UDP checksum of the quoted packet stays: it covers bytes that are not quoted.
NOINLINE int rewrite_quoted(struct __sk_buff *skb, struct packet *outer, struct packet *inner,
			    int side, const struct flow *flow)
{
	struct address *old = side ? &inner->key.destination : &inner->key.source;
	__be16 old_port = side ? inner->key.destination_port : inner->key.source_port;
	__s64 change = bpf_csum_diff((__be32 *)old, 16, (__be32 *)&flow->address, 16, 0);
	__be16 new_port = flow->port;

	// In the ICMP checksum the changes of the address and of the IPv4 checksum cancel out.
	if (outer->ipv4)
		bpf_l3_csum_replace(skb, inner->l3 + 10, 0, change, 0);
	else
		bpf_l4_csum_replace(skb, outer->l4 + 2, 0, change, 0);
	store_address(skb, address_offset(inner, side), outer->ipv4, &flow->address);
	bpf_l4_csum_replace(skb, outer->l4 + 2, old_port, new_port, 2);
	return bpf_skb_store_bytes(skb, inner->l4 + side * 2, &new_port, 2, 0);
}

NOINLINE int rewrite_outer(struct __sk_buff *skb, struct packet *outer, int side,
			   const struct address *to)
{
	struct address *own = side ? &outer->key.destination : &outer->key.source;
	__s64 change = bpf_csum_diff((__be32 *)own, 16, (__be32 *)to, 16, 0);

	if (outer->ipv4)
		bpf_l3_csum_replace(skb, outer->l3 + 10, 0, change, 0);
	else
		update_pseudo_header(skb, outer, outer->l4 + 2, change, 0);
	store_address(skb, address_offset(outer, side), outer->ipv4, to);
	*own = *to;
	return 0;
}

// Report that an endpoint cannot be reached, or that nothing listens there. Connections that were
// balanced at a socket have no flow, so every error counts: failures.py compares with the
// endpoints.
VERIFIED_ONCE int report_error(struct __sk_buff *skb, const struct packet *outer,
			       const struct packet *inner)
{
	struct watching *watch = watcher();
	struct slot endpoint = {};
	__u8 icmp[2]; // type and code
	int refused;

	if (!watch || !outer || !inner || !LOAD(skb, outer->l4, icmp))
		return 0;
	if (icmp[0] != (outer->ipv4 ? 3 : 1) || (outer->ipv4 && icmp[1] == 4)) // 4: path MTU
		return 0;
	if (!within(&watch->window, &watch->errors, ERRORS))
		return 0;
	refused = icmp[1] == (outer->ipv4 ? 3 : 4);
	endpoint.address = inner->key.destination;
	endpoint.port = inner->key.destination_port;
	return send_failure(&endpoint, &inner->key.source, inner->key.protocol,
			    refused ? FAILED_REFUSED : FAILED_UNREACHABLE);
}

// An error goes to the sender of the quoted packet; another destination is forged. Its flow rewrites
// the answers to that packet: so of the quoted packet, and of the error, the opposite side. The
// error's source is rewritten if it comes from the destination of that packet; a router in between
// keeps its address. Return the kind of the flow, or 0.
VERIFIED_ONCE int translate_error(struct __sk_buff *skb, struct packet *outer)
{
	struct packet inner = {};
	struct flow_key key;
	struct flow *found;
	struct flow flow;

	if (!outer || !parse_quoted(skb, outer, &inner) ||
	    !same_address(&outer->key.destination, &inner.key.source))
		return 0;
	if (outer->key.hook == INGRESS ||
	    !skb->ingress_ifindex) // once on its way through this node
		report_error(skb, outer, &inner);
	reversed(&inner.key, outer->key.hook, &key);
	found = bpf_map_lookup_elem(&flows, &key);
	if (!found || found->state == WAITING)
		return 0;
	flow = *found;
	rewrite_quoted(skb, outer, &inner, !side_of(&flow), &flow);
	if (side_of(&flow) == DESTINATION)
		rewrite_outer(skb, outer, DESTINATION, &flow.address);
	else if (same_address(&outer->key.source, &inner.key.destination))
		rewrite_outer(skb, outer, SOURCE, &flow.address);
	count(ERRORS_TRANSLATED);
	return flow.kind;
}
