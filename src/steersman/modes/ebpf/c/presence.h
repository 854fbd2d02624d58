// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// The presence filter: it tells by the addresses of a packet, before any lookup, that the packet
// belongs to no flow and opens none. This is true for most packets, as most belong to balanced
// sockets.
//
// Programs note the client of a flow before they write it (of the answers to a masqueraded
// connection, that is this node), and presence.py the addresses of frontends. Several addresses
// share a place, and a place stays set after the flow has ended: then a packet is looked up for
// nothing.
//
// A client of a Service has other connections, too, and a lookup in `flows` costs 115 ns, most of
// it for memory that no cache has. So the keys of flows are noted as well. They would not do alone:
// a node with many flows has no free place among them, but few clients.
#pragma once

INLINE struct marks *presence_filter(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&marks, &zero);
}

INLINE __u32 presence_place(const struct address *address)
{
	const __be32 *words = address->words;

	return (words[0] ^ words[1] ^ words[2] ^ words[3]) * PRESENCE_FACTOR >>
	       (32 - PRESENCE_BITS);
}

// The place of a flow, the same in both directions. A client takes one port after the other for its
// connections to a server: their places are neighbours, so that a cache has the next one.
INLINE __u32 flow_place(const struct flow_key *key)
{
	const __be32 *from = key->source.words, *to = key->destination.words;
	__u32 addresses = from[0] ^ from[1] ^ from[2] ^ from[3] ^ to[0] ^ to[1] ^ to[2] ^ to[3];

	// Linux 6.1 knows no limit of swapped bytes, so the limit comes last.
	return ((addresses * PRESENCE_FACTOR >> (32 - FLOW_PRESENCE_BITS)) +
		bpf_ntohs(key->source_port ^ key->destination_port)) &
	       ((1 << FLOW_PRESENCE_BITS) - 1);
}

INLINE void note_flow(const struct flow_key *key, const struct address *client)
{
	__u32 place = presence_place(client), own = flow_place(key);
	struct marks *all = presence_filter();

	if (!all)
		return;
	all->places[place].clients[all->filling & 1] = 1;
	all->flows[own].keys[all->filling & 1] = 1;
}

// Whether a CIDR of this list has an address. Unused ones have none.
INLINE int in_list(const struct cidr *list, const struct address *address)
{
	for (int place = 0; place < LISTED_CIDRS; place++) {
		const struct cidr *own = &list[place];

		if ((address->halves[0] & own->mask.halves[0]) == own->network.halves[0] &&
		    (address->halves[1] & own->mask.halves[1]) == own->network.halves[1])
			return 1;
	}
	return 0;
}

INLINE int in_service_cidrs(const struct address *address)
{
	__u32 zero = 0;
	const struct cidrs *own = bpf_map_lookup_elem(&cidrs, &zero);

	if (own && own->complete)
		return in_list(own->services, address);
	return in_prefixes(PREFIXES_SERVICE_CIDRS, address);
}

INLINE int in_pod_cidrs(const struct address *address)
{
	__u32 zero = 0;
	const struct cidrs *own = bpf_map_lookup_elem(&cidrs, &zero);

	if (own && own->complete)
		return in_list(own->pods, address);
	return in_prefixes(PREFIXES_PODS, address);
}

// Whether an address certainly belongs to no frontend and to no ServiceCIDR.
INLINE int serves_nothing(const struct address *address)
{
	struct marks *all = presence_filter();

	return address && all && all->trusted && !all->places[presence_place(address)].served &&
	       !in_service_cidrs(address);
}
