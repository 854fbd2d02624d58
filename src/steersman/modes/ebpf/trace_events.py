"""The programs that watch a flow (c/trace.bpf.c), and the steps that their events tell.

Nothing is pinned: when this process ends, however it does, the kernel detaches and frees all.
"""

from __future__ import annotations

import enum
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import CGROUP_ATTACH_TYPES, HashMap
from steersman.modes.ebpf.loader import BesideObject

FILE = Path(__file__).with_name(f"trace-{'el' if sys.byteorder == 'little' else 'eb'}.o")
"""The object for this machine; the build creates it (hatch_build.py)."""
FILTER = struct.Struct("=16s16s2s2sB3xIII4x")
EVENT = struct.Struct("=QQQ40siIII6B2xI16s4x")
_SIZES = {"trace_filter": FILTER.size, "trace_event": EVENT.size}
_ONLY_KEY = layout.number_key(0)


class Kind(enum.IntEnum):
    """`enum trace_kind`."""

    CALLED = 1
    SENT = 2
    RECEIVED = 3
    FREED = 4


class TraceEvent(NamedTuple):
    """A `struct trace_event`; ends are packed endpoints, as in layout.py."""

    time: int
    """CLOCK_MONOTONIC, ns."""
    netns_cookie: int
    """Network namespace of a socket."""
    location: int
    """Address of the kernel's function that drops the packet."""
    source: bytes
    destination: bytes
    result: int
    """CALLED: the errno, 0 if the call goes on. FREED: the reason."""
    flow: int
    netns: int
    """Inode of the device's network namespace."""
    process: int
    kind: Kind
    translated: bool
    """Whether the socket was balanced."""
    datagram: bool
    """Whether the call was sendmsg()."""
    reply: bool
    """Whether the packet is an answer."""
    tcp_flags: int
    quoted: bool
    """Whether an ICMP error quotes the packet."""
    device: int
    """Index of the device; 0 if there is none."""
    name: str
    """Of the device or the process."""

    @classmethod
    def unpack(cls, data: bytes) -> TraceEvent:
        """Take a record of the ring buffer apart."""
        time, cookie, location, key, result, flow, netns, process, *more = EVENT.unpack(data)
        kind, translated, datagram, reply, tcp_flags, quoted, device, text = more
        source, destination, source_port, destination_port, *_ = layout.FLOW_KEY.unpack(key)
        return cls(
            *(time, cookie, location, source + source_port, destination + destination_port),
            *(result, flow, netns, process),
            kind=Kind(kind),
            translated=bool(translated),
            datagram=bool(datagram),
            reply=bool(reply),
            tcp_flags=tcp_flags,
            quoted=bool(quoted),
            device=device,
            name=text.split(b"\0")[0].decode(errors="replace"),
        )


class Watcher(BesideObject):
    """Watches flows while it is open; to open and to close it blocks, for some milliseconds."""

    def __init__(self, maps: Path, cgroup: int, wanted: bytes) -> None:
        """Load and attach.

        Args:
            maps: directory of the mode's pinned maps.
            cgroup: descriptor of the cgroup whose sockets the mode balances; -1 for none.
            wanted: a FILTER.

        Raises:
            OSError, StaleMapsError: as BesideObject.
        """
        self._events: list[TraceEvent] = []
        super().__init__(FILE, maps, _SIZES)
        try:
            self._filter = HashMap(self.maps["filter"])
            self._filter.put(_ONLY_KEY, wanted)
            self.listen("events", lambda data: self._events.append(TraceEvent.unpack(data)))
            for name, _ in self.each("program"):
                attach_type = CGROUP_ATTACH_TYPES.get(name.replace("trace_", "sm_"))
                if attach_type is None:
                    self.attach_tracepoint(name)
                elif cgroup >= 0:
                    self.attach_socket(name, cgroup, attach_type)
        except BaseException:
            self.close()
            raise

    def read(self) -> Sequence[TraceEvent]:
        """Return the events since the last time."""
        self.consume()
        events, self._events = self._events, []
        return events

    def count_lost(self) -> int:
        """Count the events for which the buffer had no room."""
        lost: int = FILTER.unpack(self._filter.get(_ONLY_KEY) or bytes(FILTER.size))[-1]
        return lost
