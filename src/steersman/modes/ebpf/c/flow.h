// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Connections whose packets are rewritten. Each has two entries, and two more if it is masqueraded:
//
//   TO_ENDPOINT   ingress  client -> service   destination := endpoint
//   MASQUERADE    egress   client -> endpoint  source := node
//   TO_CLIENT     ingress  endpoint -> node    destination := client
//   FROM_SERVICE  egress   endpoint -> client  source := service
//
// Packets of the node itself that were not balanced at a socket have TO_ENDPOINT at egress, and
// FROM_SERVICE at ingress.
//
// flows.py deletes old entries; if the map is full, the kernel evicts entries (LRU). A flood of
// SYNs must neither evict connections of other clients nor use up the ports for masquerading: at
// most HALF_OPEN connections are not complete at a time.
#pragma once

#define MASQUERADE_TRIES 16
#define MASQUERADE_FIRST 10000
#define MASQUERADE_MINIMUM 1000 // if fewer ports are left, take those of the node, too

INLINE void delete_flow(const struct flow_key *key)
{
	if (!bpf_map_delete_elem(&flows, key))
		count(FLOWS_ENDED);
}

// Count a packet to an endpoint (side DESTINATION) or from it.
NOINLINE int tally(__u32 service, const struct slot *slot, int side, __u32 packets, __u32 bytes)
{
	struct member_key key = {
		.service = service,
		.address = slot->address,
		.port = slot->port,
	};
	struct tally *use = bpf_map_lookup_elem(&used, &key);

	if (!use)
		return 0;
	if (side == DESTINATION) {
		use->packets_in += packets;
		use->bytes_in += bytes;
	} else {
		use->packets_out += packets;
		use->bytes_out += bytes;
	}
	return 0;
}

INLINE __u32 segments(struct __sk_buff *skb)
{
	return skb->gso_segs ? skb->gso_segs : 1;
}

INLINE void count_traffic(struct __sk_buff *skb, const struct packet *packet, __u32 service,
			  const struct slot *slot, int side)
{
	tally(service, slot, side, segments(skb), skb->len - packet->l3);
}

INLINE int is_over(const struct flow *flow)
{
	return flow->state == CLOSING || flow->state == RESET || flow->state == REFUSED;
}

INLINE int has_ended(const struct flow *flow)
{
	return is_over(flow) || flow->state == FINISHED;
}

// A FIN ends one direction only: the other one may continue for long, even without packets.
INLINE void end_flow(struct flow *flow, const struct flow_key *back, __u8 flags)
{
	struct flow *other = bpf_map_lookup_elem(&flows, back);

	if (other && !(flags & TCP_RST) && !has_ended(other)) {
		flow->state = FINISHED;
		return;
	}
	flow->state = flags & TCP_RST ? RESET : CLOSING;
	if (other && other->kind == TO_ENDPOINT && other->state == OPENING)
		other->state = REFUSED;
	else if (other)
		other->state = CLOSING;
}

// Sequence numbers are not looked at, so anybody may forge a RST, or send one that both ends
// ignore. Who has sent a RST sends nothing after it: so if more comes, the connection has not
// ended.
INLINE void reopen_flow(struct flow *flow, const struct flow_key *back)
{
	struct flow *other = bpf_map_lookup_elem(&flows, back);

	flow->state = ESTABLISHED;
	if (other && is_over(other))
		other->state = ESTABLISHED;
}

INLINE __u8 other_hook(const struct packet *packet)
{
	return packet->key.hook == INGRESS ? EGRESS : INGRESS;
}

