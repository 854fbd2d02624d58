// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// What can be told of a packet by its addresses alone, before any map is searched: that it is of no
// flow, and opens none. That holds for most, for most are of connections that sockets made.
//
// Who writes a flow entry marks the address of its client before (where answers to a masqueraded
// connection come in, that is this node's), and marks.py what frontends have for an address.
// Several addresses share a place, and marks outlive what they were set for: then a packet is
// looked at in vain.
#pragma once

INLINE struct marks *all_marks(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&marks, &zero);
}

INLINE __u32 mark_place(__be32 folded)
{
	return folded * MARK_FACTOR >> (32 - MARK_BITS);
}

INLINE __u32 mark_place4(__be32 ip)
{
	return mark_place(ip ^ bpf_htonl(0xffff));
}

INLINE __u32 mark_place6(const __be32 *words)
{
	return mark_place(words[0] ^ words[1] ^ words[2] ^ words[3]);
}

INLINE void mark_client(const struct address *client)
{
	__u32 place = mark_place6(client->words);
	struct marks *all = all_marks();

	if (all)
		all->places[place].clients[all->filling & 1] = 1;
}

INLINE __u32 device_flags(struct __sk_buff *skb)
{
	__u32 index = skb->ifindex;
	struct device *device = bpf_map_lookup_elem(&devices, &index);

	return device ? device->flags : 0;
}

// Length of the link's header. Devices that have none share a place with some that do.
INLINE __u32 link_header(struct __sk_buff *skb, const struct marks *all)
{
	if (all && !all->bare[skb->ifindex % BARE_PLACES])
		return ETH_HLEN;
	return device_flags(skb) & DEVICE_NO_ETHERNET ? 0 : ETH_HLEN;
}

// What a plain packet of TCP or UDP says.
struct glance {
	__u32 source; // places of the two addresses
	__u32 destination;
	__u32 opens;
	struct address to; // of a packet that opens a connection
};

// 0 where there is more to it.
INLINE int glance_transport(struct glance *seen, __u8 protocol, __u8 *start, void *end)
{
	seen->opens = protocol == IPPROTO_UDP;
	if (protocol != IPPROTO_TCP)
		return seen->opens;
	if ((void *)start + 14 > end)
		return 0;
	seen->opens = (start[13] & (TCP_SYN | TCP_ACK)) == TCP_SYN;
	return 1;
}

// What concerns 127.0.0.0/8 is never plain.
INLINE int glance_ipv4(struct glance *seen, struct iphdr *ip, void *end)
{
	if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl != 5 ||
	    ip->frag_off & bpf_htons(0x3fff) || in_loopback4(ip->saddr) ||
	    in_loopback4(ip->daddr) || !glance_transport(seen, ip->protocol, (void *)(ip + 1), end))
		return 0;
	seen->source = mark_place4(ip->saddr);
	seen->destination = mark_place4(ip->daddr);
	if (seen->opens)
		set_ipv4(&seen->to, ip->daddr);
	return 1;
}

INLINE int glance_ipv6(struct glance *seen, struct ipv6hdr *ip, void *end)
{
	if ((void *)(ip + 1) > end || ip->version != 6 ||
	    !glance_transport(seen, ip->nexthdr, (void *)(ip + 1), end))
		return 0;
	seen->source = mark_place6(ip->saddr.in6_u.u6_addr32);
	seen->destination = mark_place6(ip->daddr.in6_u.u6_addr32);
	if (seen->opens)
		__builtin_memcpy(&seen->to, &ip->daddr, 16);
	return 1;
}

// Whether a packet is certainly of no flow, and opens none.
INLINE int is_nobodys(struct __sk_buff *skb)
{
	void *start = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	const struct marks *all = all_marks();
	struct glance seen;

	if (!all || !all->trusted)
		return 0;
	start += link_header(skb, all);
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (!glance_ipv4(&seen, start, end))
			return 0;
	} else if (skb->protocol != bpf_htons(ETH_P_IPV6) || !glance_ipv6(&seen, start, end)) {
		return 0;
	}
	if (all->places[seen.source].either || all->places[seen.destination].either)
		return 0;
	return !seen.opens || (!all->places[seen.destination].served &&
			       !in_prefixes(PREFIXES_SERVICE_CIDRS, &seen.to));
}
