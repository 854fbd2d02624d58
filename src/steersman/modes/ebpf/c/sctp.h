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

struct product {
	__u32 a;
	__u32 b;
	__u32 sum;
};

static long crc_multiply_bit(__u32 bit, struct product *own)
{
	own->sum ^= own->b & -(own->a >> 31);
	own->a <<= 1;
	own->b = own->b >> 1 ^ (CRC32C & -(own->b & 1));
	return 0;
}

VERIFIED_ONCE __u32 crc_multiply(__u32 a, __u32 b)
{
	struct product product = { a, b, 0 };

	bpf_loop(32, crc_multiply_bit, &product, 0); // the verifier looks at it once
	return product.sum;
}

// Return the XOR for the CRC of `length` bytes whose first four were XORed with `change`.
VERIFIED_ONCE __u32 crc_change(__u32 change, __u32 length)
{
	__u32 value;

	value = crc_multiply(CRC32C, change); // the polynomial is x^32
	for (int power = 0; power < 16; power++)
		value = crc_multiply((length - 4) >> power & 1 ? crc_powers[power] : CRC_ONE,
				     value);
	return value;
}
