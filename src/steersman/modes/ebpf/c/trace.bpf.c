// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Programs that watch one flow while somebody traces (trace.py): at sockets, after the mode's own
// programs, and at tracepoints where the kernel sends, receives and drops a packet.
//
// Links keep them attached, and nothing pins these: they go with the process that traces. The
// mode's own programs know nothing of them, and stay as they are.
//
// What the mode's programs did to a packet is seen in its addresses: devices receive it before the
// programs of ingress, and send it after those of egress. Which flow a rewritten packet belongs to
// is found in `flows`, and for a balanced socket by its cookie.
#include "../../../host/packet.bpf.h"
#include "basics.h"
#include "constants.h"
#include "structs.h"

#define MAXIMUM_FLOWS 256

// What to watch; trace_events.py writes it before it attaches the programs.
struct trace_filter {
	struct address source; // zero: any
	struct address destination;
	__be16 source_port; // zero: any
	__be16 destination_port;
	__u8 protocol;
	__u8 zero[3];
	__u32 netns; // inode of the node's network namespace
	__u32 flows; // so far
	__u32 lost; // events for which there was no room
	__u32 zero2;
};

enum trace_kind {
	CALLED = 1, // connect() or sendmsg(), after the mode's program
	SENT, // by a device, after egress
	RECEIVED, // by a device, before ingress
	FREED, // the kernel drops a packet
};

struct trace_event {
	__u64 time; // CLOCK_MONOTONIC, ns
	__u64 netns_cookie; // CALLED
	__u64 location; // FREED: in the kernel
	struct flow_key packet;
	__s32 result; // CALLED: the errno, 0 if it goes on; FREED: the reason
	__u32 flow;
	__u32 netns; // inode of the device's network namespace
	__u32 process;
	__u8 kind;
	__u8 translated; // CALLED: the socket was balanced
	__u8 datagram; // CALLED: by sendmsg()
	__u8 reply; // whether the packet is an answer
	__u8 tcp_flags;
	__u8 quoted; // `packet` is quoted by an ICMP error
	__u8 zero[2];
	__u32 device; // its index
	char name[16]; // of the device or process
	__u32 zero2;
};

// Nothing else would bring the struct into BTF, by which trace_events.py compares it.
const struct trace_event *only_for_btf __attribute__((unused));

struct trace_watched {
	__u32 flow;
	__u32 reply;
};

// A packet, while a program looks at it.
struct view {
	struct flow_key key;
	__u32 flow;
	__u32 netns;
	__u8 reply;
	__u8 tcp_flags;
	__u8 quoted;
	__u8 zero;
};

MAP(filter, BPF_MAP_TYPE_ARRAY, __u32, struct trace_filter, 1, 0);
// Flows by addresses and ports (with hook 0), and by the cookie of their socket.
MAP(watched, BPF_MAP_TYPE_LRU_HASH, struct flow_key, struct trace_watched, 4096, 0);
MAP(sockets, BPF_MAP_TYPE_LRU_HASH, __u64, __u32, 1024, 0);

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} events SEC(".maps");

// Maps of the mode, which are pinned; the declarations are those of maps.h.
MAP(flows, BPF_MAP_TYPE_LRU_HASH, struct flow_key, struct flow, 262144, 0);
MAP(reverses, BPF_MAP_TYPE_LRU_HASH, struct reverse_key, struct reverse, 65536, 0);
MAP(crowded, BPF_MAP_TYPE_LRU_HASH, __u64, struct peer, 16384, 0);
MAP(seats, BPF_MAP_TYPE_ARRAY, __u32, struct socket_slot, SOCKET_SLOTS, BPF_F_MMAPABLE);

#include "peers.h"

INLINE struct trace_filter *get_filter(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&filter, &zero);
}

// Begin an event; bpf_ringbuf_submit ends it.
INLINE struct trace_event *begin(struct trace_filter *wanted, __u8 kind, __u32 flow)
{
	struct trace_event *event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);

	if (!event) {
		__sync_fetch_and_add(&wanted->lost, 1);
		return NULL;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->time = bpf_ktime_get_ns();
	event->kind = kind;
	event->flow = flow;
	return event;
}

// Watch packets with these addresses and ports, and their answers.
NOINLINE int watch(const struct flow_key *packet, __u32 flow, __u32 reply)
{
	struct trace_watched value = { .flow = flow, .reply = reply };
	struct flow_key key = *packet, back;

	bpf_map_update_elem(&watched, &key, &value, BPF_ANY);
	reversed(&key, 0, &back);
	value.reply = !reply;
	bpf_map_update_elem(&watched, &back, &value, BPF_ANY);
	return 0;
}

INLINE __u32 new_flow(struct trace_filter *wanted)
{
	__u32 number = __sync_fetch_and_add(&wanted->flows, 1);

	return number < MAXIMUM_FLOWS ? number + 1 : 0;
}

INLINE int is_zero(const struct address *address)
{
	return !address->halves[0] && !address->halves[1];
}

