// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// The presence filter: it tells by the addresses of a packet, before any lookup, that the packet
// belongs to no flow and opens none. This is true for most packets, as most belong to balanced
// sockets.
//
// Programs note the client of a flow before they write it (of the answers to a masqueraded
// connection, that is this node), and tables.py the addresses of frontends. Several addresses
// share a place, and a place stays set after the flow has ended: then a packet is looked up for
// nothing.
#pragma once

INLINE struct marks *presence_filter(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&marks, &zero);
}

INLINE __u32 presence_place(const struct address *address)
{
	const __be32 *words = address->words;

	return (words[0] ^ words[1] ^ words[2] ^ words[3]) * PRESENCE_FACTOR >>
	       (32 - PRESENCE_BITS);
}

INLINE void note_client(const struct address *client)
{
	__u32 place = presence_place(client);
	struct marks *all = presence_filter();

	if (all)
		all->places[place].clients[all->filling & 1] = 1;
}

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

// Read the ports of TCP or UDP; 0 for other protocols.
INLINE int parse_plain_transport(struct packet *packet, const __be16 *start, void *end)
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

// Packets from or to 127.0.0.0/8 are never plain.
INLINE int parse_plain_ipv4(struct packet *packet, const struct iphdr *ip, void *end)
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
	return parse_plain_transport(packet, (const void *)(ip + 1), end);
}

INLINE int parse_plain_ipv6(struct packet *packet, const struct ipv6hdr *ip, void *end)
{
	if ((void *)(ip + 1) > end || ip->version != 6)
		return 0;
	packet->l4 = packet->l3 + sizeof(*ip);
	packet->key.protocol = ip->nexthdr;
	__builtin_memcpy(&packet->key.source, &ip->saddr, 16);
	__builtin_memcpy(&packet->key.destination, &ip->daddr, 16);
	return parse_plain_transport(packet, (const void *)(ip + 1), end);
}

// Parse a plain packet: TCP or UDP, no fragment, no options or extension headers. 0 for others.
INLINE int parse_plain(struct __sk_buff *skb, struct packet *packet)
{
	void *start = (void *)(long)skb->data + packet->l3, *end = (void *)(long)skb->data_end;

	if (skb->protocol == bpf_htons(ETH_P_IP))
		packet->plain = parse_plain_ipv4(packet, start, end);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		packet->plain = parse_plain_ipv6(packet, start, end);
	return packet->plain;
}

// Whether a packet may open a connection: UDP, SYN, INIT.
INLINE int opens(const struct packet *packet)
{
	return packet->key.protocol == IPPROTO_UDP ||
	       (packet->flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

// Whether a plain packet certainly belongs to no flow, and opens none.
INLINE int concerns_no_flow(const struct marks *all, const struct packet *packet)
{
	__u32 source = presence_place(&packet->key.source);
	__u32 destination = presence_place(&packet->key.destination);

	if (!all->trusted || all->places[source].either || all->places[destination].either)
		return 0;
	return !opens(packet) || (!all->places[destination].served &&
				  !in_prefixes(PREFIXES_SERVICE_CIDRS, &packet->key.destination));
}
