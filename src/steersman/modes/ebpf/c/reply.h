// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Refusing a packet: put an ICMP port-unreachable before it, and send it back.
//
// If the sender has left the checksum to a device (CHECKSUM_PARTIAL), so does the reply: nothing can
// undo that. The next device without offload sums up the quoted transport header, and stores the
// sum in that header's own place: so the headers go before the packet, which stays in its place. A
// filler makes the sum 0. The reply is right with and without it.
#pragma once

#define QUOTED 20 // bytes after the quoted IP header; the place of a TCP checksum is one of them
#define MEANT 8 // of these bytes, those that are for the sender (RFC 792)
#define REFUSALS 1000 // in a second, as net.ipv4.icmp_msgs_per_sec: senders may be forged

static __u64 refusals_window;
static __u32 refusals;

// The same in both versions of ICMP. linux/icmp.h includes headers that clang lacks for this
// target.
struct icmp_header {
	__u8 type;
	__u8 code;
	__u16 checksum;
	__u32 unused;
};

struct reply4 {
	struct iphdr ip;
	struct icmp_header icmp;
	struct iphdr quoted;
	__u8 start[QUOTED];
} __attribute__((packed, aligned(4)));

struct reply6 {
	struct ipv6hdr ip;
	struct icmp_header icmp;
	struct ipv6hdr quoted;
	__u8 start[QUOTED];
} __attribute__((packed, aligned(4)));

// Sum the quoted bytes up to 0, without the checksum of UDP (that of TCP is not quoted).
INLINE void fill_quoted(const struct packet *packet, __u8 *start)
{
	__u16 *words = (__u16 *)start;

	if (packet->key.protocol == IPPROTO_UDP)
		words[3] = 0;
	words[MEANT / 2] = fold(bpf_csum_diff(NULL, 0, (__be32 *)start, MEANT, 0));
}

// Put the new headers before a packet, which is cut off after the quoted bytes.
INLINE int make_room(struct __sk_buff *skb, const struct packet *packet, __u32 headers)
{
	return !bpf_skb_change_tail(skb, packet->l4 + QUOTED, 0) &&
	       !bpf_skb_adjust_room(skb, headers, BPF_ADJ_ROOM_MAC, 0);
}

NOINLINE int build_reply4(struct __sk_buff *skb, struct packet *packet)
{
	struct reply4 reply = {};

	if (packet->l4 - packet->l3 != sizeof(struct iphdr) ||
	    bpf_skb_load_bytes(skb, packet->l3, &reply.quoted, sizeof(struct iphdr) + MEANT))
		return 0;
	fill_quoted(packet, reply.start);
	reply.ip.version = 4;
	reply.ip.ihl = 5;
	reply.ip.tot_len = bpf_htons(sizeof(reply));
	reply.ip.ttl = 64;
	reply.ip.protocol = IPPROTO_ICMP;
	reply.ip.saddr = reply.quoted.daddr;
	reply.ip.daddr = reply.quoted.saddr;
	reply.ip.check = fold(bpf_csum_diff(NULL, 0, (void *)&reply.ip, sizeof(reply.ip), 0));
	reply.icmp.type = 3;
	reply.icmp.code = 3;
	reply.icmp.checksum = fold(
		bpf_csum_diff(NULL, 0, (void *)&reply.icmp, sizeof(reply) - sizeof(reply.ip), 0));
	return make_room(skb, packet, offsetof(struct reply4, quoted)) &&
	       !bpf_skb_store_bytes(skb, packet->l3, &reply, sizeof(reply), 0);
}

NOINLINE int build_reply6(struct __sk_buff *skb, struct packet *packet)
{
	struct {
		struct in6_addr source, destination;
		__be32 length, next;
	} pseudo = { .length = bpf_htonl(sizeof(struct reply6) - sizeof(struct ipv6hdr)),
		     .next = bpf_htonl(IPPROTO_ICMPV6) };
	struct reply6 reply = {};
	__s64 sum;

	if (packet->l4 - packet->l3 != sizeof(struct ipv6hdr) ||
	    bpf_skb_load_bytes(skb, packet->l3, &reply.quoted, sizeof(struct ipv6hdr) + MEANT))
		return 0;
	fill_quoted(packet, reply.start);
	reply.ip.version = 6;
	reply.ip.payload_len = bpf_htons(sizeof(reply) - sizeof(reply.ip));
	reply.ip.nexthdr = IPPROTO_ICMPV6;
	reply.ip.hop_limit = 64;
	reply.ip.saddr = pseudo.source = reply.quoted.daddr;
	reply.ip.daddr = pseudo.destination = reply.quoted.saddr;
	reply.icmp.type = 1;
	reply.icmp.code = 4;
	sum = bpf_csum_diff(NULL, 0, (void *)&pseudo, sizeof(pseudo), 0);
	reply.icmp.checksum = fold(
		bpf_csum_diff(NULL, 0, (void *)&reply.icmp, sizeof(reply) - sizeof(reply.ip), sum));
	return make_room(skb, packet, offsetof(struct reply6, quoted)) &&
	       !bpf_skb_store_bytes(skb, packet->l3, &reply, sizeof(reply), 0);
}

VERIFIED_ONCE int refuse_packet(struct __sk_buff *skb, struct packet *packet)
{
	struct ethhdr ethernet;
	__u8 swap[ETH_ALEN];

	if (!packet)
		return TC_ACT_SHOT;
	if (!within(&refusals_window, &refusals, REFUSALS)) {
		count(PACKET_DROPPED);
		return TC_ACT_SHOT;
	}
	count(PACKET_REJECTED);
	if (!(packet->ipv4 ? build_reply4(skb, packet) : build_reply6(skb, packet)))
		return TC_ACT_SHOT;
	if (packet->l3) {
		if (!LOAD(skb, 0, ethernet))
			return TC_ACT_SHOT;
		__builtin_memcpy(swap, ethernet.h_dest, ETH_ALEN);
		__builtin_memcpy(ethernet.h_dest, ethernet.h_source, ETH_ALEN);
		__builtin_memcpy(ethernet.h_source, swap, ETH_ALEN);
		bpf_skb_store_bytes(skb, 0, &ethernet, sizeof(ethernet), 0);
	}
	return bpf_redirect(skb->ifindex, packet->key.hook == INGRESS ? 0 : BPF_F_INGRESS);
}
