"""Failures told from counters as the kernel (6.1) counts them, and which watch is chosen."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Collection, Generator, Iterator
from typing import Any, NamedTuple

import pytest

from steersman.failover.watch import Failure
from steersman.host.netlink import DumpInterruptedError
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Observation
from steersman.model.names import Protocol
from steersman.modes.ipvs import failures
from steersman.modes.ipvs.failures import CounterWatch, judge, watch_servers
from steersman.modes.ipvs.objects import ServerKey, Target
from steersman.modes.ipvs.wire import ServerStats
from tests.support.modes.inline import Inline

TCP, UDP = Protocol.TCP, Protocol.UDP
VIP, PORT = ServerKey(TCP, "10.96.0.1", 80), ServerKey(TCP, "192.0.2.1", 30080)
DATAGRAMS = ServerKey(UDP, "10.96.0.1", 53)
END, OTHER = ("10.244.0.1", 8080), ("10.244.0.2", 8080)
HEALTHY = ServerStats(3, 12, 9, 700, 492)
REFUSING = ServerStats(3, 3, 3, 180, 120)
SILENT = ServerStats(3, 7, 0, 420, 0)
ZERO = ServerStats(0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("ip", "counted", "expected"),
    [
        ("10.244.0.1", HEALTHY, None),
        ("10.244.0.1", REFUSING, Observation.REFUSED),
        ("10.244.0.1", SILENT, Observation.SILENT),
        ("fd00::1", ServerStats(3, 3, 3, 240, 180), Observation.REFUSED),
        ("fd00::1", REFUSING, None),
        # SYNs that were sent again, for connections from before
        ("10.244.0.1", ServerStats(0, 5, 0, 300, 0), Observation.SILENT),
        # Acknowledgements without options, to an old connection, beside a new one
        ("10.244.0.1", ServerStats(1, 30, 29, 5000, 1160), None),
        ("10.244.0.1", ZERO, None),
    ],
)
def test_counters_tell_what_endpoints_do(
    ip: str, counted: ServerStats, expected: Observation | None
) -> None:
    assert judge(Backend(ip, 8080, TCP), counted) is expected


class Listing(NamedTuple):
    key: ServerKey
    stats: ServerStats


class Kernel:
    """Virtual servers, and what they and their real servers have counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[ServerKey, dict[Target, ServerStats]] = {}
        self.asked: list[ServerKey] = []
        self.looks = 0
        self.interrupted = False
        monkeypatch.setattr(failures, "_INTERVAL", 0.0)
        monkeypatch.setattr(failures, "Netlink", lambda *_, **__: self)
        monkeypatch.setattr(failures, "resolve", lambda _: 7)
        monkeypatch.setattr(failures, "list_services", self.servers)
        monkeypatch.setattr(failures, "list_destinations", self.reals)

    def close(self) -> None:
        """As a socket does."""

    def servers(self, *_: object) -> list[Listing]:
        self.looks += 1
        if self.interrupted:
            raise DumpInterruptedError(errno.EINTR, "again")
        return [
            Listing(key, ServerStats(*map(sum, zip(*reals.values(), strict=True))))
            for key, reals in self.counts.items()
        ]

    def reals(self, _netlink: Any, _family: int, key: ServerKey) -> Iterator[Any]:
        self.asked.append(key)
        yield from self.counts[key].items()

    def watch(self) -> CounterWatch:
        return CounterWatch(Inline())

    async def looked(self, times: int) -> None:
        wanted = self.looks + times
        async with asyncio.timeout(60):
            while self.looks < wanted:  # noqa: ASYNC110 - a thread looks
                await asyncio.sleep(0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


async def test_what_is_counted_from_now_on_is_judged(kernel: Kernel) -> None:
    kernel.counts = {VIP: {END: SILENT, OTHER: HEALTHY}, PORT: {END: ZERO}}
    watch = kernel.watch()
    receiving = asyncio.create_task(watch.receive())
    await kernel.looked(3)
    assert not receiving.done(), "that was before"
    assert kernel.asked == [VIP], "nothing has changed, and nothing was counted at the node port"
    more = ServerStats(*map(sum, zip(SILENT, SILENT, strict=True)))
    kernel.counts = {**kernel.counts, VIP: {END: more, OTHER: HEALTHY}}
    async with asyncio.timeout(60):
        assert await receiving == [Failure(Backend(*END, TCP), Observation.SILENT)]
    await watch.aclose()


async def test_all_virtual_servers_of_an_endpoint_count(kernel: Kernel) -> None:
    kernel.counts = {VIP: {END: ZERO}, PORT: {END: ZERO, OTHER: ZERO}, DATAGRAMS: {END: ZERO}}
    watch = kernel.watch()
    receiving = asyncio.create_task(watch.receive())
    await kernel.looked(2)
    # It answers at the node port, so it works; UDP is left alone.
    kernel.counts = {
        VIP: {END: SILENT},
        PORT: {END: HEALTHY, OTHER: ZERO},
        DATAGRAMS: {END: SILENT},
    }
    await kernel.looked(3)
    assert not receiving.done()
    kernel.counts = {VIP: {END: SILENT}, PORT: {END: HEALTHY, OTHER: REFUSING}}
    async with asyncio.timeout(60):
        assert await receiving == [Failure(Backend(*OTHER, TCP), Observation.REFUSED)]
    await watch.aclose()


async def test_servers_that_are_made_anew_count_from_zero(kernel: Kernel) -> None:
    kernel.counts = {VIP: {END: HEALTHY, OTHER: HEALTHY}}
    watch = kernel.watch()
    receiving = asyncio.create_task(watch.receive())
    await kernel.looked(2)
    kernel.interrupted = True
    await kernel.looked(2)
    kernel.interrupted = False
    kernel.counts = {VIP: {END: ServerStats(1, 2, 0, 120, 0), OTHER: HEALTHY}}
    async with asyncio.timeout(60):
        assert await receiving == [Failure(Backend(*END, TCP), Observation.SILENT)]
    await watch.aclose()


async def test_connections_to_cut_are_those_of_conntrack(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(backends: Collection[Backend]) -> Generator[None, None, int]:
        yield
        return len(backends)

    monkeypatch.setattr(failures, "delete_unanswered", delete)
    assert await kernel.watch().cut([Backend(*END, TCP), Backend(*OTHER, TCP)]) == 2


def test_packets_are_preferred_to_counters(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del kernel

    def opened(_worker: object, *, translated: bool) -> str:
        assert not translated
        return "packets"

    monkeypatch.setattr(failures, "FailureLog", opened)
    found: Any = watch_servers(Inline())
    assert found == "packets"

    def refused(_worker: object, *, translated: bool) -> None:
        raise BusyError(f"Linux is too old ({translated})")

    monkeypatch.setattr(failures, "FailureLog", refused)
    assert isinstance(watch_servers(Inline()), CounterWatch)
    assert "too old (False); reading the counters of real servers instead" in caplog.text


@pytest.mark.parametrize("function", ["Netlink", "resolve"])
def test_a_kernel_that_does_not_answer(
    function: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOENT, "no such thing")

    monkeypatch.setattr(failures, function, refuse)
    with pytest.raises(BusyError, match="no such thing"):
        kernel.watch()
