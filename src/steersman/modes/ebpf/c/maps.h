// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// The maps.
#pragma once

// Written by steersman
MAP(frontends, BPF_MAP_TYPE_HASH, struct frontend_key, struct frontend, 262144, BPF_F_NO_PREALLOC);
MAP(services, BPF_MAP_TYPE_ARRAY, __u32, struct service, 131072, BPF_F_MMAPABLE);
MAP(slots, BPF_MAP_TYPE_ARRAY, __u32, struct slot, 1048576, BPF_F_MMAPABLE);
MAP(names, BPF_MAP_TYPE_HASH, __u32, struct service_name, 131072, BPF_F_NO_PREALLOC);
// Endpoints of ServicePorts with affinity or of UDP; the value has a bit for each pool.
MAP(members, BPF_MAP_TYPE_HASH, struct member_key, __u32, 262144, BPF_F_NO_PREALLOC);
MAP(prefixes, BPF_MAP_TYPE_LPM_TRIE, struct prefix, __u32, 131072, BPF_F_NO_PREALLOC);
MAP(maglevs, BPF_MAP_TYPE_HASH, __u32, struct maglev, 65536, BPF_F_NO_PREALLOC);
MAP(node_ips, BPF_MAP_TYPE_HASH, struct address, __u32, 4096, BPF_F_NO_PREALLOC);
MAP(devices, BPF_MAP_TYPE_HASH, __u32, struct device, 16384, BPF_F_NO_PREALLOC);
MAP(config, BPF_MAP_TYPE_ARRAY, __u32, struct config, 1, BPF_F_MMAPABLE);

// Written by programs: connections and clients
MAP(affinities, BPF_MAP_TYPE_LRU_HASH, struct affinity_key, struct affinity, 65536, 0);
MAP(choices, BPF_MAP_TYPE_LRU_HASH, struct affinity_key, struct affinity, 16384, 0);
MAP(flows, BPF_MAP_TYPE_LRU_HASH, struct flow_key, struct flow, 262144, 0);
MAP(half_open, BPF_MAP_TYPE_ARRAY, __u32, struct flow_key, HALF_OPEN, 0);
MAP(half_open_next, BPF_MAP_TYPE_ARRAY, __u32, __u64, 1, 0);
MAP(reverses, BPF_MAP_TYPE_LRU_HASH, struct reverse_key, struct reverse, 65536, 0);
MAP(fragments, BPF_MAP_TYPE_LRU_HASH, struct fragment_key, struct fragment, 8192, 0);
MAP(seats, BPF_MAP_TYPE_ARRAY, __u32, struct socket_slot, SOCKET_SLOTS, BPF_F_MMAPABLE);
MAP(crowded, BPF_MAP_TYPE_LRU_HASH, __u64, struct peer, 16384, 0);

// The fast path, written by programs
MAP(balanced, BPF_MAP_TYPE_ARRAY, __u32, struct balanced, BALANCED_PLACES, 0);
MAP(hops, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct hop, HOP_PLACES, 0);

MAP(marks, BPF_MAP_TYPE_ARRAY, __u32, struct marks, 1, BPF_F_MMAPABLE);

// Written by programs: counters
MAP(counters, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, COUNTERS, 0);
MAP(reached, BPF_MAP_TYPE_PERCPU_HASH, struct frontend_key, __u64, 262144, BPF_F_NO_PREALLOC);
MAP(used, BPF_MAP_TYPE_PERCPU_HASH, struct member_key, struct tally, 262144, BPF_F_NO_PREALLOC);
