"""Lists of conntrack entries as kernels send them, and the silent endpoints in them."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Generator, Iterator, Sequence
from itertools import islice

import pytest

from steersman.failover.watch import Failure
from steersman.host.netlink import DumpInterruptedError, NetlinkError
from steersman.host.nlmsg import Message, Request, attr, be16, be32, nested, u8
from steersman.host.sysctl import SysctlError
from steersman.host.worker import finish
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Observation
from steersman.model.names import Protocol
from steersman.netfilter.conntrack import unanswered
from steersman.netfilter.conntrack.unanswered import ConntrackWatch
from tests.support.modes.inline import Inline

BACKEND = Backend("10.0.0.1", 8080, Protocol.TCP)


def entry(
    left: int,
    *,
    endpoint: int = 1,
    client: int = 40000,
    state: int = 1,
    mark: int = 0,
    old_order: bool = False,
) -> bytes:
    """An attempt to connect to an endpoint, with so many seconds left."""

    def tuple_(source: bytes, destination: bytes, source_port: int, port: int) -> bytes:
        ports = u8(1, 6), be16(2, source_port), be16(3, port)
        return nested(1, attr(1, source), attr(2, destination)) + nested(2, *ports)

    me, vip, pod = bytes((10, 0, 9, 9)), bytes((10, 96, 0, 10)), bytes((10, 0, 0, endpoint))
    status, timeout = be32(3, 0x28), be32(7, left)
    numbers = [status, timeout, be32(8, mark)] if old_order else [status, be32(8, mark), timeout]
    tuples = nested(1, tuple_(me, vip, client, 80)), nested(2, tuple_(pod, me, 8080, client))
    return b"\2\0\0\0" + b"".join((*tuples, *numbers, nested(4, nested(1, u8(1, state)))))


class Kernel:
    """A kernel with a conntrack table; the stand-in for Netlink."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.knows_masks = True
        self.interrupts = False
        self.refuses = 0
        self.closed = 0

    def __call__(self, _protocol: int, **_: object) -> Kernel:
        return self

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def dump(self, request: Request) -> Iterator[Message]:
        if self.refuses:
            raise NetlinkError(self.refuses, os.strerror(self.refuses))
        if self.knows_masks and request.payload.endswith(be32(26, 0)):
            raise NetlinkError(errno.EINVAL, "an empty mask")
        yield from (Message(0x100, 0, 1, each) for each in self.entries)
        if self.interrupts:
            raise DumpInterruptedError(errno.EINTR, "it changed")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(unanswered, "Netlink", kernel)
    monkeypatch.setattr(unanswered, "read", lambda _: 120)
    monkeypatch.setattr(unanswered, "_SHORTEST", 0.0)
    return kernel


def listed(entries: Sequence[bytes], kernel: Kernel, pause: float = 1.0) -> list[Failure]:
    kernel.entries = list(entries)
    watch = ConntrackWatch(Inline())
    watch._pause = pause
    return finish(watch._list())


@pytest.mark.parametrize("old_order", [False, True])
@pytest.mark.parametrize(
    ("left", "silent"),
    [(120, False), (119, False), (118, True), (117, True), (116, False), (3, False), (300, False)],
)
def test_the_time_left_is_the_age(kernel: Kernel, left: int, silent: bool, old_order: bool) -> None:
    found = listed([entry(left, old_order=old_order)], kernel)
    assert found == [Failure(BACKEND, Observation.SILENT, "10.0.9.9")] * silent


def test_longer_pauses_take_older_attempts(kernel: Kernel) -> None:
    entries = [entry(left) for left in (116, 113, 112)]
    assert len(listed(entries, kernel)) == 0
    assert len(listed(entries, kernel, pause=5.0)) == 2


def test_a_connection_that_began_before_conntrack_is_no_attempt(kernel: Kernel) -> None:
    assert listed([entry(118, state=3)], kernel) == []


def test_a_number_that_looks_like_the_time_is_not_taken_for_it(kernel: Kernel) -> None:
    header = int.from_bytes(be32(7, 0)[:4], "big")
    assert listed([entry(20, mark=118), entry(20, mark=header)], kernel) == []
    assert len(listed([entry(118, mark=header)], kernel)) == 1


def test_entries_of_other_families_and_layouts_are_left_out(kernel: Kernel) -> None:
    strange = b"\7" + entry(118)[1:]
    assert listed([strange, b"\2\0\0\0", b"\2\0\0\0" + bytes(200)], kernel) == []


def test_a_flood_to_one_endpoint_does_not_hide_another(kernel: Kernel) -> None:
    flood = [entry(118, client=number) for number in range(1, 2000)]
    found = listed([*flood, entry(118, endpoint=2)], kernel)
    assert {each.backend.ip for each in found} == {"10.0.0.1", "10.0.0.2"}
    assert len(found) == unanswered._MOST_OF_ONE + 1


def test_the_reading_of_a_list_ends(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unanswered, "_MOST", 3)
    entries = [entry(118, endpoint=number) for number in range(1, 6)]
    assert len(listed(entries, kernel)) == 3


def test_a_list_that_changed_while_it_was_read_is_used(kernel: Kernel) -> None:
    kernel.interrupts = True
    assert len(listed([entry(118)], kernel)) == 1


def test_it_waits_until_something_is_silent(kernel: Kernel) -> None:
    kernel.entries = [entry(118)]

    async def receive() -> list[Failure]:
        watch = ConntrackWatch(Inline())
        kernel.closed = 0
        return await watch.receive()

    assert asyncio.run(receive()) == [Failure(BACKEND, Observation.SILENT, "10.0.9.9")]
    assert kernel.closed == 1


def test_the_pause_follows_the_cost(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unanswered, "_SHORTEST", 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    costs = iter([0.001, 0.05, 9.0, 0.001])

    def costly(_: object) -> Generator[None, None, tuple[list[Failure], float]]:
        return [], next(costs)
        yield

    monkeypatch.setattr(unanswered, "measured", costly)
    looks = ConntrackWatch(Inline())._look()
    pauses = [pause.until for pause in islice(looks, 5) if pause]
    assert pauses == pytest.approx([1.0, 1.0, 0.05 / unanswered._SHARE, 5.0, 1.0])


def test_a_kernel_that_ignores_masks_is_too_old(kernel: Kernel) -> None:
    kernel.knows_masks = False
    with pytest.raises(BusyError, match=r"needs Linux 5\.15"):
        ConntrackWatch(Inline())


@pytest.mark.parametrize(
    ("number", "why"),
    [(errno.EPERM, "needs root or CAP_NET_ADMIN"), (errno.ENOMEM, "fails: Cannot allocate")],
)
def test_a_refused_list_is_explained(kernel: Kernel, number: int, why: str) -> None:
    kernel.refuses = number
    with pytest.raises(BusyError, match=why):
        ConntrackWatch(Inline())


def test_without_connection_tracking_there_is_nothing_to_list(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: str) -> int:
        raise SysctlError(errno.ENOENT, "/proc/sys/x cannot be read: No such file")

    monkeypatch.setattr(unanswered, "read", missing)
    with pytest.raises(BusyError, match="conntrack is not in use"):
        ConntrackWatch(Inline())
    assert kernel.closed == 0
