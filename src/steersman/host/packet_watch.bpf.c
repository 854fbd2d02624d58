// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Programs that watch one packet and its first answer, in all network namespaces of this machine:
// where devices send and receive it, and where the kernel drops it (packet_watch.py).
//
// Rules change the addresses of a packet on its way, but not what it carries: the first sequence
// number of TCP, the tag of SCTP, the first bytes of a datagram. The first packet from the wanted
// port in the client's namespace tells it. Answers repeat it, or have addresses that were seen.
//
// Links keep the programs attached, and nothing pins these: they go with the process that watches.
#include "packet.bpf.h"

struct ends {
	__be32 source[4]; // IPv4 addresses as ::ffff:a.b.c.d
	__be32 destination[4];
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 zero[3];
};

// What to watch; packet_watch.py writes it before it attaches the programs.
struct watch_filter {
	__be32 source[4]; // zero: any
	__be16 source_port;
	__u8 protocol;
	__u8 known; // whether the packet was seen
	__u32 netns; // inode of the client's network namespace
	__be32 content; // what the packet carries, once it is known
	__u32 lost; // sightings for which there was no room
};

enum sighting_kind {
	SENT = 1, // by a device, after egress
	RECEIVED, // by a device, before ingress
	FREED, // the kernel drops it
};

struct sighting {
	__u64 time; // CLOCK_MONOTONIC, ns
	__u64 location; // FREED: in the kernel
	struct ends ends;
	__u32 reason; // FREED: enum skb_drop_reason
	__u32 netns; // inode of the device's network namespace
	__u32 device; // its index
	__u32 mark;
	__u32 length;
	__u8 kind;
	__u8 reply; // whether the packet is an answer
	__u8 tcp_flags;
	__u8 quoted; // `ends` are quoted by an ICMP error
	char name[16]; // of the device
};

// Nothing else would bring the struct into BTF.
const struct sighting *only_for_btf __attribute__((unused));

// A packet, while a program looks at it.
struct view {
	struct ends ends;
	__be32 content;
	__be32 answered; // the content that it answers
	__u32 netns;
	__u16 socket_port; // of the socket that sent it, if it is in this namespace
	__u8 tcp_flags;
	__u8 quoted;
	__u8 reply;
	__u8 has_content;
	__u8 zero[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct watch_filter);
} filter SEC(".maps");

// The addresses with which the packet was seen.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct ends);
	__type(value, __u8);
} seen SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} sightings SEC(".maps");

// Read the ports, the flags and the content.
INLINE void read_transport(const __u8 *start, struct view *out)
{
	__be32 answered = 0;

	READ(out->ends.source_port, start);
	READ(out->ends.destination_port, start + 2);
	if (!out->quoted)
		out->tcp_flags = read_flags(start, out->ends.protocol);
	if (out->ends.protocol == IPPROTO_TCP) {
		READ(out->content, start + 4);
		out->has_content = 1;
		if (out->quoted)
			return;
		READ(answered, start + 8);
		out->answered = bpf_htonl(bpf_ntohl(answered) - 1);
	} else if (out->quoted) {
		return;
	} else if (out->ends.protocol == IPPROTO_SCTP) {
		READ(out->answered, start + 4);
		if (out->tcp_flags == TCP_SYN) {
			READ(out->content, start + 16);
			out->has_content = 1;
		}
	} else {
		READ(out->content, start + 8);
		out->has_content = 1;
	}
}

// Read a packet; of an ICMP error the one that it quotes. Return 0 if it has no ports.
NOINLINE int read_packet(const __u8 *start, __be16 protocol, struct view *out)
{
	struct route route = {};
	const __u8 *transport = read_route(start, protocol, &route);

	if (!transport)
		return 0;
	__builtin_memcpy(out->ends.source, route.source, 16);
	__builtin_memcpy(out->ends.destination, route.destination, 16);
	out->ends.protocol = route.protocol;
	out->quoted = route.quoted;
	read_transport(transport, out);
	return 1;
}

// Whether the packet was seen with these addresses, or is the answer to one that was.
NOINLINE int was_seen(const struct ends *ends, int answer)
{
	struct ends key = *ends;

	if (answer) {
		__builtin_memcpy(key.source, ends->destination, 16);
		__builtin_memcpy(key.destination, ends->source, 16);
		key.source_port = ends->destination_port;
		key.destination_port = ends->source_port;
	}
	return bpf_map_lookup_elem(&seen, &key) != NULL;
}

INLINE int is_any(const __be32 *address)
{
	return !(address[0] | address[1] | address[2] | address[3]);
}

// Whether this is the first packet of the wanted client. This node may have masqueraded it.
INLINE int is_first(const struct watch_filter *wanted, const struct view *now)
{
	const __be32 *a = wanted->source, *b = now->ends.source;

	if (now->quoted || !now->has_content || now->netns != wanted->netns ||
	    now->tcp_flags & TCP_ACK)
		return 0;
	if (now->socket_port == bpf_ntohs(wanted->source_port))
		return 1;
	if (now->ends.source_port != wanted->source_port)
		return 0;
	return is_any(a) || (a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3]);
}

