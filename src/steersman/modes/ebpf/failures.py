"""See connections to endpoints fail.

    programs of devices (c/failures.h) --+--> ring buffer --> receive()
    tracepoints (c/failures.bpf.c) ------+--> the time of each endpoint's last answer

Programs note nothing unless `watching.until` is in the future. The watch renews it, so that also a
killed process is soon forgotten; its tracepoints go with it at once.

Answers are counted from a failure on, until there was none for a minute: a connection that succeeds
while nothing fails costs nothing. For the first moments it is not known whether an endpoint answers
others, so no more than two of its silent connections are returned: three would be taken as proof.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from steersman.failover.watch import Failure, FailureWatch
from steersman.host.worker import KernelWorker, Pause
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Observation
from steersman.model.names import PROTOCOL_BY_NUMBER, Protocol
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import ArrayMap, HashMap
from steersman.modes.ebpf.loader import BesideObject, StaleMapsError, explain
from steersman.modes.ebpf.mover import Mover

FILE = Path(__file__).with_name(f"failures-{'el' if sys.byteorder == 'little' else 'eb'}.o")
"""The object for this machine; the build creates it (hatch_build.py)."""
_RENEWAL = 20.0  # seconds
_LEASE = 60_000_000_000  # ns
_SYN_AGE = 900_000_000  # ns; a SYN is that old at least when it is sent again
_COUNTED = 60.0  # seconds after the last failure in which answers are counted
_UNKNOWN = 1.5  # seconds from when they are counted until it is known who answers
_UNKNOWN_SILENT = 2  # silent connections of an endpoint that are returned in this time
_REMEMBERED = 4096  # endpoints
_ONLY = layout.number_key(0)
_OBSERVATIONS = (
    *(Observation.ANSWERED, Observation.SILENT),
    *(Observation.REFUSED, Observation.UNREACHABLE),
)
"""By number: `enum failure_kind`; none of them is an answer."""
_TCP = Protocol.TCP.number


class Event(NamedTuple):
    """A `struct failure`."""

    endpoint: bytes
    """Packed."""
    client: bytes
    """Packed address; unspecified if it is not known."""
    time: int
    """CLOCK_MONOTONIC, ns."""
    protocol: int
    kind: int

    @classmethod
    def unpack(cls, data: bytes) -> Event:
        """Take a record of the ring buffer apart."""
        address, client, at, port, protocol, kind = layout.FAILURE.unpack(data)
        return cls(address + port, client, at, protocol, kind)

    @property
    def failure(self) -> Failure:
        """The same as addresses and names."""
        known = self.client not in layout.UNSPECIFIED.values()
        client = layout.print_address(self.client) if known else ""
        return Failure(_backend(self.endpoint, self.protocol), _OBSERVATIONS[self.kind], client)


def _backend(endpoint: bytes, protocol: int) -> Backend:
    address, port = layout.split_endpoint(endpoint)
    return Backend(layout.print_address(address), port, PROTOCOL_BY_NUMBER[protocol])


class EbpfFailures(FailureWatch):
    """Failures of connections that the mode's programs balance."""

    counts_answers = True

    def __init__(self, worker: KernelWorker, maps: Path) -> None:
        """Start to watch.

        Args:
            worker: the calling thread.
            maps: directory of the mode's pinned maps.

        Raises:
            BusyError: it cannot be seen here; the message says why.
        """
        self._worker = worker
        self._events: list[Event] = []
        self._told: dict[bytes, int] = {}
        """The last answer of each endpoint that `receive` has returned."""
        self._last_read = 0
        self._counting: int | None = None
        """What counts answers, while they are counted."""
        self._counts_since = self._counts_until = 0.0
        self._silent: Counter[bytes] = Counter()
        """Silent connections by endpoint while it is not known who answers."""
        self._mover = Mover(maps)
        try:
            self._object = BesideObject(FILE, maps, layout.FAILURE_SIZES, layout.OFFSETS)
            try:
                self._begin()
            except OSError:
                self._object.close()
                raise
        except (OSError, StaleMapsError) as error:
            why = explain(error, FILE)
            raise BusyError(f"ebpf: connections cannot be seen to fail: {why}") from error

    def _begin(self) -> None:
        fds = self._object.maps
        self._health, self._answers = HashMap(fds["health"]), HashMap(fds["answers"])
        self._watching = ArrayMap(fds["watching"])
        self._object.listen("failures", lambda data: self._events.append(Event.unpack(data)))
        self._object.consume()  # what a killed process has left
        self._events.clear()
        self._object.attach_tracepoint("failure_repeat")
        self._object.attach_tracepoint("failure_error")
        self._renew()

    async def receive(self) -> list[Failure]:
        """Wait for failures, and say which endpoints answer meanwhile."""
        return await self._worker.do_slowly(self._wait())

    def _wait(self) -> Generator[Pause | None, None, list[Failure]]:
        while True:
            self._renew()
            self._object.consume()
            if self._events:
                self._count_answers()
                events, self._events = self._events, []
                return [*self._answered(events), *self._failures(events)]
            if self._counting is not None and time.monotonic() > self._counts_until:
                self._stop_counting()
            # Not longer than the lease allows.
            yield Pause(self._object.fileno(), time.monotonic() + _RENEWAL)

    def _count_answers(self) -> None:
        """Count answers from now on, and for a while."""
        now = time.monotonic()
        if self._counting is None:
            self._counting = self._object.attach_tracepoint("failure_answer")
            self._counts_since = now
            self._silent.clear()
            self._store("answers", _LEASE)
        self._counts_until = now + _COUNTED

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._object.detach(self._counting)
        self._counting = None
        self._store("answers", 0)

    def _failures(self, events: Collection[Event]) -> Iterator[Failure]:
        """Yield failures, but few silent connections while it is not known who answers."""
        unknown = time.monotonic() - self._counts_since < _UNKNOWN
        for event in events:
            if unknown and _OBSERVATIONS[event.kind] is Observation.SILENT:
                self._silent[event.endpoint] += 1
                if self._silent[event.endpoint] > _UNKNOWN_SILENT:
                    continue
            yield event.failure

    def _renew(self) -> None:
        self._store("until", _LEASE)
        if self._counting is not None:
            self._store("answers", _LEASE)

    def _store(self, field: str, lease: int) -> None:
        until = time.monotonic_ns() + lease if lease else 0
        place = layout.OFFSETS["watching"][field]
        self._watching.store(0, place, until.to_bytes(8, layout.BYTE_ORDER))

    def _answered(self, events: Collection[Event]) -> Iterator[Failure]:
        """Yield the answers that are newer than the failures, and the last ones of others.

        A SYN that is sent again was sent before a second ago: an answer since then shows that the
        endpoint is alive, an earlier one shows nothing.
        """
        failed = {event.endpoint: event for event in events if event.protocol == _TCP}
        if len(self._told) > _REMEMBERED:
            self._told.clear()
        for endpoint, event in failed.items():
            value = self._health.get(layout.SLOT.pack(endpoint))
            answered = layout.HEALTH.unpack(value)[0] if value else 0
            silent = _OBSERVATIONS[event.kind] is Observation.SILENT
            since = event.time - _SYN_AGE if silent else event.time
            if answered > max(since, self._told.get(endpoint, 0)):
                self._told[endpoint] = answered
                yield Failure(_backend(endpoint, _TCP), Observation.ANSWERED)
        # One of each CPU. They are witnesses: this node's own link works, or did when the SYN was
        # sent; an older answer says nothing.
        oldest = max(self._last_read, min(event.time for event in events) - _SYN_AGE)
        latest = {
            endpoint: at
            for endpoint, at in layout.ANSWER.iter_unpack(self._answers.get(_ONLY) or b"")
            if at > oldest and endpoint not in failed
        }
        for endpoint, at in latest.items():
            self._last_read = max(self._last_read, at)
            yield Failure(_backend(endpoint, _TCP), Observation.ANSWERED)

    async def cut(self, backends: Collection[Backend]) -> int:
        """Let connections that wait for these endpoints begin again, or move them to others."""
        return await self._worker.do(self._mover.cut, frozenset(backends))

    async def aclose(self) -> None:
        """Detach everything; the mode's programs note nothing more."""

        def close() -> None:
            self._store("until", 0)
            self._store("answers", 0)
            self._object.close()

        await self._worker.do(close)