// Look at another SYN of a connection that is not complete, or at the answer to it.
VERIFIED_ONCE int repeat_or_answer(struct flow *flow, const struct packet *packet)
{
	struct slot endpoint = {};
	struct flow_key back;
	struct flow *answers;

	if (!packet || !flow || packet->key.protocol != IPPROTO_TCP)
		return 0;
	if (flow->kind == FROM_SERVICE && flow->state == OPENING && packet->flags & TCP_ACK) {
		flow->state = ANSWERED;
		endpoint.address = packet->key.source;
		endpoint.port = packet->key.source_port;
		return note_answer(&endpoint);
	}
	if (flow->kind != TO_ENDPOINT || since(flow->last) < SOONEST_REPEAT)
		return 0;
	endpoint.address = flow->address;
	endpoint.port = flow->port;
	reversed(&packet->key, other_hook(packet), &back);
	back.source = endpoint.address;
	back.source_port = endpoint.port;
	answers = bpf_map_lookup_elem(&flows, &back);
	if (!answers || answers->state != OPENING)
		return 0;
	return report_failure(&endpoint, &packet->key.source, IPPROTO_TCP, FAILED_SILENT);
}

// Whether an association was not established in time; the limit is that of netfilter.
INLINE int is_given_up(const struct packet *packet, const struct flow *flow)
{
	return packet->key.protocol == IPPROTO_SCTP && flow->state == OPENING &&
	       since(flow->last) > SCTP_OPENING;
}

// Find the flow of a packet. A connection that reuses the ports of an ended one is new: the old
// entry must not rewrite it, it may not even be for a Service.
INLINE struct flow *find_flow(struct packet *packet)
{
	struct flow_key key = packet->key;
	struct flow *flow = bpf_map_lookup_elem(&flows, &key);

	if (flow && packet->flags & TCP_SYN && (has_ended(flow) || is_given_up(packet, flow))) {
		delete_flow(&key);
		return NULL;
	}
	return flow;
}

INLINE int side_of(const struct flow *flow)
{
	return flow->kind == TO_ENDPOINT || flow->kind == TO_CLIENT ? DESTINATION : SOURCE;
}

// Count a packet of a flow, and update its state. The key of the opposite entry is the rewritten
// key of this one, reversed.
VERIFIED_ONCE int update_flow(struct __sk_buff *skb, struct flow *flow, const struct packet *packet)
{
	struct flow_key back;
	struct slot slot = {};

	if (!packet || !flow)
		return 0;
	if (flow->kind == TO_ENDPOINT) {
		slot.address = flow->address;
		slot.port = flow->port;
		count_traffic(skb, packet, flow->service, &slot, DESTINATION);
	} else if (flow->kind == FROM_SERVICE) {
		slot.address = packet->key.source;
		slot.port = packet->key.source_port;
		count_traffic(skb, packet, flow->service, &slot, SOURCE);
	}
	if (packet->flags & (TCP_FIN | TCP_RST) || flow->state == RESET) {
		reversed(&packet->key, other_hook(packet), &back);
		if (side_of(flow) == DESTINATION)
			back.source = flow->address, back.source_port = flow->port;
		else
			back.destination = flow->address, back.destination_port = flow->port;
		if (flow->kind == FROM_SERVICE && flow->state == OPENING &&
		    packet->key.protocol == IPPROTO_TCP && packet->flags & TCP_RST)
			report_failure(&slot, &packet->key.destination, IPPROTO_TCP,
				       FAILED_REFUSED);
		if (packet->flags & (TCP_FIN | TCP_RST))
			end_flow(flow, &back, packet->flags);
		else
			reopen_flow(flow, &back);
	} else if (flow->state == OPENING || flow->state == ANSWERED) {
		if (packet->flags & TCP_SYN)
			repeat_or_answer(flow, packet);
		else
			flow->state = ESTABLISHED;
	}
	flow->last = now();
	return 0;
}

// Write an entry unless there is one; note its client in the presence filter in any case.
INLINE int add_flow(const struct flow_key *key, const struct flow *value,
		    const struct address *client)
{
	note_client(client);
	if (bpf_map_update_elem(&flows, key, value, BPF_NOEXIST))
		return 0;
	count(FLOWS_MADE);
	return 1;
}

// Replace an entry, which is noted; 0 if the kernel has no memory.
INLINE int replace_flow(const struct flow_key *key, const struct flow *value)
{
	return !bpf_map_update_elem(&flows, key, value, BPF_ANY);
}

