// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Parsing headers, and rewriting addresses, ports and checksums.
#pragma once

#define NEXT -1 // TCX_NEXT, TC_ACT_UNSPEC: programs of other owners run, too

struct packet {
	struct flow_key key;
	__u32 l3; // offsets from the start of the packet
	__u32 l4;
	__u8 ipv4;
	__u8 flags; // of TCP; of SCTP the equivalent ones
	__u8 has_ports; // not in later fragments
	__u8 icmp_error;
	__u8 plain; // no fragment, no options, no extension headers (presence.h)
	__u8 zero;
	__u16 checksum; // of the IPv4 header of a plain packet
};

struct ports {
	__be16 source;
	__be16 destination;
};

#define LOAD(skb, offset, to) (bpf_skb_load_bytes(skb, offset, &(to), sizeof(to)) == 0)

INLINE int is_transport(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP;
}

// Find the ports of a fragment: the first one stores them for the others.
NOINLINE int fragment_ports(struct __sk_buff *skb, struct packet *packet, __u32 id, __u32 first)
{
	struct fragment_key key = {
		.source = packet->key.source,
		.destination = packet->key.destination,
		.id = id,
		.protocol = packet->key.protocol,
		.hook = packet->key.hook,
	};
	struct fragment ports;
	struct fragment *known;

	count(FRAGMENTS);
	if (first) {
		if (!LOAD(skb, packet->l4, ports))
			return 0;
		return !bpf_map_update_elem(&fragments, &key, &ports, BPF_ANY);
	}
	known = bpf_map_lookup_elem(&fragments, &key);
	if (!known)
		return 0;
	packet->key.source_port = known->source_port;
	packet->key.destination_port = known->destination_port;
	packet->has_ports = 0;
	return 1;
}

NOINLINE int parse_ipv4(struct __sk_buff *skb, struct packet *packet)
{
	struct iphdr ip;

	if (!LOAD(skb, packet->l3, ip) || ip.version != 4 || ip.ihl < 5)
		return 0;
	packet->ipv4 = 1;
	packet->l4 = packet->l3 + ip.ihl * 4;
	packet->key.protocol = ip.protocol;
	set_ipv4(&packet->key.source, ip.saddr);
	set_ipv4(&packet->key.destination, ip.daddr);
	packet->has_ports = 1;
	if (ip.frag_off & bpf_htons(0x3fff) && is_transport(ip.protocol))
		return fragment_ports(skb, packet, ip.id, !(ip.frag_off & bpf_htons(0x1fff)));
	return 1;
}

struct extension {
	__u8 next;
	__u8 length;
	__be16 fragment;
	__be32 id;
};

NOINLINE int parse_ipv6(struct __sk_buff *skb, struct packet *packet)
{
	struct extension extension;
	struct ipv6hdr ip;
	__u8 protocol;

	if (!LOAD(skb, packet->l3, ip) || ip.version != 6)
		return 0;
	__builtin_memcpy(&packet->key.source, &ip.saddr, 16);
	__builtin_memcpy(&packet->key.destination, &ip.daddr, 16);
	packet->l4 = packet->l3 + sizeof(ip);
	packet->has_ports = 1;
	protocol = ip.nexthdr;
	for (int header = 0; header < 4; header++) {
		packet->key.protocol = protocol;
		if (protocol != 0 && protocol != 43 && protocol != 60 && protocol != 44)
			return 1;
		if (!LOAD(skb, packet->l4, extension))
			return 0;
		packet->l4 += protocol == 44 ? 8 : (extension.length + 1) * 8;
		packet->key.protocol = extension.next;
		if (protocol == 44)
			return !is_transport(extension.next) ||
			       fragment_ports(skb, packet, extension.id,
					      !(extension.fragment & bpf_htons(0xfff8)));
		protocol = extension.next;
	}
	return 0;
}

// Whether an ICMP message is an error, which quotes a packet.
INLINE int is_error(const struct packet *packet, __u8 type)
{
	if (packet->ipv4)
		return type == 3 || type == 11 || type == 12;
	return type >= 1 && type <= 4;
}

INLINE int parse_transport(struct __sk_buff *skb, struct packet *packet)
{
	__u8 protocol = packet->key.protocol;
	struct ports ports;
	__u8 byte;

	if (protocol == (packet->ipv4 ? IPPROTO_ICMP : IPPROTO_ICMPV6)) {
		if (!LOAD(skb, packet->l4, byte))
			return 0;
		packet->icmp_error = is_error(packet, byte);
		return packet->icmp_error;
	}
	if (!is_transport(protocol))
		return 0;
	if (packet->has_ports) {
		if (!LOAD(skb, packet->l4, ports))
			return 0;
		packet->key.source_port = ports.source;
		packet->key.destination_port = ports.destination;
	}
	if (protocol == IPPROTO_TCP && packet->has_ports) {
		if (!LOAD(skb, packet->l4 + 13, byte))
			return 0;
		packet->flags = byte;
	}
	if (protocol == IPPROTO_SCTP && packet->has_ports && LOAD(skb, packet->l4 + 12, byte))
		packet->flags = sctp_flags(byte);
	return 1;
}

// Parse any packet; 0 for other protocols and damaged packets.
VERIFIED_ONCE int parse(struct __sk_buff *skb, struct packet *packet)
{
	if (!packet)
		return 0;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (!parse_ipv4(skb, packet))
			return 0;
	} else if (skb->protocol != bpf_htons(ETH_P_IPV6) || !parse_ipv6(skb, packet)) {
		return 0;
	}
	return parse_transport(skb, packet);
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

#define SOURCE 0
#define DESTINATION 1

