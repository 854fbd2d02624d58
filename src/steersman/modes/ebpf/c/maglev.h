// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Maglev tables of Services that ask for them (render.py): every node sends a connection of a
// client outside to the same endpoint.
#pragma once

INLINE __u32 mix(__u32 value)
{
	value ^= value >> 16;
	value *= 0x7feb352d;
	value ^= value >> 15;
	value *= 0x846ca68b;
	return value ^ value >> 16;
}

// Hash the source and the ports, but not the destination, as each node has its own addresses. Hash
// numbers, not bytes, so that machines of either byte order agree.
INLINE __u32 hash_of(const struct flow_key *key)
{
	__u32 ports = (__u32)bpf_ntohs(key->source_port) << 16 | bpf_ntohs(key->destination_port);
	__u32 hash = mix(ports ^ key->protocol);

	for (int word = 0; word < 4; word++)
		hash = mix(hash ^ bpf_ntohl(key->source.words[word]));
	return hash;
}

// Choose by the table; 0 if the Service has none, or has affinity.
VERIFIED_ONCE int choose_by_table(const struct packet *packet, __u32 number, __u32 action,
				  struct slot *out)
{
	struct service *service = bpf_map_lookup_elem(&services, &number);
	struct maglev *table = bpf_map_lookup_elem(&maglevs, &number);
	struct pool pool;
	struct slot *slot;
	__u32 place, index;

	if (!packet || !out || !service || !table || service->affinity_seconds ||
	    action & ACTION_LOCAL)
		return 0;
	*(__u64 *)&pool = *(volatile __u64 *)&service->pools[CLUSTER_POOL];
	if (!pool.count)
		return 0;
	place = hash_of(&packet->key) % MAGLEV_SIZE;
	asm volatile("" : "+r"(place)); // or clang removes the mask, which the verifier needs
	place &= MAGLEV_ROOM - 1;
	index = pool.base +
		table->places[place] % pool.count; // the table may be older than the pool
	slot = bpf_map_lookup_elem(&slots, &index);
	if (!slot)
		return 0;
	*out = *slot;
	return 1;
}
