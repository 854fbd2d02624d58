"""Counters beside transactions: scrapes that meet one, and counts that are carried over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest

from steersman.host.netlink import Netlink
from steersman.host.nlmsg import Message, Request, attr, nested, text
from steersman.model.errors import BusyError
from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Diff, diff
from steersman.modes.nftables.counters import CounterReading, ElementCounters, Scrape
from steersman.modes.nftables.relay import Relay
from steersman.modes.nftables.render import Slots, render_service
from tests.support.builders import nftables_plans as make


class Socket:
    """A socket that is not used."""

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        return


class Answers:
    """Counters with given readings; records whether transactions were held up."""

    def __init__(self, answers: Iterable[dict[bytes, int] | None], lock: asyncio.Lock) -> None:
        self._answers = list(answers)
        self._lock = lock
        self.held: list[bool] = []

    def totals(self, _netlink: Netlink) -> CounterReading | None:
        self.held.append(self._lock.locked())
        answer = self._answers.pop(0)
        return None if answer is None else CounterReading(answer, {})


async def scrape(*answers: dict[bytes, int] | None) -> list[bool]:
    lock = asyncio.Lock()
    counters = Answers(answers, lock)
    connect = cast("Callable[[], Netlink]", Socket)
    await Scrape(connect, lock).stats(cast(Any, counters), Relay(), [make.port()])
    return counters.held


async def test_a_scrape_holds_transactions_up_after_three_attempts() -> None:
    assert await scrape({}) == [False]
    assert await scrape(None, None, {}) == [False] * 3
    assert await scrape(None, None, None, {}) == [False] * 3 + [True]


async def test_a_scrape_without_a_reading_fails() -> None:
    with pytest.raises(BusyError):
        await scrape(None, None, None, None)


def test_counts_are_not_read_during_a_replacement() -> None:
    class Nothing:
        def dump(self, _request: object) -> tuple[()]:
            return ()

        def request(self, _request: object) -> tuple[()]:
            return ()

    netlink = cast(Any, Nothing())
    counters = ElementCounters(netlink)
    assert counters.totals(netlink) == ({}, {})
    with counters.carried_over(Diff(removed={b"\x01\x04": b""})):
        assert counters.totals(netlink) is None
    assert counters.totals(netlink) == ({}, {})
    with counters.carried_over(Diff(added={b"\x01\x04": b""})):
        assert counters.totals(netlink) == ({}, {})


def test_an_element_that_is_listed_twice_counts_once() -> None:
    """The kernel lists an element again if a new one came while it listed them."""
    counter = nested(2, attr(1, bytes(8)), attr(2, (7).to_bytes(8, "big")))

    def listed(number: int) -> bytes:
        key = nested(1, attr(1, bytes((10, 96, 0, number, 6, 0, 0, 0, 0, 80, 0, 0))))
        return nested(1, key, nested(7, text(1, "counter"), counter))

    class Lists:
        def dump(self, request: Request) -> Iterator[Message]:
            if b"service-ips\0" in request.payload and request.payload[0] == 2:
                for elements in ((listed(1), listed(2)), (listed(2), listed(3))):
                    yield Message(0, 0, 0, bytes(4) + nested(3, *elements))

    netlink = cast(Any, Lists())
    reading = ElementCounters(netlink).totals(netlink)
    assert reading is not None
    assert [*reading.totals.values()] == [7, 7, 7]


@pytest.mark.parametrize(
    ("before", "after", "maps"),
    [
        (make.port([0, 1]), make.port([0, 3]), 0),
        (make.port([0, 1]), make.port([0, 1, 3]), 0),
        (make.port([0, 1, 3]), make.port([1, 3]), 1),  # another slot
        (make.port([0, 1]), make.moved(make.port([0, 1])), 1),
        (make.port([0, 1]), make.port(range(9)), 1),  # another chain
    ],
)
def test_only_counters_that_stay_are_read_before_a_replacement(
    before: ServicePlan, after: ServicePlan, maps: int
) -> None:
    asked = []

    class Silent:
        def request(self, request: object) -> tuple[()]:
            asked.append(request)
            return ()

    slots: Slots = {}
    old, new = (render_service(plan, make.SETTINGS, slots) for plan in (before, after))
    with ElementCounters(cast(Any, Silent())).carried_over(diff(old, new)):
        assert len(asked) == maps
