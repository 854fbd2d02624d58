"""Watch one packet and its first answer on all devices of this machine, in every namespace.

Programs at tracepoints of the kernel (packet_watch.bpf.c) report where the packet is sent and
received, and where and why the kernel drops it. They change nothing, and go with this process.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from steersman.host.bpf_object import OpenedObject
from steersman.host.libbpf import call, library
from steersman.model.tracing import Sighting, WatchedFlow

FILE = Path(__file__).with_name(f"packet_watch-{'el' if sys.byteorder == 'little' else 'eb'}.o")
"""The object for this machine; the build creates it (hatch_build.py)."""
_FILTER = struct.Struct("=16s2sBBIII")  # struct watch_filter
_SIGHTING = struct.Struct("=QQ16s16s2s2sB3xIIIIIBBBB16s")  # struct sighting
_ONLY_KEY = bytes(4)
_RST, _SYN_ACK = 4, 0x12
_BTF_KIND_ENUM = 6
_REASON_PREFIX = "SKB_DROP_REASON_"
_NO_DROP = ("NOT_DROPPED_YET", "CONSUMED")
_KINDS: Mapping[int, Literal["sent", "received", "dropped"]] = {
    1: "sent",
    2: "received",
    3: "dropped",
}
_SYMBOLS = Path("/proc/kallsyms")


class PacketWatch:
    """Watches the first packet of one socket while it is open; a context manager."""

    def __init__(self, flow: WatchedFlow, netns: int) -> None:
        """Load and attach the programs; it blocks for some milliseconds.

        Args:
            flow: the packet; it has a source port.
            netns: inode of the network namespace of its socket.

        Raises:
            OSError: libbpf, the object, privileges or the kernel's BTF are missing.
        """
        self.netns = netns
        self._found: list[bytes] = []
        self._object = OpenedObject(FILE)
        source = ipaddress.ip_address(flow.source or "::")
        wanted = _FILTER.pack(
            _packed(source) if flow.source else bytes(16),
            flow.source_port.to_bytes(2, "big"),
            *(flow.protocol.number, 0, netns, 0, 0),
        )
        # Before Linux 5.17 the tracepoint has no reason to read.
        unused = "watch_freed_somewhere" if drop_reasons() else "watch_freed"
        names = {name for name, _ in self._object.each("program")} - {unused}
        try:
            self._object.leave_out({unused})
            self._object.load()
            descriptor = self._object.descriptors("map")["filter"]
            call("bpf_map_update_elem", descriptor, _ONLY_KEY, wanted, 0)
            self._object.listen("sightings", self._found.append)
            for name in sorted(names):
                self._object.attach_tracepoint(name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PacketWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sightings(self) -> list[Sighting]:
        """Return where the packet was seen so far, in order of time."""
        self._object.consume()
        # Each CPU writes in its own order.
        records = sorted(self._found, key=lambda data: int.from_bytes(data[:8], sys.byteorder))
        return [each for each in map(_parse, records) if each.reason not in _NO_DROP]

    def close(self) -> None:
        """Detach the programs. Idempotent."""
        self._object.close()


def _packed(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bytes:
    """Return an address as the programs have it."""
    return address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed


def _text(packed: bytes) -> str:
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)


def _parse(data: bytes) -> Sighting:
    """Decode a record of the ring buffer."""
    _, location, source, destination, sport, dport, protocol, *more = _SIGHTING.unpack(data)
    reason, netns, _, mark, length, kind, reply, flags, quoted, name = more
    what = ""
    if quoted:
        what = "an ICMP error"
    elif reply:
        what = "a reset" if flags & _RST else "SYN-ACK" if flags & _SYN_ACK else "a datagram"
        what = "INIT-ACK" if what == "SYN-ACK" and protocol == 132 else what
    dropped = _KINDS[kind] == "dropped"
    return Sighting(
        _KINDS[kind],
        netns,
        name.split(b"\0")[0].decode(errors="replace"),
        *(_text(source), int.from_bytes(sport, "big")),
        *(_text(destination), int.from_bytes(dport, "big")),
        bool(reply),
        what,
        mark,
        length,
        drop_reasons().get(reason, "") if dropped else "",
        function_at(location) if dropped else "",
    )


@functools.cache
def drop_reasons() -> dict[int, str]:
    """Return the kernel's names for why it drops a packet (`enum skb_drop_reason`), by number."""
    btf = library().btf__load_vmlinux_btf()
    if not btf:
        return {}
    try:
        number = library().btf__find_by_name_kind(btf, b"skb_drop_reason", _BTF_KIND_ENUM)
        if number < 0:
            return {}
        # libbpf has no accessors: read struct btf_type, and the struct btf_enum after it.
        start = library().btf__type_by_id(btf, number)
        _, info, _ = struct.unpack("=III", ctypes.string_at(start, 12))
        values = struct.iter_unpack("=Ii", ctypes.string_at(start + 12, 8 * (info & 0xFFFF)))
        return {
            value: library().btf__name_by_offset(btf, text).decode().removeprefix(_REASON_PREFIX)
            for text, value in values
        }
    finally:
        library().btf__free(btf)


def function_at(address: int) -> str:
    """Return the function of the kernel that an address is in; "" if the kernel hides that."""
    best, name = 0, ""
    with _SYMBOLS.open() as lines:
        for line in lines:
            start = int(line[:16], 16)
            if best < start <= address:
                best, name = start, line.split()[2]
    return name