// Add the entry for answers from an endpoint to a client; 0 if another Service has that pair.
INLINE int add_return_flow(const struct packet *packet, const struct slot *slot, __u32 service)
{
	struct flow value = {
		.address = packet->key.destination,
		.port = packet->key.destination_port,
		.kind = FROM_SERVICE,
		.last = now(),
		.service = service,
	};
	struct flow *known;
	struct flow_key key;

	reversed(&packet->key, other_hook(packet), &key);
	key.source = slot->address;
	key.source_port = slot->port;
	if (add_flow(&key, &value, &key.destination))
		return 1;
	known = bpf_map_lookup_elem(&flows, &key);
	if (known && !is_over(known) &&
	    (known->port != value.port || !same_address(&known->address, &value.address)))
		return 0;
	return replace_flow(&key, &value);
}

INLINE void masquerade_key(const struct packet *packet, const struct slot *slot,
			   struct flow_key *key)
{
	*key = packet->key;
	key->destination = slot->address;
	key->destination_port = slot->port;
	key->hook = EGRESS;
}

// Delete the entry of an earlier, masqueraded connection of the same pair.
INLINE void delete_masquerade_flow(const struct packet *packet, const struct slot *slot)
{
	struct flow_key key;

	masquerade_key(packet, slot, &key);
	delete_flow(&key);
}

INLINE int add_masquerade_flow(const struct packet *packet, const struct slot *slot, __u32 service)
{
	struct flow_key key;
	struct flow value = {
		.kind = MASQUERADE,
		.state = WAITING,
		.last = now(),
		.service = service,
	};
	struct flow *known;

	masquerade_key(packet, slot, &key);
	if (add_flow(&key, &value, &key.source))
		return 1;
	known = bpf_map_lookup_elem(&flows, &key);
	if (known && !has_ended(known))
		return 1; // a repeated SYN keeps its port
	return replace_flow(&key, &value);
}

// Add the entries of a new connection. Return 0, or the counter of the reason for dropping it.
VERIFIED_ONCE int open_flow(struct packet *packet, __u32 service, __u32 action,
			    const struct slot *slot)
{
	if (!packet || !slot)
		return DROPPED_NO_FLOW;
	if (!add_return_flow(packet, slot, service))
		return DROPPED_NO_FLOW;
	if (packet->key.hook == INGRESS) {
		if (!(action & ACTION_MASQUERADE) &&
		    !same_address(&slot->address, &packet->key.source))
			delete_masquerade_flow(packet, slot);
		else if (!add_masquerade_flow(packet, slot, service))
			return DROPPED_NO_FLOW;
	}
	struct flow flow = {
		.address = slot->address,
		.last = now(),
		.port = slot->port,
		.kind = TO_ENDPOINT,
		.service = service,
	};
	struct flow_key key = packet->key;

	if (add_flow(&key, &flow, &key.source) || replace_flow(&key, &flow))
		return 0;
	return DROPPED_NO_FLOW;
}

// Delete a connection by its TO_ENDPOINT key, unless it is complete: by the client's second packet,
// or for UDP by an answer.
VERIFIED_ONCE int delete_half_open(const struct flow_key *oldest)
{
	struct flow_key key, other;
	struct flow *found;
	struct flow flow;

	if (!oldest)
		return 0;
	key = *oldest;
	found = bpf_map_lookup_elem(&flows, &key);
	if (!found || found->kind != TO_ENDPOINT ||
	    (found->state != OPENING && found->state != REFUSED))
		return 0;
	flow = *found;
	reversed(&key, key.hook == INGRESS ? EGRESS : INGRESS, &other);
	other.source = flow.address;
	other.source_port = flow.port;
	found = bpf_map_lookup_elem(&flows, &other);
	if (!found || found->port != key.destination_port ||
	    !same_address(&found->address, &key.destination)) {
		delete_flow(&key); // the opposite entry belongs to another connection
		return 1;
	}
	if (found->state == ESTABLISHED || found->state == FINISHED)
		return 0;
	delete_flow(&key);
	delete_flow(&other);
	key.destination = flow.address;
	key.destination_port = flow.port;
	key.hook = EGRESS;
	found = bpf_map_lookup_elem(&flows, &key);
	if (!found || found->kind != MASQUERADE)
		return 1;
	flow = *found;
	delete_flow(&key);
	if (flow.state == WAITING)
		return 1;
	reversed(&key, INGRESS, &other);
	other.destination = flow.address;
	other.destination_port = flow.port;
	delete_flow(&other);
	return 1;
}

