// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// From a destination to a frontend, from a frontend to an endpoint: for both sockets and packets.
#pragma once

enum found { NOTHING, FRONTEND, UNKNOWN_PORT, UNASSIGNED };

INLINE int read_frontend(const struct frontend_key *key, struct frontend *out)
{
	__u64 *word = bpf_map_lookup_elem(&frontends, key);
	if (!word)
		return 0;
	*(__u64 *)out = *(volatile __u64 *)word;
	return 1;
}

// Whether an address has node ports for the node itself (`own`) or for others. 127.0.0.1 and
// 0.0.0.0 (an alias in Linux) are another host in each network namespace.
INLINE int serves_node_ports(const struct address *address, int own)
{
	const struct config *config = get_config();
	struct address key = *address;

	if (is_loopback4(address) || is_unspecified(address)) {
		if (!own || !is_ipv4(address))
			return 0;
		if (config && config->flags & CONFIG_LOCALHOST_NODE_PORTS)
			return 1;
	}
	return bpf_map_lookup_elem(&node_ips, &key) != NULL;
}

// Whether a destination is certainly no Service, as that of most connections.
INLINE int is_no_service(const struct address *address)
{
	return !is_unspecified(address) && !is_loopback4(address) && serves_nothing(address);
}

// Find the frontend of a destination; that of a node port gets the frontend's own key.
VERIFIED_ONCE int find_frontend(struct frontend_key *destination, int own, struct frontend *out)
{
	struct frontend_key key;
	struct address address;

	if (!destination || !out)
		return NOTHING;
	key = *destination;
	address = key.address;

	if (is_no_service(&address))
		return NOTHING;
	if (!is_unspecified(&address) && read_frontend(&key, out))
		return FRONTEND;
	if (serves_node_ports(&address, own)) {
		if (is_ipv4(&address))
			key.address.words[3] = 0;
		else
			key.address.halves[0] = key.address.halves[1] = 0;
		if (read_frontend(&key, out)) {
			*destination = key;
			return FRONTEND;
		}
	}
	key = (struct frontend_key){ .address = address };
	if (read_frontend(&key, out))
		return UNKNOWN_PORT;
	return in_prefixes(PREFIXES_SERVICE_CIDRS, &address) ? UNASSIGNED : NOTHING;
}

INLINE __u32 action_of(const struct frontend *frontend, __u32 class)
{
	return frontend->actions >> (class * ACTION_BITS);
}

#define FOREVER (~0ull)

// Use the endpoint that a client is bound to, if it still is in the pool.
INLINE int use_affinity(struct affinity *known, const struct affinity_key *key, __u64 limit,
			__u32 pool, struct slot *out)
{
	struct member_key member = { .service = key->service };
	__u32 *pools;

	if (!known || since(known->last) >= limit)
		return 0;
	member.address = known->address;
	member.port = known->port;
	pools = bpf_map_lookup_elem(&members, &member);
	if (!pools || !(*pools & 1 << pool))
		return 0;
	known->last = now();
	out->address = member.address;
	out->port = member.port;
	return 1;
}

INLINE struct affinity new_affinity(const struct slot *slot)
{
	return (struct affinity){
		.address = slot->address,
		.port = slot->port,
		.last = now(),
	};
}

// Choose at random; 0 if there is no endpoint.
NOINLINE int choose_any(const struct service *service, __u32 which, struct slot *out)
{
	struct pool pool;
	struct slot *slot;
	__u32 index;

	*(__u64 *)&pool = *(volatile __u64 *)&service->pools[which];
	if (!pool.count)
		return 0;
	index = pool.base + bpf_get_prandom_u32() % pool.count;
	slot = bpf_map_lookup_elem(&slots, &index);
	if (!slot)
		return 0;
	*out = *slot;
	return 1;
}

#define CHOSEN 1
#define KEPT 2 // chosen for an earlier datagram

// Choose an endpoint for a client; 0 if there is none.
VERIFIED_ONCE int choose(__u32 number, __u32 action, const struct address *client, struct slot *out)
{
	struct service *service = bpf_map_lookup_elem(&services, &number);
	__u32 which = action & ACTION_LOCAL ? LOCAL_POOL : CLUSTER_POOL;
	struct affinity_key key = { .service = number };
	struct affinity value, *known;
	__u64 limit;

	if (!service || !client || !out)
		return 0;
	key.client = *client;
	limit = service->affinity_seconds * 1000000000ull;
	if (!limit)
		return choose_any(service, which, out);
	known = bpf_map_lookup_elem(&affinities, &key);
	if (use_affinity(known, &key, limit, which, out))
		return CHOSEN;
	if (!choose_any(service, which, out))
		return 0;
	value = new_affinity(out);
	bpf_map_update_elem(&affinities, &key, &value, BPF_ANY);
	return CHOSEN;
}

// Choose an endpoint for a socket that is not connected; the socket keeps it while it is planned.
NOINLINE int choose_once(__u32 number, __u32 action, const struct address *client, __u64 cookie,
			 struct slot *out)
{
	struct affinity_key key = { .client.halves = { 0, cookie }, .service = number };
	struct affinity value, *known = bpf_map_lookup_elem(&choices, &key);
	__u32 which = action & ACTION_LOCAL ? LOCAL_POOL : CLUSTER_POOL;

	if (use_affinity(known, &key, FOREVER, which, out))
		return KEPT;
	if (!choose(number, action, client, out))
		return 0;
	value = new_affinity(out);
	bpf_map_update_elem(&choices, &key, &value, BPF_ANY);
	return CHOSEN;
}
