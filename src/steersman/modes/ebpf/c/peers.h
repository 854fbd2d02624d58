// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Where connected sockets believe to be talking to, and where they really are. By cookie: numbers
// that follow each other, so that an array serves nearly all of them, faster than any map does
// (making and freeing the kernel's own storage of sockets takes as long as all else at connect()).
// Who finds his place taken by a socket that lives longer goes to `crowded`.
// The kernel's own sockets (NFS) are never released, as hooks see it: theirs stay taken.
#pragma once

INLINE struct socket_slot *socket_slot_of(__u64 cookie)
{
	__u32 place = cookie % SOCKET_SLOTS;
	return bpf_map_lookup_elem(&seats, &place);
}

INLINE struct peer *find_peer(__u64 cookie)
{
	struct socket_slot *own = socket_slot_of(cookie);

	if (!own || !cookie)
		return NULL;
	if (own->cookie == cookie)
		return &own->peer;
	return own->crowded ? bpf_map_lookup_elem(&crowded, &cookie) : NULL;
}

INLINE void put_peer(__u64 cookie, const struct peer *peer)
{
	struct socket_slot *own = socket_slot_of(cookie);

	if (!own)
		return;
	if (own->cookie != cookie && __sync_val_compare_and_swap(&own->cookie, 0, cookie)) {
		own->crowded = 1; // before it is, or its end would not look there
		bpf_map_update_elem(&crowded, &cookie, peer, BPF_ANY);
	} else {
		own->peer = *peer;
	}
}

INLINE void drop_peer(__u64 cookie)
{
	struct socket_slot *own = socket_slot_of(cookie);

	if (!own)
		return;
	if (own->cookie == cookie)
		own->cookie = 0;
	if (own->crowded)
		bpf_map_delete_elem(&crowded, &cookie);
}
