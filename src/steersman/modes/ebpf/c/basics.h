// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// What every object needs.
#pragma once

#define INLINE static __always_inline
// A function that the verifier checks once per call, not once per path.
#define NOINLINE static __noinline
// A global function: the verifier checks it once for all callers (Linux 5.13). So it must test its
// pointers, and memory behind them may hold anything. Before Linux 6.2 none may be the key of a
// map.
#define VERIFIED_ONCE __attribute__((noinline))

#define MAP(name, kind, key_type, value_type, entries, options) \
	struct { \
		__uint(type, kind); \
		__uint(max_entries, entries); \
		__uint(map_flags, options); \
		__type(key, key_type); \
		__type(value, value_type); \
	} name SEC(".maps")

#ifndef CLOCK
// Reading the clock costs as much as finding a flow, but it moves with the tick only: read it
// (Linux 5.11) once in each, and jiffies, one load, otherwise. CPUs may write these at the same
// time: then a time is one tick old.
static volatile __u64 clock_jiffies, clock_time;

INLINE __u64 read_clock(void)
{
	__u64 jiffies = bpf_jiffies64();

	if (clock_jiffies != jiffies) {
		clock_time = bpf_ktime_get_coarse_ns();
		clock_jiffies = jiffies;
	}
	return clock_time;
}
#define CLOCK read_clock
#endif

// Return CLOCK_MONOTONIC in ns. All times that are compared with it are tenths of a second old.
INLINE __u64 now(void)
{
	return CLOCK();
}

// Return the time since an event. Another CPU may have noted a later time in between.
INLINE __u64 since(__u64 last)
{
	__s64 passed = now() - last;

	return passed < 0 ? 0 : passed;
}
