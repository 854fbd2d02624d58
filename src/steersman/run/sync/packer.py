"""Packs the kernel objects of an owner that are rarely read. Pure."""

from __future__ import annotations

import marshal
import zlib

from steersman.model.ruleset import Ruleset

_WORTH_COMPRESSING = 512
"""Bytes: the text of iptables' rules has some 1,200 for a ServicePort, and shrinks to 200."""
_COUNT = 4  # bytes
_LEVEL, _RAW, _MEMORY = 6, -11, 5  # wbits and memLevel of zlib: a window of 2 kB, no checksum
_WINDOW = 1 << 11


class Packer:
    """Packs the parts of a Ruleset that are rarely read.

    A node has 10,000 parts that are looked at once a day. As a dictionary the part of a ServicePort
    with three endpoints takes 820 bytes (nftables) or 2,300 (iptables), packed 190 or 220; that
    takes 0.5 us (nftables) or 14 us (iptables), and unpacking it 0.5 or 7 us.
    """

    def __init__(self) -> None:
        self._sample = b""
        """The first part of a Service that was worth compressing: the others have much in common
        with it. The node's own part is longer than zlib's window and like no other."""

    def pack(self, part: Ruleset) -> Ruleset | bytes:
        """Return a part packed, or as it is if it has values of other than built-in types."""
        try:
            # Exact about types: it refuses an enumeration instead of making it a number. Version 2
            # has no references, whose number depends on who else holds the strings.
            packed = marshal.dumps(part if isinstance(part, dict) else dict(part), 2)
        except ValueError:
            return part
        count = len(part).to_bytes(_COUNT)
        if len(packed) < _WORTH_COMPRESSING:
            return b"\0" + count + packed
        if not self._sample and len(packed) <= _WINDOW:
            self._sample = packed  # what was packed before does not refer to it
        deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, _MEMORY, zdict=self._sample)
        return b"\1" + count + deflate.compress(packed) + deflate.flush()

    def unpack(self, part: Ruleset | bytes) -> Ruleset:
        """Return a part that `pack` returned; others as they are."""
        if not isinstance(part, bytes):
            return part
        packed = part[1 + _COUNT :]
        if part[0]:
            packed = zlib.decompressobj(_RAW, zdict=self._sample).decompress(packed)
        unpacked: Ruleset = marshal.loads(packed)
        return unpacked

    @staticmethod
    def size(part: Ruleset | bytes) -> int:
        """Return the number of objects of a part, packed or not."""
        return int.from_bytes(part[1 : 1 + _COUNT]) if isinstance(part, bytes) else len(part)
