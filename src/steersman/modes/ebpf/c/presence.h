// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// The presence filter: it tells by the addresses of a packet, before any lookup, that the packet
// belongs to no flow and opens none. This is true for most packets, as most belong to balanced
// sockets.
//
// Programs note the client of a flow before they write it (of the answers to a masqueraded
// connection, that is this node), and presence.py the addresses of frontends. Several addresses
// share a place, and a place stays set after the flow has ended: then a packet is looked up for
// nothing.
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

INLINE void note_client(const struct address *client)
{
	__u32 place = presence_place(client);
	struct marks *all = presence_filter();

	if (all)
		all->places[place].client = 1;
}

// Whether an address certainly belongs to no frontend and to no ServiceCIDR.
INLINE int serves_nothing(const struct address *address)
{
	struct marks *all = presence_filter();

	return address && all && all->trusted && !all->places[presence_place(address)].served &&
	       !in_prefixes(PREFIXES_SERVICE_CIDRS, address);
}