INLINE int same(const struct address *a, const struct address *b)
{
	return a->halves[0] == b->halves[0] && a->halves[1] == b->halves[1];
}

// Whether something has the wanted destination, and the wanted source as far as that is known.
INLINE int is_wanted(const struct trace_filter *wanted, const struct flow_key *key)
{
	if (key->protocol != wanted->protocol ||
	    key->destination_port != wanted->destination_port ||
	    !same(&key->destination, &wanted->destination))
		return 0;
	if (wanted->source_port && key->source_port && key->source_port != wanted->source_port)
		return 0;
	return is_zero(&wanted->source) || is_zero(&key->source) ||
	       same(&key->source, &wanted->source);
}

// Sockets. These programs run after the mode's, and change nothing.

// Find the Service that a socket was balanced from: as restore() in socket.h.
INLINE int find_service(__u64 cookie, const struct flow_key *now, struct flow_key *out)
{
	struct reverse_key key = {
		.cookie = cookie,
		.endpoint = now->destination,
		.port = now->destination_port,
	};
	struct peer *peer = find_peer(cookie);
	struct reverse *known;

	if (peer && peer->endpoint_port == now->destination_port &&
	    same(&peer->endpoint, &now->destination)) {
		out->destination = peer->frontend;
		out->destination_port = peer->frontend_port;
		return 1;
	}
	known = bpf_map_lookup_elem(&reverses, &key);
	if (!known)
		return 0;
	out->destination = known->frontend;
	out->destination_port = known->port;
	return 1;
}

INLINE int report_call(struct bpf_sock_addr *ctx, const struct flow_key *now, int datagram)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct trace_filter *wanted = get_filter();
	struct flow_key asked = *now;
	struct trace_event *event;
	int translated;
	__u32 flow;

	if (!wanted || now->protocol != wanted->protocol)
		return 1;
	translated = find_service(cookie, now, &asked);
	if (!is_wanted(wanted, &asked) && !is_wanted(wanted, now))
		return 1;
	flow = new_flow(wanted);
	if (!flow)
		return 1;
	bpf_map_update_elem(&sockets, &cookie, &flow, BPF_ANY);
	event = begin(wanted, CALLED, flow);
	if (!event)
		return 1;
	event->packet = *now;
	event->translated = translated;
	event->datagram = datagram;
	event->result = bpf_get_retval();
	event->netns_cookie = bpf_get_netns_cookie(ctx);
	event->process = bpf_get_current_pid_tgid() >> 32;
	bpf_get_current_comm(event->name, sizeof(event->name));
	bpf_ringbuf_submit(event, 0);
	return 1;
}

// As in socket.h, each program reads the fields of one family only.
INLINE void read_ipv4(struct bpf_sock_addr *ctx, struct flow_key *out)
{
	map_ipv4(out->destination.words, ctx->user_ip4);
	if (ctx->sk && ctx->sk->src_ip4)
		map_ipv4(out->source.words, ctx->sk->src_ip4);
}

INLINE void read_ipv6(struct bpf_sock_addr *ctx, struct flow_key *out)
{
	out->destination.words[0] = ctx->user_ip6[0];
	out->destination.words[1] = ctx->user_ip6[1];
	out->destination.words[2] = ctx->user_ip6[2];
	out->destination.words[3] = ctx->user_ip6[3];
	if (!ctx->sk)
		return;
	out->source.words[0] = ctx->sk->src_ip6[0];
	out->source.words[1] = ctx->sk->src_ip6[1];
	out->source.words[2] = ctx->sk->src_ip6[2];
	out->source.words[3] = ctx->sk->src_ip6[3];
}

