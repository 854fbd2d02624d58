from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from steersman.compile.conntrack import ServedPort, stale
from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint
from steersman.netfilter.conntrack.stale import delete_entries, delete_stale
from steersman.netfilter.conntrack.usage import usage
from steersman.netfilter.conntrack.wire import list_request
from tests.support.lab.conntrack_flows import FlowEntry, add_entries, entries
from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.inline import Inline
from tests.support.stale import Entry

pytestmark = pytest.mark.kernel

UDP, TCP, SCTP = 17, 6, 132
DNS = ServedPort(
    protocol=Protocol.UDP,
    port=53,
    addresses=("10.96.0.10",),
    node_port=30053,
    endpoints=(Endpoint("10.244.1.5", 5353),),
)
GOOD = FlowEntry(UDP, "10.244.1.7", 40000, "10.96.0.10", 53, "10.244.1.5", 5353)
GONE = GOOD._replace(client_port=40001, source="10.244.1.6")
UNTRANSLATED = GOOD._replace(client_port=40002, source="10.96.0.10", source_port=53)
NODE_PORT = GONE._replace(client_port=40003, destination="192.0.2.1", port=30053)
OTHER = GONE._replace(client_port=40004, destination="10.96.0.11")
OVER_TCP = GONE._replace(protocol=TCP)
OVER_SCTP = GONE._replace(protocol=SCTP)
ZONED = GONE._replace(client_port=40005, zone=7)
ELSEWHERE = NODE_PORT._replace(client_port=40006, destination="192.0.2.9")
AT_HOME = "ip address add 192.0.2.1/32 dev lo && ip route add 192.0.2.0/24 dev lo"


def _entry(flow: FlowEntry) -> Entry:
    return Entry(flow.protocol, flow.destination, flow.port, flow.source, flow.source_port)


async def _left(family: Family = Family.IPV4) -> set[Entry]:
    return {e for protocol in (UDP, TCP, SCTP) for e in await entries(family, protocol)}


@pytest.mark.parametrize("others", [0, 20], ids=["asked one by one", "asked by protocol"])
def test_only_stale_entries_are_deleted(others: int) -> None:
    more = [DNS] + [
        ServedPort(Protocol.UDP, 53, (f"10.97.0.{i}",), 0, DNS.endpoints) for i in range(others)
    ]

    async def body() -> None:
        sh(AT_HOME)
        gone = (GONE, UNTRANSLATED, NODE_PORT, ZONED)
        kept = (GOOD, OTHER, OVER_TCP, OVER_SCTP, ELSEWHERE)
        add_entries((*gone, *kept))
        result = await delete_stale(Inline(), stale(Family.IPV4, more))
        assert result[:3] == (4, 0, True)
        assert await _left() == {_entry(f) for f in kept}

    in_namespace(body)


def test_ipv6_entries_are_told_apart() -> None:
    served = ServedPort(Protocol.UDP, 53, ("fd00::a",), 30053, (Endpoint("fd01::5", 5353),))
    good = FlowEntry(UDP, "fd01::7", 40000, "fd00::a", 53, "fd01::5", 5353)
    gone = good._replace(client_port=40001, source="fd01::6")
    node = gone._replace(client_port=40002, destination="2001:db8::1", port=30053)

    async def body() -> None:
        sh("ip -6 address add 2001:db8::1/128 dev lo nodad")
        add_entries((good, gone, node, GONE))
        assert (await delete_stale(Inline(), stale(Family.IPV6, [served])))[:3] == (2, 0, True)
        assert await _left(Family.IPV6) == {_entry(good)}
        assert await _left() == {_entry(GONE)}  # the other family is left alone

    in_namespace(body)


def test_connections_are_closed_where_asked_for() -> None:
    served = ServedPort(Protocol.TCP, 53, ("10.96.0.10",), 0, DNS.endpoints, close_connections=True)

    async def body() -> None:
        kept = GOOD._replace(protocol=TCP)
        add_entries((kept, OVER_TCP, OVER_SCTP, GONE))
        assert (await delete_stale(Inline(), stale(Family.IPV4, [served])))[:3] == (1, 0, True)
        assert await _left() == {_entry(f) for f in (kept, OVER_SCTP, GONE)}

    in_namespace(body)


def test_entries_that_have_ended_meanwhile_are_not_counted_as_deleted() -> None:
    """Whichever they are: the first of a batch too."""

    async def body() -> None:
        add_entries((GONE, UNTRANSLATED, NODE_PORT))
        with Netlink(NETLINK_NETFILTER) as netlink:
            listing = list_request(Family.IPV4, bytes((UDP,)))
            found = [reply.payload for reply in netlink.dump(listing)]
            assert delete_entries(netlink, found[:2]) == (2, 0)
            assert delete_entries(netlink, found) == (1, 0)
        assert await _left() == set()

    in_namespace(body)


def test_nothing_served_deletes_nothing() -> None:
    async def body() -> None:
        add_entries((GONE,))
        assert (await delete_stale(Inline(), stale(Family.IPV4, [])))[:3] == (0, 0, True)
        assert await _left() == {_entry(GONE)}
        assert usage(Path("/")).entries == 1

    in_namespace(body)


def test_entries_of_other_protocols_are_no_obstacle() -> None:
    async def body() -> None:
        sh("ping -c 1 127.0.0.1 && iptables -I INPUT -m conntrack --ctstate NEW -j ACCEPT")
        add_entries((GONE,))
        assert (await delete_stale(Inline(), stale(Family.IPV4, [DNS])))[:3] == (1, 0, True)
        assert await entries(Family.IPV4, 1) == []

    in_namespace(body)


@pytest.mark.slow
def test_a_full_table_is_cleaned_while_the_loop_goes_on() -> None:
    """200,000 entries, one in a hundred stale: the loop must not be held up meanwhile."""

    async def body() -> None:
        add_entries(
            GOOD._replace(
                client=f"10.{20 + i // 65536}.{i // 256 % 256}.{i % 256}",
                source="10.244.1.6" if i % 100 == 0 else "10.244.1.5",
            )
            for i in range(200_000)
        )
        ticks, done = 0, asyncio.Event()

        async def tick() -> None:
            nonlocal ticks
            while not done.is_set():
                ticks += 1
                await asyncio.sleep(0.005)

        async with asyncio.TaskGroup() as group:
            group.create_task(tick())
            result = await delete_stale(Inline(), stale(Family.IPV4, [DNS]))
            done.set()
        assert result.deleted == 2000
        assert result.failed == 0
        assert ticks > 3
        assert usage(Path("/")).entries == 198_000

    in_namespace(body)