// Find out whether a packet is the wanted one, or its answer, which sets `reply`.
NOINLINE int is_wanted(struct watch_filter *wanted, struct view *now)
{
	if (!wanted->known) {
		if (!is_first(wanted, now))
			return 0;
		wanted->content = now->content;
		wanted->known = 1;
	}
	if (now->quoted) { // an error answers the packet that it quotes
		now->reply = 1;
		if ((now->has_content && now->content == wanted->content) ||
		    was_seen(&now->ends, 0))
			return 1;
		now->reply = 0;
		return was_seen(&now->ends, 1);
	}
	if (!(now->tcp_flags & TCP_ACK) && now->has_content && now->content == wanted->content)
		return 1;
	now->reply = 1;
	if (now->tcp_flags & TCP_ACK && now->answered == wanted->content)
		return 1;
	if (was_seen(&now->ends, 1))
		return 1;
	now->reply = 0;
	return was_seen(&now->ends, 0);
}

INLINE void read_place(const struct sk_buff *skb, const struct net_device *device, struct view *out)
{
	struct sock *sk = BPF_CORE_READ(skb, sk);

	if (sk)
		out->netns = BPF_CORE_READ(sk, __sk_common.skc_net.net, ns.inum);
	if (device && BPF_CORE_READ(device, nd_net.net, ns.inum) != out->netns)
		out->netns = BPF_CORE_READ(device, nd_net.net, ns.inum);
	else if (sk)
		out->socket_port = BPF_CORE_READ(sk, __sk_common.skc_num);
}

NOINLINE int report(const struct sk_buff *skb, const __u8 *start, __u8 kind, __u64 location,
		    __u32 reason)
{
	struct net_device *device = BPF_CORE_READ(skb, dev);
	struct watch_filter *wanted;
	struct sighting *sighting;
	struct view now = {};
	__u32 zero = 0;
	__u8 one = 1;

	wanted = bpf_map_lookup_elem(&filter, &zero);
	if (!wanted || !read_packet(start, BPF_CORE_READ(skb, protocol), &now) ||
	    now.ends.protocol != wanted->protocol)
		return 0;
	// Of TCP, packets that open a connection, answer that or refuse it; and all that are
	// dropped.
	if (kind != FREED && now.ends.protocol == IPPROTO_TCP && !now.quoted &&
	    !(now.tcp_flags & (TCP_SYN | TCP_RST)))
		return 0;
	read_place(skb, device, &now);
	if (!is_wanted(wanted, &now))
		return 0;
	if (!now.reply && !now.quoted)
		bpf_map_update_elem(&seen, &now.ends, &one, BPF_ANY);
	sighting = bpf_ringbuf_reserve(&sightings, sizeof(*sighting), 0);
	if (!sighting) {
		__sync_fetch_and_add(&wanted->lost, 1);
		return 0;
	}
	__builtin_memset(sighting, 0, sizeof(*sighting));
	sighting->time = bpf_ktime_get_ns();
	sighting->location = location;
	sighting->ends = now.ends;
	sighting->reason = reason;
	sighting->netns = now.netns;
	sighting->mark = BPF_CORE_READ(skb, mark);
	sighting->length = BPF_CORE_READ(skb, len);
	sighting->kind = kind;
	sighting->reply = now.reply;
	sighting->tcp_flags = now.tcp_flags;
	sighting->quoted = now.quoted;
	if (device) {
		sighting->device = BPF_CORE_READ(device, ifindex);
		bpf_probe_read_kernel_str(sighting->name, sizeof(sighting->name), device->name);
	}
	bpf_ringbuf_submit(sighting, 0);
	return 0;
}

SEC("tp_btf/net_dev_queue") int watch_sent(__u64 *ctx)
{
	const struct sk_buff *skb = (void *)ctx[0];

	return report(skb, network_header(skb), SENT, 0, 0);
}

// The kernel sets network_header only after this tracepoint.
SEC("tp_btf/netif_receive_skb") int watch_received(__u64 *ctx)
{
	const struct sk_buff *skb = (void *)ctx[0];

	return report(skb, BPF_CORE_READ(skb, data), RECEIVED, 0, 0);
}

SEC("tp_btf/kfree_skb") int watch_freed(__u64 *ctx)
{
	const struct sk_buff *skb = (void *)ctx[0];

	return report(skb, network_header(skb), FREED, ctx[1], ctx[2]);
}

// Before Linux 5.17 the kernel gives no reason.
SEC("tp_btf/kfree_skb") int watch_freed_somewhere(__u64 *ctx)
{
	const struct sk_buff *skb = (void *)ctx[0];

	return report(skb, network_header(skb), FREED, ctx[1], 0);
}

char LICENSE[] SEC("license") = "GPL";
