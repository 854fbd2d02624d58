"""Which connection yields if descriptors run out: the rule alone, then with real sockets."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import ExitStack

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import PlanKey, Protocol
from steersman.proxy.budget import DescriptorBudget, Ranking, Reservation, client_of
from tests.support.modes.userspace_proxy import (
    LOCAL,
    answering,
    ask,
    client,
    endpoint,
    key,
    listener,
    owner,
    proxy,
    server,
)
from tests.support.waiting import until

TCP, UDP = Protocol.TCP, Protocol.UDP


class Crowd:
    """Clients of a DescriptorBudget, and whose connections are open."""

    def __init__(self, budget: DescriptorBudget) -> None:
        self.budget = budget
        self.open: list[Reservation] = []

    def come(
        self, service: str, address: str, protocol: Protocol = TCP, count: int = 2
    ) -> Reservation | None:
        reservation = self.budget.reserve(owner(protocol, service), address, count)
        if reservation is not None:
            self.open.append(reservation)
            reservation.evict = lambda: self.open.remove(reservation)
        return reservation

    def of(self, service: str, address: str) -> int:
        return sum(
            (each.owner.name.service, each.client) == (service, address) for each in self.open
        )


def test_idle_connections_of_one_client_do_not_exclude_others() -> None:
    crowd = Crowd(DescriptorBudget(20))
    for _ in range(20):
        crowd.come("web", "10.0.0.1")
    assert (crowd.of("web", "10.0.0.1"), crowd.budget.refused) == (10, 10)
    assert crowd.come("web", "10.0.0.2")
    assert crowd.come("shop", "10.0.0.3")
    assert crowd.come("shop", "10.0.0.1")
    assert crowd.of("web", "10.0.0.1") == 7
    assert crowd.budget.evicted == 3


def test_the_connection_idle_for_longest_is_evicted() -> None:
    crowd = Crowd(DescriptorBudget(6))
    first, second, third = (crowd.come("web", "10.0.0.1") for _ in range(3))
    assert first
    crowd.budget.touch(first)
    assert crowd.come("shop", "10.0.0.2")
    assert second not in crowd.open
    assert first in crowd.open
    assert third in crowd.open


def test_many_clients_of_one_service_evict_none_of_another() -> None:
    crowd = Crowd(DescriptorBudget(40))
    kept = [crowd.come("shop", f"10.0.0.{number}") for number in range(5)]
    for number in range(200):
        crowd.come("web", f"10.1.0.{number}")
    assert all(reservation in crowd.open for reservation in kept)
    assert crowd.come("bank", "10.0.0.9")
    assert all(reservation in crowd.open for reservation in kept)


def test_with_equal_shares_the_newcomer_is_refused() -> None:
    crowd = Crowd(DescriptorBudget(4))
    assert crowd.come("web", "10.0.0.1")
    assert crowd.come("shop", "10.0.0.1")
    assert not crowd.come("bank", "10.0.0.2")
    assert not crowd.come("web", "10.0.0.2")
    assert crowd.budget.refused == 2


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    assert client_of("fd00::1:2:3:4") == client_of("fd00::5%eth0") == "fd00::"
    assert client_of("fd00:0:0:1::1") != client_of("fd00::1")
    assert client_of("::ffff:10.0.0.1") == client_of("10.0.0.1") == "10.0.0.1"


def test_a_flood_of_datagrams_leaves_sessions_that_are_in_use() -> None:
    crowd = Crowd(DescriptorBudget(100))
    assert crowd.budget.max_sessions == 50
    used = crowd.come("dns", "10.0.0.1", UDP, 1)
    connection = crowd.come("dns", "10.0.0.1")
    assert used
    crowd.budget.mark_assured(used)
    for number in range(1000):
        crowd.come("dns", f"10.1.{number >> 8}.{number & 255}", UDP, 1)
    assert crowd.budget.sessions == 50
    assert used in crowd.open
    assert connection in crowd.open
    assert crowd.come("ntp", "10.0.0.1", UDP, 1)
    assert used in crowd.open
    assert crowd.budget.sessions == 50


def test_sessions_of_one_client_of_a_service_have_a_limit() -> None:
    crowd = Crowd(DescriptorBudget(80))
    for _ in range(100):
        crowd.come("dns", "10.0.0.1", UDP, 1)
    assert crowd.budget.sessions == crowd.of("dns", "10.0.0.1") == 10
    assert crowd.budget.refused == 0


def test_a_service_whose_sessions_are_all_in_use_refuses_more() -> None:
    crowd = Crowd(DescriptorBudget(4))
    for number in range(2):
        reservation = crowd.come("dns", f"10.0.0.{number}", UDP, 1)
        assert reservation
        crowd.budget.touch(reservation)
        crowd.budget.mark_assured(reservation)
    assert not crowd.come("dns", "10.0.0.9", UDP, 1)


def test_splicing_evicts_no_connection() -> None:
    crowd = Crowd(DescriptorBudget(8))
    one, two = crowd.come("web", "10.0.0.1"), crowd.come("web", "10.0.0.2")
    assert one
    assert two
    assert crowd.budget.grow(one, 4)
    assert not crowd.budget.grow(two, 4)
    assert crowd.come("web", "10.0.0.3")
    assert one not in crowd.open
    assert not crowd.budget.grow(one, 1)
    crowd.budget.shrink(one, 4)
    crowd.budget.touch(one)
    crowd.budget.mark_assured(one)
    crowd.budget.release(one)
    assert crowd.budget.used == 4
    assert crowd.budget.grow(two, 4)
    crowd.budget.shrink(two, 4)
    assert crowd.budget.used == 4


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-4, 4))))
def test_a_ranking_returns_the_highest_count(changes: list[tuple[str, int]]) -> None:
    ranking: Ranking[str] = Ranking()
    counts: Counter[str] = Counter()
    for name, change in changes:
        added = max(change, -counts[name])
        counts[name] += added
        ranking.add(name, added)
        if counts[name]:
            ranking.touch(name)
        first = ranking.first()
        assert ranking[first] == max(counts.values())
        assert all(ranking[each] == count for each, count in counts.items())


SERVICES = st.sampled_from([(name, protocol) for name in "abc" for protocol in (TCP, UDP)])
ACTIONS = st.tuples(SERVICES, st.integers(1, 5), st.sampled_from(["come", "use", "prove", "end"]))


@given(st.integers(1, 30), st.lists(ACTIONS, max_size=120))
def test_no_client_is_evicted_for_one_that_has_as_much(
    limit: int, actions: list[tuple[tuple[str, Protocol], int, str]]
) -> None:
    crowd = Crowd(budget := DescriptorBudget(limit))
    for (name, protocol), number, action in actions:
        address = f"10.0.0.{number}"
        if action == "come":
            before = services(crowd.open)
            reservation = crowd.come(name, address, protocol, 1 if protocol is UDP else 2)
            after = services(crowd.open)
            for lost in before:
                if after[lost] < before[lost]:
                    assert reservation
                    assert lost == reservation.owner or before[lost] > before[reservation.owner]
        elif crowd.open:
            reservation = crowd.open[number % len(crowd.open)]
            if action == "end":
                crowd.open.remove(reservation)
                budget.release(reservation)
            elif action == "use":
                budget.touch(reservation)
            else:
                budget.mark_assured(reservation)
        assert budget.used == sum(each.count for each in crowd.open) <= limit
        sessions = [each for each in crowd.open if each.owner.name.protocol is UDP]
        assert budget.sessions == len(sessions) <= budget.max_sessions


def services(holdings: list[Reservation]) -> Counter[PlanKey]:
    counts: Counter[PlanKey] = Counter()
    for reservation in holdings:
        counts[reservation.owner] += reservation.count
    return counts


async def test_idle_clients_of_one_service_do_not_block_another() -> None:
    async with endpoint(answering(b"one")) as one, proxy(limit=40) as made:
        other = key(address="10.96.0.2")
        plan = msgspec.structs.replace(listener(one), owner=owner(name="other"))
        await made.start({key(): listener(one), other: plan})
        with ExitStack() as stack:

            def one_more_fills_it() -> bool:
                stack.enter_context(socket.create_connection((LOCAL, made.port(key()))))
                return made.budget.refused > 0 and made.budget.used >= 39

            await until(one_more_fills_it)
            for _ in range(5):
                assert await ask(made.port(other), b"!") == b"one!"
            assert made.budget.evicted
        await until(lambda: made.budget.used == 2)


async def test_datagrams_of_one_service_do_not_block_another() -> None:
    async with server(b"1") as (one, _), proxy(limit=40) as made:
        other = key(UDP, address="10.96.0.2")
        plan = listener(one, protocol=UDP)
        named = msgspec.structs.replace(plan, owner=owner(UDP, name="other"))
        await made.start({key(UDP): plan, other: named})
        with ExitStack() as stack:
            async with client(made.port(other)) as somebody:
                assert await somebody.ask(b"!") == b"1!"
                for _ in range(60):
                    sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                    sock.sendto(b"x", (LOCAL, made.port(key(UDP))))
                await until(lambda: made.budget.evicted > 0)
                assert await somebody.ask(b"!") == b"1!"
            assert made.budget.sessions <= made.budget.max_sessions
