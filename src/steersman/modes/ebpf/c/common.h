// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Helpers of all programs.
#pragma once

INLINE void count(__u32 which)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &which);
	if (value)
		*value += 1;
}

INLINE int drop(__u32 reason)
{
	count(PACKET_DROPPED);
	count(reason);
	return TC_ACT_SHOT;
}

// Count a connection, and its first packets if those are rewritten.
VERIFIED_ONCE int count_connection(const struct frontend_key *frontend, __u32 service,
				   const struct slot *slot, __u32 packets, __u32 bytes)
{
	struct tally *use, first = { .connections = 1, .packets_in = packets, .bytes_in = bytes };
	struct member_key key = { .service = service };
	struct frontend_key own;
	__u64 *reach, one = 1;

	if (!frontend || !slot)
		return 0;
	key.address = slot->address;
	key.port = slot->port;
	own = *frontend;
	reach = bpf_map_lookup_elem(&reached, &own);
	use = bpf_map_lookup_elem(&used, &key);
	if (reach)
		*reach += 1;
	else
		bpf_map_update_elem(&reached, &own, &one, BPF_NOEXIST);
	if (!use)
		return bpf_map_update_elem(&used, &key, &first, BPF_NOEXIST);
	use->connections += 1;
	use->packets_in += packets;
	use->bytes_in += bytes;
	return 0;
}

INLINE void set_ipv4(struct address *address, __be32 ip)
{
	address->halves[0] = 0;
	address->words[2] = bpf_htonl(0xffff);
	address->words[3] = ip;
}

INLINE int is_ipv4(const struct address *address)
{
	return !address->halves[0] && address->words[2] == bpf_htonl(0xffff);
}

INLINE int in_loopback4(__be32 ip)
{
	return (bpf_ntohl(ip) >> 24) == 127;
}

INLINE int is_loopback4(const struct address *address)
{
	return is_ipv4(address) && in_loopback4(address->words[3]);
}

INLINE int is_unspecified(const struct address *address)
{
	return !address->halves[0] && !address->words[3] &&
	       (!address->words[2] || address->words[2] == bpf_htonl(0xffff));
}

INLINE int same_address(const struct address *a, const struct address *b)
{
	return a->halves[0] == b->halves[0] && a->halves[1] == b->halves[1];
}

INLINE const struct config *get_config(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&config, &zero);
}

// Whether an address is in one of the prefixes of an id.
NOINLINE int in_prefixes(__u32 id, const struct address *address)
{
	struct prefix key = { .length = 32 + 128, .id = id, .address = *address };
	return bpf_map_lookup_elem(&prefixes, &key) != NULL;
}
