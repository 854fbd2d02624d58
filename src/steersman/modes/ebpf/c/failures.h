// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Connections to endpoints that fail, for failures.py: a ring buffer of failures, and the time of
// each endpoint's last answer, as long as something fails. Where nobody watches, nothing is noted.
//
// Programs of devices see the connections whose packets they rewrite, and all ICMP errors;
// failures.bpf.c sees those that were balanced at a socket. Neither looks at anything but the
// packets that open a connection, and those that refuse it.
#pragma once

#define SECOND 1000000000ull
#define EVENTS 16 // failures of one endpoint that are reported in a second
#define ERRORS 256 // ICMP errors of all; anybody may send these, about any address
#define SOONEST_REPEAT (SECOND / 2) // senders repeat a SYN after a second; a copy comes sooner

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
} failures SEC(".maps");
MAP(watching, BPF_MAP_TYPE_ARRAY, __u32, struct watching, 1, BPF_F_MMAPABLE);
MAP(health, BPF_MAP_TYPE_LRU_HASH, struct slot, struct health, 16384, 0);
MAP(answers, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct answer, 1, 0);

// Nothing else would bring the struct into BTF, by which layout.py is compared.
const struct failure *failure_for_btf __attribute__((unused));

// Return the state of the watch; NULL if nobody watches.
INLINE struct watching *watcher(void)
{
	__u32 zero = 0;
	struct watching *found = bpf_map_lookup_elem(&watching, &zero);

	return found && found->until > now() ? found : NULL;
}

// Count up to a limit in each second. Two CPUs may count one for two: it is no exact limit.
INLINE int within(__u64 *window, __u32 *counted, __u32 limit)
{
	if (since(*window) >= SECOND) {
		*window = now();
		*counted = 0;
	}
	*counted += 1;
	return *counted <= limit;
}

// Put a failure into the ring buffer; it is lost if that is full.
VERIFIED_ONCE int send_failure(const struct slot *endpoint, const struct address *client,
			       __u32 protocol, __u32 kind)
{
	struct failure *event;

	if (!endpoint || !client)
		return 0;
	event = bpf_ringbuf_reserve(&failures, sizeof(*event), 0);
	if (!event)
		return 0;
	event->endpoint = endpoint->address;
	event->client = *client;
	event->time = now();
	event->port = endpoint->port;
	event->protocol = protocol;
	event->kind = kind;
	event->zero = 0;
	bpf_ringbuf_submit(event, 0);
	return 0;
}

// Report that a connection to an endpoint of a Service has failed.
VERIFIED_ONCE int report_failure(const struct slot *endpoint, const struct address *client,
				 __u32 protocol, __u32 kind)
{
	struct health *known, first = { .window = now(), .events = 1 };
	struct slot key = {};

	if (!endpoint || !client || !watcher())
		return 0;
	key.address = endpoint->address;
	key.port = endpoint->port;
	known = bpf_map_lookup_elem(&health, &key);
	if (!known)
		bpf_map_update_elem(&health, &key, &first, BPF_NOEXIST);
	else if (!within(&known->window, &known->events, EVENTS))
		return 0;
	return send_failure(endpoint, client, protocol, kind);
}

// Note that an endpoint has answered a SYN, if answers are wanted.
VERIFIED_ONCE int note_answer(const struct slot *endpoint)
{
	struct health *known, first = { .answered = now() };
	struct watching *watch = watcher();
	struct answer *latest;
	struct slot key = {};
	__u32 zero = 0;

	if (!endpoint || !watch || watch->answers < first.answered)
		return 0;
	key.address = endpoint->address;
	key.port = endpoint->port;
	known = bpf_map_lookup_elem(&health, &key);
	if (known)
		known->answered = first.answered;
	else
		bpf_map_update_elem(&health, &key, &first, BPF_NOEXIST);
	latest = bpf_map_lookup_elem(&answers, &zero);
	if (latest) {
		latest->endpoint = key;
		latest->time = first.answered;
	}
	return 0;
}
