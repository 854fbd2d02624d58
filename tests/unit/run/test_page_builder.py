"""Expensive pages: one at a time, shared, and with pauses between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable, Iterable, Iterator

import pytest

from steersman.run.serve import page_builder
from steersman.run.serve.page_builder import PageBuilder, TooManyPagesError


class Printer:
    """Makes pages that are numbered; each takes a second."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()
        self.made = self.at_once = self.most_at_once = 0
        self.go = threading.Event()
        self.go.set()
        self.seconds = 1.0
        self.builder = PageBuilder(lambda: self.now, self.sleep)

    async def page(self, key: Hashable) -> bytes:
        return b"".join(await self.builder.page(key, self.make))

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def make(self) -> Iterable[bytes]:
        return self.pieces()

    def pieces(self) -> Iterator[bytes]:
        assert threading.current_thread() is not threading.main_thread()
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        self.go.wait(60)
        self.made += 1
        self.now += self.seconds
        yield str(self.made).encode()
        self.at_once -= 1


async def test_who_asks_meanwhile_gets_the_same_page() -> None:
    printer = Printer()
    asked = [printer.page("x") for _ in range(700)]
    assert set(await asyncio.gather(*asked)) == {b"1"}
    assert printer.made == 1


async def test_different_pages_are_made_one_after_another() -> None:
    printer = Printer()
    asked = [printer.page(n) for n in range(5)]
    assert set(await asyncio.gather(*asked)) == {b"%d" % n for n in range(1, 6)}
    assert printer.most_at_once == 1


async def test_a_page_is_made_afresh_after_a_pause() -> None:
    printer = Printer()
    printer.seconds = 0.125
    assert await printer.page("x") == b"1"
    assert await printer.page("x") == b"2"
    printer.seconds = 60.0
    await printer.page("x")
    await printer.page("x")
    assert printer.slept == [0.0, 9 * 0.125, 9 * 0.125, page_builder._LONGEST_PAUSE]


async def test_who_comes_when_many_wait_is_turned_away() -> None:
    printer = Printer()
    printer.go.clear()
    asked = [asyncio.create_task(printer.page(n)) for n in range(page_builder._MOST_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyPagesError):
        await printer.page("one more")
    again = asyncio.create_task(printer.page(0))
    await asyncio.sleep(0)
    printer.go.set()
    await asyncio.gather(*asked, again)
    assert await printer.page("one more")


async def test_a_failure_reaches_who_waits_and_nobody_else() -> None:
    printer = Printer()

    async def fail() -> Iterable[bytes]:
        raise OSError(24, "too many files")

    with pytest.raises(OSError, match="too many files"):
        await printer.builder.page("x", fail)
    assert await printer.page("x") == b"1"


async def test_a_client_that_leaves_takes_nothing_from_the_others() -> None:
    printer = Printer()
    printer.go.clear()
    leaves = asyncio.create_task(printer.page("x"))
    stays = asyncio.create_task(printer.page("x"))
    await asyncio.sleep(0)
    leaves.cancel()
    printer.go.set()
    assert await stays == b"1"


async def test_a_large_page_is_kept_small_while_it_is_sent() -> None:
    pieces = [b'{"servicePlans": %d}' % n * 5000 for n in range(10)]

    async def make() -> Iterable[bytes]:
        return pieces

    builder = PageBuilder()
    asked = asyncio.create_task(builder.page("x", make))
    await asyncio.sleep(0)
    (task,) = builder._wanted.values()
    assert sum(map(len, await task)) < sum(map(len, pieces)) / 20
    assert list(await asked) == pieces
