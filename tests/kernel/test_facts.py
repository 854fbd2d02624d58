from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator

import pytest

from steersman.host.facts import read_facts, watch_addresses
from steersman.host.netlink import (
    NETLINK_ROUTE,
    AnswersLostError,
    Netlink,
    NetlinkError,
    Subscription,
)
from steersman.host.nlmsg import Message, Request
from steersman.host.rtnetlink import NOT_LINK_LOCAL
from steersman.model.inputs import HostFacts
from tests.support.lab.namespace import in_namespace, sh

pytestmark = pytest.mark.kernel

_ADDRESS_GROUPS = (5, 9)  # RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR


def test_addresses_of_all_interfaces_are_read() -> None:
    async def body() -> None:
        sh("ip link add dm0 type bridge && ip link set dm0 up")
        sh("ip address add 192.0.2.1/24 dev dm0 && ip address add 2001:db8::1/64 dev dm0 nodad")
        sh("ip link add bare type bridge")
        facts = await read_facts()
        assert facts.interfaces["lo"] == ("127.0.0.1/8", "::1/128")
        assert {"192.0.2.1/24", "2001:db8::1/64"} <= set(facts.interfaces["dm0"])
        assert "bare" not in facts.interfaces
        assert facts.hostname == sh("hostname").strip().lower()

    in_namespace(body)


def test_a_point_to_point_link_has_its_own_address_not_the_peers() -> None:
    async def body() -> None:
        sh("ip link add dm0 type bridge && ip address add 192.0.2.1 peer 192.0.2.9/32 dev dm0")
        assert (await read_facts()).interfaces["dm0"] == ("192.0.2.1/32",)

    in_namespace(body)


def test_changes_are_noticed() -> None:
    async def body() -> None:
        facts = watch_addresses()
        async with asyncio.timeout(60):
            first = await anext(facts)
            assert "dm0" not in first.interfaces
            sh("ip link add dm0 type bridge && ip address add 192.0.2.1/24 dev dm0")
            await _until(facts, "dm0", ("192.0.2.1/24",))
            sh("ip address del 192.0.2.1/24 dev dm0")
            await _until(facts, "dm0", ())
            sh("ip address add 192.0.2.2/24 dev dm0")
            await _until(facts, "dm0", ("192.0.2.2/24",))
            sh("ip link del dm0")
            await _until(facts, "dm0", ())
        await facts.aclose()  # type: ignore[attr-defined]

    in_namespace(body)


def test_a_pod_interface_that_comes_and_goes_is_no_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[HostFacts] = []

    async def counted() -> HostFacts:
        reads.append(await read_facts())
        return reads[-1]

    monkeypatch.setattr("steersman.host.facts.read_facts", counted)

    async def body() -> None:
        sh("ip link add dm0 type bridge && ip link set dm0 up")
        facts = watch_addresses()
        async with asyncio.timeout(60):
            await anext(facts)
            wake_ups = asyncio.create_task(notified())
            await asyncio.sleep(0)
            for _ in range(3):
                sh("ip link add v0 type veth peer name v1 && ip link set v0 up")
                sh("ip address add fe80::1234/64 dev v0 nodad && ip link set v1 up")
                sh("ip link del v0")
            sh("ip address add 192.0.2.1/24 dev dm0")
            await _until(facts, "dm0", ("192.0.2.1/24",))
            # Nothing but the one address that counts has woken anybody up.
            assert {message.payload[3] for message in await wake_ups} == {0}  # RT_SCOPE_UNIVERSE
        await facts.aclose()  # type: ignore[attr-defined]
        assert len(reads) == 2
        assert all("fe80" not in str(each.interfaces) for each in reads)

    in_namespace(body)


async def notified() -> list[Message]:
    with Subscription(NETLINK_ROUTE, _ADDRESS_GROUPS, wanted=NOT_LINK_LOCAL) as news:
        return await news.receive()


async def _until(facts: AsyncIterator[HostFacts], name: str, addresses: tuple[str, ...]) -> None:
    async for latest in facts:
        if latest.interfaces.get(name, ()) == addresses:
            return


def test_a_refused_request_says_why() -> None:
    async def body() -> None:
        with Netlink(NETLINK_ROUTE) as netlink:
            with pytest.raises(NetlinkError) as caught:
                netlink.request(Request(17, bytes(4) + (99).to_bytes(4, "little") + bytes(8)))
            assert caught.value.errno == errno.ENODEV
            refused = netlink.batch([Request(17, bytes(16), 4), Request(18, bytes(16), 4)])
            assert 0 in refused

    in_namespace(body)


def test_lost_notifications_are_told_and_the_next_ones_come() -> None:
    async def body() -> None:
        with Subscription(NETLINK_ROUTE, (5,), buffer=4096) as news:
            sh("for i in $(seq 100); do ip address add 192.0.2.$i/32 dev lo; done")
            lost = False
            async with asyncio.timeout(60):
                while not lost:
                    try:
                        await news.receive()
                    except AnswersLostError:
                        lost = True
                sh("ip address add 198.51.100.1/32 dev lo")
                while not any(b"\xc6\x33\x64\x01" in m.payload for m in await news.receive()):
                    pass

    in_namespace(body)
