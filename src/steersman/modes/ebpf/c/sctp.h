// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// SCTP's CRC32c (RFC 9260, appendix A) for other ports, without reading the packet: a CRC is
// linear, so the change of the first four bytes can be shifted over the bytes after them.
#pragma once

#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16
#define CRC32C 0x82f63b78u // Castagnoli's polynomial, reflected
#define CRC_ONE 0x80000000u

#define SCTP_OPENING 3000000000ull // ns, nf_conntrack_sctp_timeout_cookie_wait

// Return the TCP flags equivalent to the first chunk of a packet (RFC 9260, 3.2).
INLINE __u8 sctp_flags(__u8 chunk)
{
	switch (chunk) {
	case 1: // INIT
		return TCP_SYN;
	case 2: // INIT ACK
	case 10: // COOKIE ECHO
	case 11: // COOKIE ACK
		return TCP_SYN | TCP_ACK;
	case 6: // ABORT
	case 14: // SHUTDOWN COMPLETE: both directions have ended
		return TCP_RST;
	default:
		return 0;
	}
}

// x to the power of 8 * 2^n, modulo the polynomial.
static const __u32 crc_powers[16] = {
	0x00800000, 0x00008000, 0x82f63b78, 0x6ea2d55c, 0x18b8ea18, 0x510ac59a,
	0xb82be955, 0xb8fdb1e7, 0x88e56f72, 0x74c360a4, 0xe4172b16, 0x0d65762a,
	0x35d73a62, 0x28461564, 0xbf455269, 0xe2ea32dc,
};

VERIFIED_ONCE __u32 crc_multiply(__u32 a, __u32 b)
{
	__u32 product = 0;

	for (int bit = 0; bit < 32; bit++) {
		product ^= b & -(a >> 31);
		a <<= 1;
		b = b >> 1 ^ (CRC32C & -(b & 1));
	}
	return product;
}

// Return the XOR for the CRC of `length` bytes whose first four were XORed with `change`.
VERIFIED_ONCE __u32 crc_change(__u32 change, __u32 length)
{
	__u32 value = change;

	for (int bit = 0; bit < 32; bit++)
		value = value >> 1 ^ (CRC32C & -(value & 1));
	for (int power = 0; power < 16; power++)
		value = crc_multiply((length - 4) >> power & 1 ? crc_powers[power] : CRC_ONE,
				     value);
	return value;
}