// Remember a new connection, in place of the one that began HALF_OPEN connections ago.
INLINE void add_half_open(const struct packet *packet)
{
	__u32 zero = 0, index;
	__u64 *next = bpf_map_lookup_elem(&half_open_next, &zero);
	struct flow_key *place, oldest;

	if (!next)
		return;
	index = __sync_fetch_and_add(next, 1) % HALF_OPEN;
	place = bpf_map_lookup_elem(&half_open, &index);
	if (!place)
		return;
	oldest = *place;
	*place = packet->key;
	if (oldest.protocol)
		delete_half_open(&oldest);
}

INLINE int masquerade_address(__u32 index, const struct packet *packet, struct address *out)
{
	struct device *device = bpf_map_lookup_elem(&devices, &index);

	if (!device)
		return 0;
	*out = packet->ipv4 ? device->masquerade4 : device->masquerade6;
	return !is_unspecified(out);
}

INLINE int in_node_range(const struct config *config, __u16 port)
{
	return port >= config->first_port && port <= config->last_port;
}

// Choose a port that the kernel gives to no socket of this node, which would get the answers.
VERIFIED_ONCE __u32 random_port(void)
{
	const struct config *config = get_config();
	__u32 all = 65536 - MASQUERADE_FIRST, first, own, port;

	if (!config)
		return 0;
	first = config->first_port;
	own = config->last_port - first + 1;
	if (first < MASQUERADE_FIRST || first > config->last_port || own + MASQUERADE_MINIMUM > all)
		own = 0;
	port = MASQUERADE_FIRST + bpf_get_prandom_u32() % (all - own);
	return bpf_htons(own && port >= first ? port + own : port);
}

// The choice of a masqueraded connection's port.
struct port_choice {
	struct flow_key key; // of the answers, and their entry
	struct flow back;
	__u64 made;
};

// Give up the port of a connection that is over: its entries may stay for minutes, and an endpoint
// that gets hundreds of connections a second would have no port left. netfilter does so, too.
INLINE void release_port(const struct flow_key *key)
{
	struct flow *known = bpf_map_lookup_elem(&flows, key), *former;
	struct flow_key there;

	if (!known || !is_over(known))
		return;
	reversed(key, EGRESS, &there);
	there.source = known->address;
	there.source_port = known->port;
	former = bpf_map_lookup_elem(&flows, &there);
	if (former && former->port == key->destination_port && is_over(former))
		delete_flow(&there); // otherwise the client has begun another one there
	delete_flow(key);
}

// Try the port in the key; if it is taken, replace it for the next round.
static __noinline long try_port(__u32 round, struct port_choice *own)
{
	if (round >= MASQUERADE_TRIES / 2)
		release_port(&own->key);
	own->made = add_flow(&own->key, &own->back, &own->key.destination);
	if (!own->made)
		own->key.destination_port = random_port();
	return own->made;
}

// Choose the source address and port of a masqueraded connection that leaves by a device.
VERIFIED_ONCE int choose_masquerade(__u32 device, struct packet *packet, struct flow *flow)
{
	struct port_choice choice = { .back = { .kind = TO_CLIENT, .last = now() } };
	const struct config *config = get_config();
	struct address own;

	if (!packet || !flow || !config || !masquerade_address(device, packet, &own))
		return 0;
	choice.back.address = packet->key.source;
	choice.back.port = packet->key.source_port;
	choice.back.service = flow->service;
	reversed(&packet->key, INGRESS, &choice.key);
	choice.key.destination = own;
	if (in_node_range(config, bpf_ntohs(packet->key.source_port)))
		choice.key.destination_port = random_port();
	bpf_loop(MASQUERADE_TRIES, try_port, &choice, 0);
	if (!choice.made)
		return 0;
	flow->address = own;
	flow->port = choice.key.destination_port;
	flow->state = OPENING;
	return 1;
}
