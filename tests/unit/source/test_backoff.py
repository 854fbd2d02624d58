"""When to ask again: of one node, and of all nodes of a cluster together."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from steersman.model.kube import EndpointSlice, KubeObject, ObjectMeta, Service, SliceEndpoint
from steersman.source.pace import Backoff, Pace, ServerOrder, Timing
from steersman.source.stats import SourceStats
from tests.support.virtual import VirtualLoop, run


def clock(loop: VirtualLoop, seed: int = 0) -> Timing:
    return Timing(now=loop.time, random=random.Random(seed).random)


def test_waits_grow_to_their_limit_and_start_anew() -> None:
    longest = Backoff(Timing(random=lambda: 1.0, first=1.0, longest=5.0))
    assert [longest.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert longest.grown
    longest.reset()
    assert longest.next() == 1.0
    least = Backoff(Timing(random=lambda: 0.0, first=1.0, longest=5.0))
    assert [round(least.next(), 9) for _ in range(4)] == [0.1, 0.2, 0.4, 0.5]


@given(dice=st.floats(0, 1, exclude_max=True), wish=st.floats(0, 1e6), tries=st.integers(1, 8),
       spread=st.floats(0, 30))  # fmt: skip
def test_waits_have_bounds(dice: float, wish: float, tries: int, spread: float) -> None:
    backoff = Backoff(Timing(random=lambda: dice, first=1.0, longest=8.0))
    wait = [backoff.next(wish, spread) for _ in range(tries)][-1]
    window = max(spread, min(2.0 ** (tries - 1), 8.0))
    asked = min(wish, 300.0)
    assert asked + 0.1 * window <= wait <= asked + window


def test_nodes_that_fail_together_come_back_evenly() -> None:
    """No tenth of the time has much more than its share, whatever they were told to wait."""
    dice = random.Random(1)
    for retry_after in (0.0, 7.0):
        waits = [Backoff(Timing(random=dice.random)).next(retry_after, 9.0) for _ in range(9000)]
        assert min(waits) >= retry_after + 0.9
        tenths = Counter(int((wait - retry_after - 0.9) / 0.81) for wait in waits)
        assert set(tenths) == set(range(10))
        assert max(tenths.values()) < 1000


def test_the_time_to_come_back_grows_with_the_cluster() -> None:
    stats = SourceStats()
    pace = Pace(Timing(resume_spacing=0.001, list_spacing=0.005, longest=30.0), stats)
    assert pace.spread(0.005) == 0.005
    stats.nodes = 5000
    assert (pace.spread(0.001), pace.spread(0.005)) == (5.0, 25.0)
    stats.nodes = 100_000
    assert pace.spread(0.005) == 30.0


def test_nodes_are_counted_in_slices_while_they_pass() -> None:
    stats = SourceStats()
    pace = Pace(Timing(), stats)
    names = ("a", "b", "a", None, "c")
    listed: list[KubeObject] = [
        EndpointSlice(
            ObjectMeta(f"s{n}", "shop"), endpoints=[SliceEndpoint([], node_name=name)] * 2
        )
        for n, name in enumerate(names)
    ]
    assert list(pace.counted(listed)) == listed
    assert stats.nodes == 4  # None counts, too: it is an estimate
    services: list[KubeObject] = [Service(ObjectMeta("s", "shop"))]
    assert list(pace.counted(services)) == services
    assert stats.nodes == 4


def test_one_kind_at_a_time_looks_for_a_server() -> None:
    async def main(loop: VirtualLoop) -> None:
        began, tries = loop.time(), list[float]()
        pace = Pace(clock(loop), SourceStats())

        async def kind() -> None:
            while loop.time() - began < 300:
                await pace.wait_for_server()
                tries.append(loop.time() - began)

        await asyncio.gather(*(kind() for _ in range(4)))
        gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
        assert max(gaps) <= 30.0
        assert all(gap >= 0.1 for gap in gaps)
        in_minutes = Counter(int(each // 60) for each in tries)
        assert in_minutes[0] <= 12  # four kinds by themselves: 24 at least
        assert all(in_minutes[minute] <= 10 for minute in (1, 2, 3, 4))

    run(main)


def test_an_answer_lets_all_kinds_go_on_and_starts_the_delays_anew() -> None:
    async def main(loop: VirtualLoop) -> None:
        pace = Pace(clock(loop), SourceStats())
        for _ in range(8):
            await pace.wait_for_server()
        assert pace.level >= 5
        waiting = [asyncio.create_task(pace.wait_for_server()) for _ in range(4)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        began = loop.time()
        pace.answered()
        await asyncio.gather(*waiting)
        assert loop.time() - began < 0.001
        assert pace.level == 0
        assert not pace.unreachable

    run(main)


def test_a_cancelled_wait_leaves_the_turn_to_the_next() -> None:
    async def main(_: VirtualLoop) -> None:
        pace = Pace(Timing(random=lambda: 0.5), SourceStats())
        first, second = (asyncio.create_task(pace.wait_for_server()) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        async with asyncio.timeout(60):
            await second

    run(main)


def test_nodes_are_spread_over_the_servers_and_return_to_their_first() -> None:
    now, dice = 0.0, random.Random(2)
    timing = Timing(now=lambda: now, random=dice.random)
    nodes = [ServerOrder("abc", timing) for _ in range(3000)]

    def used() -> Counter[str]:
        return Counter(node.current() for node in nodes)

    first = [node.current() for node in nodes]
    assert all(900 < count < 1100 for count in used().values())
    for node in nodes:
        node.leave("a")
    assert set(used()) == {"b", "c"}
    assert all(1400 < count < 1600 for count in used().values())
    now = 299.0
    assert set(used()) == {"b", "c"}
    now = 450.0  # half of them look for it between 5 and 10 minutes later
    assert 400 < used()["a"] < 600
    now = 600.0
    assert [node.current() for node in nodes] == first


def test_a_server_that_is_gone_is_looked_for_less_and_less_often() -> None:
    now, looked = 0.0, list[float]()
    order = ServerOrder("ab", Timing(now=lambda: now, random=lambda: 0.0))
    while now < 10_000:
        if order.current() == "a":
            looked.append(now)
            assert order.leave("a")
            assert not order.leave("a")
        order.answered("b")
        now += 1.0
    assert looked == [0.0, 300.0, 900.0, 2100.0, 4500.0, 6900.0, 9300.0]
    order.answered("a")
    now += 3000.0
    assert order.current() == "a"
    order.leave("a")
    now += 300.0
    assert order.current() == "a"


def test_a_single_server_is_never_left() -> None:
    order = ServerOrder(("a",), Timing())
    assert not order.leave("a")
    assert order.current() == "a"
