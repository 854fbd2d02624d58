// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Where connected sockets believe to be talking to, and where they really are. By cookie: numbers
// that follow each other, so that an array serves nearly all of them, faster than any map does
// (making and freeing the kernel's own storage of sockets takes as long as all else at connect()).
// Who finds his place taken by a socket that lives longer goes to `crowded`.
// The kernel's own sockets (NFS) are never released, as hooks see it: theirs stay taken.
#pragma once

INLINE struct seat *seat_of(__u64 cookie)
{
	__u32 place = cookie % SEATS;
	return bpf_map_lookup_elem(&seats, &place);
}

INLINE struct peer *find_peer(__u64 cookie)
{
	struct seat *seat = seat_of(cookie);

	if (!seat || !cookie)
		return NULL;
	if (seat->cookie == cookie)
		return &seat->peer;
	return seat->crowded ? bpf_map_lookup_elem(&crowded, &cookie) : NULL;
}

INLINE void put_peer(__u64 cookie, const struct peer *peer)
{
	struct seat *seat = seat_of(cookie);

	if (!seat)
		return;
	if (seat->cookie != cookie && __sync_val_compare_and_swap(&seat->cookie, 0, cookie)) {
		seat->crowded = 1; // before it is, or its end would not look there
		bpf_map_update_elem(&crowded, &cookie, peer, BPF_ANY);
	} else {
		seat->peer = *peer;
	}
}

INLINE void drop_peer(__u64 cookie)
{
	struct seat *seat = seat_of(cookie);

	if (!seat)
		return;
	if (seat->cookie == cookie)
		seat->cookie = 0;
	if (seat->crowded)
		bpf_map_delete_elem(&crowded, &cookie);
}
