// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// A packet as programs at the kernel's tracepoints (tp_btf) see it: the kernel's structs, and its
// headers.
#pragma once
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#define INLINE static __always_inline
// A function that the verifier checks once per call, not once per path.
#define NOINLINE static __noinline

#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16

#define SCTP_INIT 1
#define SCTP_INIT_ACK 2
#define SCTP_ABORT 6

// The fields of the kernel's structs that are read; libbpf finds where they are.
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct ns_common {
	unsigned int inum;
};

struct net {
	struct ns_common ns;
};

struct possible_net {
	struct net *net;
};

struct net_device {
	int ifindex;
	char name[16];
	struct possible_net nd_net;
};

struct cookie {
	__u64 counter;
};

struct sock_common {
	__u16 skc_num; // the local port
	struct possible_net skc_net;
	struct cookie skc_cookie;
};

struct sock {
	struct sock_common __sk_common;
};

struct sk_buff {
	struct net_device *dev;
	struct sock *sk;
	unsigned int len;
	__u32 mark;
	unsigned char *head;
	unsigned char *data;
	__u16 network_header;
	__be16 protocol;
};

#pragma clang attribute pop

#define READ(to, from) bpf_probe_read_kernel(&(to), sizeof(to), from)

// Where a packet comes from and goes to; IPv4 addresses as ::ffff:a.b.c.d.
struct route {
	__be32 source[4];
	__be32 destination[4];
	__u8 protocol;
	__u8 quoted; // it is quoted by an ICMP error
	__u8 zero[2];
};

// The network header of a packet; unknown in tp_btf/netif_receive_skb, where `data` is it.
INLINE const __u8 *network_header(const struct sk_buff *skb)
{
	return BPF_CORE_READ(skb, head) + BPF_CORE_READ(skb, network_header);
}

INLINE void map_ipv4(__be32 *address, __be32 ip)
{
	address[0] = address[1] = 0;
	address[2] = bpf_htonl(0xffff);
	address[3] = ip;
}

// Read the IP header at `start`; return the header after it, NULL if it has none of ours.
INLINE const __u8 *read_ip(const __u8 *start, int version, struct route *out)
{
	struct ipv6hdr ip6;
	struct iphdr ip4;

	if (version == 4) {
		if (READ(ip4, start) || ip4.version != 4 || ip4.frag_off & bpf_htons(0x1fff))
			return NULL;
		map_ipv4(out->source, ip4.saddr);
		map_ipv4(out->destination, ip4.daddr);
		out->protocol = ip4.protocol;
		return start + ip4.ihl * 4;
	}
	if (READ(ip6, start) || ip6.version != 6)
		return NULL;
	__builtin_memcpy(out->source, &ip6.saddr, 16);
	__builtin_memcpy(out->destination, &ip6.daddr, 16);
	out->protocol = ip6.nexthdr;
	return start + sizeof(ip6);
}

INLINE int is_icmp_error(int version, __u8 type)
{
	return version == 4 ? type == 3 || type == 11 || type == 12 : type >= 1 && type <= 4;
}

// Read the IP header at `start`, of an ICMP error the one that it quotes; return the transport
// header, NULL if there is none. An error quotes eight bytes of it.
INLINE const __u8 *read_route(const __u8 *start, __be16 protocol, struct route *out)
{
	int version = protocol == bpf_htons(ETH_P_IP) ? 4 : 6;
	const __u8 *transport;
	__u8 type = 0;

	if (version == 6 && protocol != bpf_htons(ETH_P_IPV6))
		return NULL;
	transport = read_ip(start, version, out);
	if (!transport || out->protocol != (version == 4 ? IPPROTO_ICMP : IPPROTO_ICMPV6))
		return transport;
	READ(type, transport);
	if (!is_icmp_error(version, type))
		return NULL;
	out->quoted = 1;
	return read_ip(transport + 8, version, out);
}

// Return the flags of a TCP header, and for SCTP those of the same meaning.
INLINE __u8 read_flags(const __u8 *transport, __u8 protocol)
{
	__u8 value = 0;

	if (protocol == IPPROTO_TCP) {
		READ(value, transport + 13);
		return value;
	}
	if (protocol != IPPROTO_SCTP)
		return 0;
	READ(value, transport + 12); // the type of the first chunk
	if (value == SCTP_INIT)
		return TCP_SYN;
	if (value == SCTP_INIT_ACK)
		return TCP_SYN | TCP_ACK;
	return value == SCTP_ABORT ? TCP_RST | TCP_ACK : 0;
}
