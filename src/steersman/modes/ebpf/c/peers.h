// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// The peers of connected sockets, in slots by the socket's cookie. Cookies are consecutive numbers,
// so an array serves nearly all sockets, faster than a hash or the kernel's socket storage: to
// create and free that takes as long as everything else at connect(). If the slot belongs to a
// socket that lives longer, the peer goes to `crowded`. No hook sees the release of the kernel's
// own sockets (NFS): their slots stay taken.
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
		own->crowded = 1; // first, or its release would not look there
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
