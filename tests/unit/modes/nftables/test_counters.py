"""Counters beside transactions: scrapes that meet one, and lists that are not consistent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from steersman.host.netlink import DumpInterruptedError, Netlink
from steersman.host.nlmsg import Message, Request, attr, nested, text
from steersman.host.worker import finish
from steersman.model.errors import BusyError
from steersman.modes.nftables import counters
from steersman.modes.nftables.counters import Scrape, read_counts
from tests.support.builders import nftables_plans as make


class Socket:
    """A socket whose first lists are interrupted; all of them are empty."""

    def __init__(self) -> None:
        self.interrupted = 0
        self.dumps = 0

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def dump(self, _request: Request) -> tuple[()]:
        self.dumps += 1
        if self.interrupted:
            self.interrupted -= 1
            raise DumpInterruptedError("dump")
        return ()


@pytest.fixture
def socket(monkeypatch: pytest.MonkeyPatch) -> Socket:
    made = Socket()
    monkeypatch.setattr(counters, "open_netlink", lambda: made)
    return made


def test_a_scrape_is_repeated_if_the_ruleset_changes_meanwhile(socket: Socket) -> None:
    socket.interrupted = 2
    assert finish(Scrape().steps({}, [make.port()])).endpoints == {}
    assert socket.dumps > 2


def test_a_scrape_gives_up_after_three_attempts(socket: Socket) -> None:
    socket.interrupted = 3
    scraping = Scrape()
    with pytest.raises(BusyError):
        finish(scraping.steps({}, [make.port()]))
    assert finish(scraping.steps({}, [make.port()])).endpoints == {}, "the next one works"


@pytest.mark.usefixtures("socket")
def test_a_scrape_waits_for_the_one_before_it() -> None:
    """The counts of the later one would be added to totals that are newer."""
    scraping = Scrape()
    first, second = (scraping.steps({}, [make.port()]) for _ in range(2))
    next(first)
    next(second)
    next(second)
    finish(first)
    finish(second)


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

    found = finish(read_counts(cast("Netlink", Lists())))
    assert [count for _, count in found.values()] == [7, 7, 7]
