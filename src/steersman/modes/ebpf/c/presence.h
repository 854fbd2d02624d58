// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// What can be told of a packet by its addresses alone, before any map is searched: that it is of no
// flow, and opens none. That holds for most, for most are of connections that sockets made.
//
// Who writes a flow entry marks the address of its client before (where answers to a masqueraded
// connection come in, that is this node's), and presence.py what frontends have for an address.
// Several addresses share a place, and marks outlive what they were set for: then a packet is
// looked at in vain.
#pragma once

INLINE struct marks *all_marks(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&marks, &zero);
}

INLINE __u32 presence_place(const struct address *address)
{
	const __be32 *words = address->words;

	return (words[0] ^ words[1] ^ words[2] ^ words[3]) * PRESENCE_FACTOR >> (32 - PRESENCE_BITS);
}

INLINE void mark_client(const struct address *client)
{
	__u32 place = presence_place(client);
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
	if (all && !all->bare[skb->ifindex % L3_DEVICE_PLACES])
		return ETH_HLEN;
	return device_flags(skb) & DEVICE_NO_ETHERNET ? 0 : ETH_HLEN;
}

// Where the ports are, read what TCP and UDP say; 0 where there is more to it.
INLINE int glance_transport(struct packet *packet, const __be16 *start, void *end)
{
	if ((void *)(start + 2) > end)
		return 0;
	packet->has_ports = 1;
	packet->key.source_port = start[0];
	packet->key.destination_port = start[1];
	if (packet->key.protocol != IPPROTO_TCP)
		return packet->key.protocol == IPPROTO_UDP;
	if ((void *)start + 14 > end)
		return 0;
	packet->flags = ((const __u8 *)start)[13];
	return 1;
}

// What concerns 127.0.0.0/8 is never plain.
INLINE int glance_ipv4(struct packet *packet, const struct iphdr *ip, void *end)
{
	if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl != 5 ||
	    ip->frag_off & bpf_htons(0x3fff) || in_loopback4(ip->saddr) || in_loopback4(ip->daddr))
		return 0;
	packet->ipv4 = 1;
	packet->checksum = ip->check;
	packet->l4 = packet->l3 + sizeof(*ip);
	packet->key.protocol = ip->protocol;
	set_ipv4(&packet->key.source, ip->saddr);
	set_ipv4(&packet->key.destination, ip->daddr);
	return glance_transport(packet, (const void *)(ip + 1), end);
}

INLINE int glance_ipv6(struct packet *packet, const struct ipv6hdr *ip, void *end)
{
	if ((void *)(ip + 1) > end || ip->version != 6)
		return 0;
	packet->l4 = packet->l3 + sizeof(*ip);
	packet->key.protocol = ip->nexthdr;
	__builtin_memcpy(&packet->key.source, &ip->saddr, 16);
	__builtin_memcpy(&packet->key.destination, &ip->daddr, 16);
	return glance_transport(packet, (const void *)(ip + 1), end);
}

// Fill a packet that is plain: TCP or UDP, whole, without options or extension headers.
INLINE int glance(struct __sk_buff *skb, struct packet *packet)
{
	void *start = (void *)(long)skb->data + packet->l3, *end = (void *)(long)skb->data_end;

	if (skb->protocol == bpf_htons(ETH_P_IP))
		packet->plain = glance_ipv4(packet, start, end);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		packet->plain = glance_ipv6(packet, start, end);
	return packet->plain;
}

// Only a SYN, or an INIT, opens a connection. Asked first: most packets are of connections that
// sockets have made, or of others.
INLINE int opens(const struct packet *packet)
{
	return packet->key.protocol == IPPROTO_UDP ||
	       (packet->flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

// Whether a plain packet is certainly of no flow, and opens none.
INLINE int concerns_no_flow(const struct marks *all, const struct packet *packet)
{
	__u32 source = presence_place(&packet->key.source);
	__u32 destination = presence_place(&packet->key.destination);

	if (!all->trusted || all->places[source].either || all->places[destination].either)
		return 0;
	return !opens(packet) || (!all->places[destination].served &&
				  !in_prefixes(PREFIXES_SERVICE_CIDRS, &packet->key.destination));
}
