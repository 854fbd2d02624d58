"""Many nodes whose API servers go away: all know everything afterwards, and never come at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache

import pytest

from benchmarks.fleet import Fleet, Outcome
from tests.support.apiserver.reading import WORLD, Reading, reading, service, timing
from tests.support.apiserver.server import ApiServer
from tests.support.virtual import VirtualLoop
from tests.support.virtual import run as in_virtual_time
from tests.support.waiting import until

NODES = 48
LARGE = timing(resume_spacing=0.1, list_spacing=0.4, first=1.0, longest=30.0, idle_timeout=180.0)
"""As if there were more nodes: they resume within 6 s and list within 24 s."""


@cache
def outcome(scenario: str) -> tuple[Outcome, list[str]]:
    """Run a scenario in virtual time; return it with the server that each node uses at the end."""

    async def main(loop: VirtualLoop) -> tuple[Outcome, list[str]]:
        async with Fleet(loop, NODES, 1, balanced=False, timing=LARGE) as fleet:
            found = await fleet.measure(scenario, getattr(fleet, scenario))
            await asyncio.sleep(700)  # watches end, and are resumed at the nodes' first servers
            return found, [node.source.stats.server for node in fleet.nodes]

    return in_virtual_time(main)


def busiest(times: list[float], width: float) -> int:
    return max(sum(begin <= each < begin + width for each in times) for begin in times)


@pytest.mark.slow(seconds=25)
def test_a_rolling_restart_lists_nothing_and_has_no_burst() -> None:
    found, _ = outcome("restart")
    verbs = [verb for _, verb in found.requests]
    assert not {"list", "watchlist"} & set(verbs)
    assert len(verbs) >= 3 * NODES  # in all, about as many watches as there are nodes and kinds
    assert busiest(found.times(), 1.0) <= len(verbs) / 4


@pytest.mark.slow(seconds=25)
def test_an_outage_is_met_with_few_attempts_and_no_burst_at_its_end() -> None:
    found, _ = outcome("outage")
    in_outage = [when for when in found.attempts if when > found.began + 1.0]
    # An attempt tries all three servers. Four kinds by themselves would make 20 and more.
    assert len(in_outage) <= 3 * 12 * NODES
    assert busiest(found.attempts, 1.0) <= 3 * 4 * NODES / 2
    back = [when for when, _ in found.requests]
    assert min(back) >= found.began + 60.0
    assert busiest(back, 1.0) <= len(back) / 6
    assert found.converged <= 65.0


@pytest.mark.parametrize("scenario", ["restart", "outage"])
def test_all_servers_have_their_share_of_the_nodes_afterwards(scenario: str) -> None:
    _, used = outcome(scenario)
    assert len(set(used)) == 3
    assert all(used.count(server) >= NODES / 6 for server in used)


async def until_all(nodes: list[Reading], condition: Callable[[Reading], bool]) -> None:
    await until(lambda: all(map(condition, nodes)), 60)


async def test_thirty_nodes_through_a_crash_of_their_server() -> None:
    """The same on real sockets and the real clock, with short delays."""
    async with ApiServer(WORLD) as server, AsyncExitStack() as stack:
        pace = timing(answer=20.0, idle_timeout=60.0, initial_idle_timeout=20.0)
        nodes = [await stack.enter_async_context(reading(server, timing=pace)) for _ in range(30)]
        await until_all(nodes, lambda node: node.source.stats.connected)
        await server.stop_listening()
        kinds = [stats for node in nodes for stats in node.source.stats.kinds.values()]
        await until(lambda: all(stats.errors for stats in kinds), 60)
        server.add(service("new"))
        await server.listen_again()
        await until_all(nodes, lambda node: "new" in node.store.services)
        assert all(stats.lists == 1 for stats in kinds)
