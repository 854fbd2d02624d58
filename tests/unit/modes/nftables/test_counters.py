"""Counters beside transactions: scrapes that meet one, and counts that are carried over."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, cast

import pytest

from steersman.host.netlink import Netlink
from steersman.host.nlmsg import Message, Request, attr, nested, text
from steersman.model.errors import BusyError
from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Diff, diff
from steersman.modes.nftables.counters import CounterReading, ElementCounters, Scrape
from steersman.modes.nftables.render import Slots, render_service
from tests.support.builders import nftables_plans as make


class Socket:
    """A socket that is not used."""

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        return


class Answers:
    """Counters with given readings, in two steps each."""

    def __init__(self, answers: Iterable[dict[bytes, int] | None]) -> None:
        self._answers = list(answers)

    def totals(self, _netlink: Netlink) -> Generator[None, None, CounterReading | None]:
        answer = self._answers.pop(0)
        yield
        return None if answer is None else CounterReading(answer, {})


def scrape(*answers: dict[bytes, int] | None) -> int:
    """Return how often a scrape gives way to transactions."""
    connect = cast("Callable[[], Netlink]", Socket)
    return len([*Scrape(connect).steps(cast(Any, Answers(answers)), {}, [make.port()])])


def test_a_scrape_holds_transactions_up_after_three_attempts() -> None:
    assert scrape({}) == 1
    assert scrape(None, None, {}) == 3
    assert scrape(None, None, None, {}) == 3


def test_a_scrape_without_a_reading_fails() -> None:
    with pytest.raises(BusyError):
        scrape(None, None, None, None)


def test_a_scrape_waits_for_the_one_before_it() -> None:
    """The counts of the later one would be added to totals that are newer."""
    scraping = Scrape(cast("Callable[[], Netlink]", Socket))
    first, second = (
        scraping.steps(cast(Any, Answers([{}, {}])), {}, [make.port()]) for _ in range(2)
    )
    next(first)
    next(second)
    next(second)
    with pytest.raises(StopIteration):
        next(first)
    next(second)
    with pytest.raises(StopIteration):
        next(second)


def total(steps: Generator[None, None, CounterReading | None]) -> CounterReading | None:
    """Return the result of all steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            reading: CounterReading | None = end.value
            return reading


def test_counts_are_not_read_during_a_replacement() -> None:
    class Nothing:
        def dump(self, _request: object) -> tuple[()]:
            return ()

        def request(self, _request: object) -> tuple[()]:
            return ()

    netlink = cast(Any, Nothing())
    counters = ElementCounters(netlink)
    assert total(counters.totals(netlink)) == ({}, {})
    steps = counters.totals(netlink)
    next(steps)
    with counters.carried_over(Diff(removed={b"\x01\x04": b""})):
        pass
    assert total(steps) is None
    steps = counters.totals(netlink)
    next(steps)
    with counters.carried_over(Diff(added={b"\x01\x04": b""})):
        pass
    assert total(steps) == ({}, {})


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
    reading = total(ElementCounters(netlink).totals(netlink))
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
