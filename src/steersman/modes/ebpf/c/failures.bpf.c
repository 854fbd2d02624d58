// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Programs that see connections fail which were balanced at a socket: at tracepoints where the
// kernel repeats a segment, tells a socket an error, or changes its state (failures.py).
//
// They are attached while somebody watches, by links without pins: they go with that process. Only
// sockets that have a peer (peers.h) are looked at, in every network namespace. The first two of
// these tracepoints do not fire for connections that succeed, so these cost nothing.
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/errno.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#define CLOCK bpf_ktime_get_ns // the other one is not for programs of tracepoints
#include "basics.h"
#include "constants.h"
#include "structs.h"
#include "failures.h"

// The fields of the kernel's structs that are read here; libbpf finds where they are.
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct in6_addr {
	__be32 words[4];
};

struct cookie {
	__u64 counter;
};

struct sock_common {
	__be32 skc_rcv_saddr;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	struct in6_addr skc_v6_rcv_saddr;
	struct cookie skc_cookie;
};

struct sock {
	struct sock_common __sk_common;
	int sk_err;
	__u16 sk_protocol;
};

#pragma clang attribute pop

#define SYN_SENT 2 // states of TCP
#define OPEN 1
#define CLOSED 7
#define IPV4 2 // AF_INET

// Maps of the mode, which are pinned; the declarations are those of maps.h.
MAP(crowded, BPF_MAP_TYPE_LRU_HASH, __u64, struct peer, 16384, 0);
MAP(seats, BPF_MAP_TYPE_ARRAY, __u32, struct socket_slot, SOCKET_SLOTS, BPF_F_MMAPABLE);

#include "peers.h"

// Find the endpoint of a socket; 0 if it was not balanced.
INLINE int find_endpoint(const struct sock *sk, struct slot *out)
{
	struct peer *peer = find_peer(BPF_CORE_READ(sk, __sk_common.skc_cookie.counter));

	if (!peer)
		return 0;
	out->address = peer->endpoint;
	out->port = peer->endpoint_port;
	return 1;
}

INLINE void read_client(const struct sock *sk, struct address *out)
{
	if (BPF_CORE_READ(sk, __sk_common.skc_family) == IPV4) {
		out->words[2] = bpf_htonl(0xffff);
		out->words[3] = BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
	} else {
		BPF_CORE_READ_INTO(out, sk, __sk_common.skc_v6_rcv_saddr);
	}
}

INLINE int report_socket(const struct sock *sk, __u32 protocol, __u32 kind)
{
	struct address client = {};
	struct slot endpoint = {};

	if (!find_endpoint(sk, &endpoint))
		return 0;
	read_client(sk, &client);
	return report_failure(&endpoint, &client, protocol, kind);
}

SEC("tp_btf/tcp_retransmit_skb") int failure_repeat(__u64 *ctx)
{
	const struct sock *sk = (void *)ctx[0];

	if (BPF_CORE_READ(sk, __sk_common.skc_state) != SYN_SENT)
		return 0;
	return report_socket(sk, IPPROTO_TCP, FAILED_SILENT);
}

// A socket gets an error: of TCP while it connects (the kernel closes it before or after
// that), of UDP at any time. No device sees what this node itself refuses.
SEC("tp_btf/inet_sk_error_report") int failure_error(__u64 *ctx)
{
	const struct sock *sk = (void *)ctx[0];
	__u32 protocol = BPF_CORE_READ(sk, sk_protocol);
	int error = BPF_CORE_READ(sk, sk_err);
	__u8 state;

	if (protocol == IPPROTO_TCP) {
		state = BPF_CORE_READ(sk, __sk_common.skc_state);
		if (state != SYN_SENT && state != CLOSED)
			return 0;
	} else if (protocol != IPPROTO_UDP) {
		return 0;
	}
	if (error == ECONNREFUSED)
		return report_socket(sk, protocol, FAILED_REFUSED);
	if (error == EHOSTUNREACH || error == ENETUNREACH)
		return report_socket(sk, protocol, FAILED_UNREACHABLE);
	return 0;
}

// This one runs for all connections, so it is attached only while something fails.
SEC("tp_btf/inet_sock_set_state") int failure_answer(__u64 *ctx)
{
	const struct sock *sk = (void *)ctx[0];
	int before = ctx[1], after = ctx[2];
	struct slot endpoint = {};

	if (before != SYN_SENT || after != OPEN || !find_endpoint(sk, &endpoint))
		return 0;
	return note_answer(&endpoint);
}

char LICENSE[] SEC("license") = "GPL";