INLINE __u32 address_offset(const struct packet *packet, int side)
{
	return packet->l3 + (packet->ipv4 ? side ? 16 : 12 : side ? 24 : 8);
}

INLINE void store_address(struct __sk_buff *skb, __u32 offset, int ipv4, const struct address *to)
{
	if (ipv4)
		bpf_skb_store_bytes(skb, offset, &to->words[3], 4, 0);
	else
		bpf_skb_store_bytes(skb, offset, to, 16, 0);
}

NOINLINE int rewrite_sctp_port(struct __sk_buff *skb, struct packet *packet, int side, __be16 old,
			       __be16 new)
{
	__u32 change = (__u32)(old ^ new) << (side ? 16 : 0);
	__u32 offset = packet->l4 + 8, crc;

	if (!LOAD(skb, offset, crc))
		return 0;
	if (crc) { // 0: the device computes it
		crc ^= crc_change(change, skb->len - packet->l4);
		bpf_skb_store_bytes(skb, offset, &crc, 4, 0);
	}
	return !bpf_skb_store_bytes(skb, packet->l4 + side * 2, &new, 2, 0);
}

INLINE __u16 fold(__s64 sum)
{
	__u32 value = (__u32)sum;

	value = (value & 0xffff) + (value >> 16);
	value = (value & 0xffff) + (value >> 16);
	return ~value;
}

// Return the difference of the checksums of two addresses (RFC 1624); IPv4 addresses differ in the
// last word only.
INLINE __u32 checksum_change(const struct packet *packet, const struct address *old,
			     const struct address *new)
{
	__u64 sum;

	if (!packet->ipv4)
		return bpf_csum_diff((__be32 *)old, 16, (__be32 *)new, 16, 0);
	sum = (__u64)~old->words[3] + new->words[3];
	return (__u32)sum + (sum >> 32);
}

// Update the checksum of a header that covers an address, for another address (by `change`).
INLINE void update_pseudo_header(struct __sk_buff *skb, const struct packet *packet, __u32 offset,
				 __u32 change, __u32 flags)
{
	bpf_l4_csum_replace(skb, offset, 0, change, flags | BPF_F_PSEUDO_HDR);
	// The helper subtracts the change from what a device has computed over the whole packet, as
	// if the IPv4 header's checksum made up for the address. IPv6 has none.
	if (!packet->ipv4)
		bpf_csum_update(skb, change);
}

// Update the TCP or UDP checksum for another address (by `change`) and port.
INLINE void update_transport_checksum(struct __sk_buff *skb, const struct packet *packet,
				      __u32 change, __be16 old, __be16 new)
{
	int udp = packet->key.protocol == IPPROTO_UDP;
	__u32 offset = packet->l4 + (udp ? 6 : 16), flags = udp ? BPF_F_MARK_MANGLED_0 : 0;

	update_pseudo_header(skb, packet, offset, change, flags);
	if (old != new)
		bpf_l4_csum_replace(skb, offset, old, new, flags | 2);
}

// The part of a plain IPv4 packet that rewriting changes.
struct piece4 {
	__u16 checksum;
	__be32 source;
	__be32 destination;
	__be16 ports[2];
} __attribute__((packed));

INLINE void store_plain4(struct __sk_buff *skb, struct packet *packet, __u32 change)
{
	__u64 sum = (__u64)(__u16)~packet->checksum + change;
	struct piece4 piece = {
		.source = packet->key.source.words[3],
		.destination = packet->key.destination.words[3],
		.ports = { packet->key.source_port, packet->key.destination_port },
	};

	packet->checksum = piece.checksum = fold((__u32)sum + (sum >> 32));
	bpf_skb_store_bytes(skb, packet->l3 + 10, &piece, sizeof(piece), 0);
}

// In IPv6 that part has the order of a flow_key.
INLINE void store_plain6(struct __sk_buff *skb, const struct packet *packet)
{
	bpf_skb_store_bytes(skb, packet->l3 + 8, &packet->key, 36, 0);
}

INLINE void rewrite_other(struct __sk_buff *skb, struct packet *packet, int side,
			  const struct address *to, __be16 old, __be16 new, __u32 change)
{
	__u8 protocol = packet->key.protocol;

	if (packet->ipv4)
		bpf_l3_csum_replace(skb, packet->l3 + 10, 0, change, 0);
	if (packet->has_ports && protocol != IPPROTO_SCTP)
		update_transport_checksum(skb, packet, change, old, new);
	store_address(skb, address_offset(packet, side), packet->ipv4, to);
	if (!packet->has_ports || old == new)
		return;
	if (protocol == IPPROTO_SCTP)
		rewrite_sctp_port(skb, packet, side, old, new);
	else
		bpf_skb_store_bytes(skb, packet->l4 + side * 2, &new, 2, 0);
}

// Rewrite one side of a packet, and of its key.
VERIFIED_ONCE int rewrite(struct __sk_buff *skb, struct packet *packet, int side,
			  const struct address *to, __be16 port)
{
	struct address *own;
	__be16 *own_port, old;
	__u32 change;

	if (!packet || !to)
		return 0;
	own = side ? &packet->key.destination : &packet->key.source;
	own_port = side ? &packet->key.destination_port : &packet->key.source_port;
	old = *own_port;
	change = checksum_change(packet, own, to);
	*own = *to;
	*own_port = port;
	if (!packet->plain) {
		rewrite_other(skb, packet, side, to, old, port, change);
		return 0;
	}
	update_transport_checksum(skb, packet, change, old, port);
	if (packet->ipv4)
		store_plain4(skb, packet, change);
	else
		store_plain6(skb, packet);
	return 0;
}
