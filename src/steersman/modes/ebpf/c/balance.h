// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// From a destination to a frontend, from a frontend to an endpoint: the same for sockets and packets.
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

INLINE int serves_node_ports(const struct address *address)
{
	const struct config *config = settings();

	if (config && config->flags & CONFIG_LOCALHOST_NODE_PORTS && is_ipv4(address) &&
	    (bpf_ntohl(address->words[3]) >> 24) == 127)
		return 1;
	return bpf_map_lookup_elem(&node_ips, address) != NULL;
}

CALLED int find_frontend(const struct address *address, __be16 port, __u8 protocol,
			 struct frontend *out)
{
	struct frontend_key key = { .address = *address, .port = port, .protocol = protocol };

	if (read_frontend(&key, out))
		return FRONTEND;
	if (serves_node_ports(address)) {
		if (is_ipv4(address))
			key.address.words[3] = 0;
		else
			key.address.halves[0] = key.address.halves[1] = 0;
		if (read_frontend(&key, out))
			return FRONTEND;
	}
	key = (struct frontend_key){ .address = *address };
	if (read_frontend(&key, out))
		return UNKNOWN_PORT;
	return in_prefixes(PREFIXES_SERVICE_CIDRS, address) ? UNASSIGNED : NOTHING;
}

INLINE __u32 action_of(const struct frontend *frontend, __u32 class)
{
	return frontend->actions >> (class * ACTION_BITS);
}

// The endpoint that a client is bound to, if it is among those that it may be sent to now.
INLINE int remembered(const struct affinity_key *key, __u64 limit, __u32 pool, struct slot *out)
{
	struct affinity *known = bpf_map_lookup_elem(&affinities, key);
	struct member_key member = { .service = key->service };
	__u64 now = bpf_ktime_get_ns();
	__u32 *pools;

	if (!known || now - known->last >= limit)
		return 0;
	member.address = known->address;
	member.port = known->port;
	pools = bpf_map_lookup_elem(&members, &member);
	if (!pools || !(*pools & 1 << pool))
		return 0;
	known->last = now;
	out->address = member.address;
	out->port = member.port;
	return 1;
}

INLINE void remember(const struct affinity_key *key, const struct slot *slot)
{
	struct affinity value = {
		.address = slot->address,
		.port = slot->port,
		.last = bpf_ktime_get_ns(),
	};
	bpf_map_update_elem(&affinities, key, &value, BPF_ANY);
}

// Choose an endpoint; 0 where there is none. `hash` decides, or chance where it is 0.
CALLED int choose(__u32 service, __u32 action, const struct address *client, __u32 hash,
		  struct slot *out)
{
	struct affinity_key key = { .client = *client, .service = service };
	struct service *found = bpf_map_lookup_elem(&services, &service);
	struct pool pool;
	struct slot *slot;
	__u64 limit;
	__u32 index, which = action & ACTION_LOCAL ? LOCAL_POOL : CLUSTER_POOL;

	if (!found)
		return 0;
	limit = found->affinity_seconds * 1000000000ull;
	if (limit && remembered(&key, limit, which, out))
		return 1;
	*(__u64 *)&pool = *(volatile __u64 *)&found->pools[which];
	if (!pool.count)
		return 0;
	index = pool.base + (hash ? hash : bpf_get_prandom_u32()) % pool.count;
	slot = bpf_map_lookup_elem(&slots, &index);
	if (!slot)
		return 0;
	*out = *slot;
	if (limit)
		remember(&key, out);
	return 1;
}