#define WATCH_CALL(hook, version, datagram) \
	SEC("cgroup/" #hook #version) int trace_##hook##version(struct bpf_sock_addr *ctx) \
	{ \
		struct flow_key now = { \
			.destination_port = (__be16)ctx->user_port, \
			.protocol = ctx->protocol, \
		}; \
\
		read_ipv##version(ctx, &now); \
		if (ctx->sk) \
			now.source_port = bpf_htons(ctx->sk->src_port); \
		return report_call(ctx, &now, datagram); \
	}

WATCH_CALL(connect, 4, 0)
WATCH_CALL(connect, 6, 0)
WATCH_CALL(sendmsg, 4, 1)
WATCH_CALL(sendmsg, 6, 1)

// Packets

// Read a packet's addresses and ports; of an ICMP error those that it quotes. Return whether the
// packet opens a connection, answers that, or ends it at once: others are not reported.
NOINLINE int read_packet(const __u8 *start, __be16 protocol, struct view *out)
{
	struct route route = {};
	const __u8 *transport = read_route(start, protocol, &route);

	if (!transport)
		return 0;
	__builtin_memcpy(&out->key.source, route.source, 16);
	__builtin_memcpy(&out->key.destination, route.destination, 16);
	out->key.protocol = route.protocol;
	out->quoted = route.quoted;
	READ(out->key.source_port, transport);
	READ(out->key.destination_port, transport + 2);
	if (!out->quoted)
		out->tcp_flags = read_flags(transport, route.protocol);
	return out->quoted || out->key.protocol == IPPROTO_UDP ||
	       out->tcp_flags & (TCP_SYN | TCP_RST);
}

// Find the packet that a client has sent, given it as rewritten: in the entries for its answers.
NOINLINE int find_origin(const struct flow_key *packet, struct flow_key *out)
{
	struct flow_key back;
	struct flow *found;

	*out = *packet;
	reversed(packet, EGRESS, &back);
	found = bpf_map_lookup_elem(&flows, &back);
	if (!found) {
		back.hook = INGRESS;
		found = bpf_map_lookup_elem(&flows, &back);
	}
	if (found && found->kind == TO_CLIENT) {
		out->source = back.destination = found->address;
		out->source_port = back.destination_port = found->port;
		back.hook = EGRESS;
		found = bpf_map_lookup_elem(&flows, &back);
	}
	if (!found || found->kind != FROM_SERVICE)
		return 0;
	out->destination = found->address;
	out->destination_port = found->port;
	return 1;
}

// Find the flow of a packet: by its addresses, by its socket, in `flows`, or by the filter.
NOINLINE int find_flow(struct trace_filter *wanted, struct view *now, __u64 cookie)
{
	struct trace_watched *known;
	struct flow_key key = now->key, origin;
	__u32 *flow;

	known = bpf_map_lookup_elem(&watched, &key);
	if (known) {
		now->flow = known->flow;
		// An ICMP error answers the packet that it quotes.
		now->reply = now->quoted ? !known->reply : known->reply;
		return 1;
	}
	if (now->tcp_flags & (TCP_ACK | TCP_RST))
		return 0;
	if (now->quoted) { // egress has turned a packet of this node around
		if (now->netns != wanted->netns || !is_wanted(wanted, &key))
			return 0;
		now->reply = 1;
		now->flow = new_flow(wanted);
		if (now->flow)
			watch(&key, now->flow, 0);
		return now->flow != 0;
	}
	flow = cookie ? bpf_map_lookup_elem(&sockets, &cookie) : NULL;
	if (flow) {
		now->flow = *flow;
	} else if (now->netns == wanted->netns) {
		if (find_origin(&key, &origin) && is_wanted(wanted, &origin)) {
			known = bpf_map_lookup_elem(&watched, &origin);
			now->flow = known ? known->flow : new_flow(wanted);
		} else if (is_wanted(wanted, &key)) {
			now->flow = new_flow(wanted);
		}
	}
	if (now->flow)
		watch(&key, now->flow, 0);
	return now->flow != 0;
}

NOINLINE int report_packet(const struct sk_buff *skb, const __u8 *start, __u8 kind, __u64 location,
			   __u32 reason)
{
	struct trace_filter *wanted = get_filter();
	struct net_device *device = BPF_CORE_READ(skb, dev);
	struct sock *sk = BPF_CORE_READ(skb, sk);
	struct trace_event *event;
	struct view now = {};

	if (!wanted || !read_packet(start, BPF_CORE_READ(skb, protocol), &now) ||
	    now.key.protocol != wanted->protocol)
		return 0;
	if (device)
		now.netns = BPF_CORE_READ(device, nd_net.net, ns.inum);
	if (!find_flow(wanted, &now, sk ? BPF_CORE_READ(sk, __sk_common.skc_cookie.counter) : 0))
		return 0;
	event = begin(wanted, kind, now.flow);
	if (!event)
		return 0;
	event->packet = now.key;
	event->netns = now.netns;
	event->reply = now.reply;
	event->tcp_flags = now.tcp_flags;
	event->quoted = now.quoted;
	event->location = location;
	event->result = reason;
	if (device) {
		event->device = BPF_CORE_READ(device, ifindex);
		bpf_probe_read_kernel_str(event->name, sizeof(event->name), device->name);
	}
	bpf_ringbuf_submit(event, 0);
	return 0;
}

SEC("tp_btf/net_dev_queue") int trace_sent(__u64 *ctx)
{
	const struct sk_buff *skb = (void *)ctx[0];

	return report_packet(skb, network_header(skb), SENT, 0, 0);
}

// The kernel sets network_header only after this tracepoint.
SEC("tp_btf/netif_receive_skb") int trace_received(__u64 *ctx)
{
	const struct sk_buff *skb = (void *)ctx[0];

	return report_packet(skb, BPF_CORE_READ(skb, data), RECEIVED, 0, 0);
}

SEC("tp_btf/kfree_skb") int trace_freed(__u64 *ctx)
{
	const struct sk_buff *skb = (void *)ctx[0];

	return report_packet(skb, network_header(skb), FREED, ctx[1], ctx[2]);
}

char LICENSE[] SEC("license") = "GPL";
