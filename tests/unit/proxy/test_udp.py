"""The UDP relay on loopback: a session per client, large datagrams, endpoints that go."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

import msgspec
import pytest

from steersman.model.errors import ApplyError
from steersman.model.names import Family
from steersman.model.plan import Endpoint, LocalDetector, SourceClassifier, Verdict
from steersman.proxy import udp
from steersman.proxy.listeners import Decision, FrontendKey, ListenerPlan
from steersman.proxy.ports import PortAllocator
from steersman.proxy.sockets import open_socket
from tests.support.http import free_ports
from tests.support.modes.userspace_proxy import (
    LOCAL,
    UDP,
    client,
    key,
    listener,
    owner,
    proxy,
    server,
)
from tests.support.waiting import PATIENCE, until


async def test_each_client_has_a_session_and_gets_its_own_answers() -> None:
    async with server(b"1") as (one, answers), proxy() as made:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        async with client(made.port(key(UDP))) as a, client(made.port(key(UDP))) as b:
            assert [await a.ask(b"a"), await b.ask(b"b"), await a.ask(b"c")] == [
                b"1a",
                b"1b",
                b"1c",
            ]
        assert len(answers.clients) == 2
        assert made.open_connections == 2
        assert made.budget.used == 3


async def test_datagrams_up_to_64_kib_pass() -> None:
    async with server(b"") as (one, _), proxy() as made:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        async with client(made.port(key(UDP))) as a:
            for size in (1, 4097, 65507):
                assert await a.ask(bytes(size)) == bytes(size)


async def test_empty_datagrams_pass() -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(type=socket.SOCK_DGRAM) as one, socket.socket(type=socket.SOCK_DGRAM) as us:
        for sock in (one, us):
            sock.setblocking(False)
            sock.bind((LOCAL, 0))
        async with proxy() as made, asyncio.timeout(PATIENCE):
            await made.start({key(UDP): listener(Endpoint(*one.getsockname()), protocol=UDP)})
            us.connect((LOCAL, made.port(key(UDP))))
            for data in (b"", b"more", b""):
                us.send(data)
                got, sender = await loop.sock_recvfrom(one, 100)
                one.sendto(got, sender)
                assert await loop.sock_recv(us, 100) == got == data


@pytest.mark.parametrize(("wildcard", "one", "other"), [
    ("0.0.0.0", "127.0.0.1", "127.0.0.2"), ("::", "::1", "::1"),
])  # fmt: skip
async def test_answers_come_from_the_address_that_was_asked(
    wildcard: str, one: str, other: str
) -> None:
    """Where a socket is bound to all addresses; a client that asks two has two sessions."""
    loop = asyncio.get_running_loop()
    family = Family.IPV6 if ":" in wildcard else Family.IPV4
    at = FrontendKey("listener", family, UDP, "", 30053, True)
    async with server(b"1") as (answers, _), proxy() as made:
        await made.start({at: msgspec.structs.replace(listener(answers, protocol=UDP), bind="")})
        with open_socket(one, UDP) as us:
            us.setblocking(False)
            us.bind((wildcard, 0))
            for asked in (one, other):
                us.sendto(b"!", (asked, made.port(at)))
                async with asyncio.timeout(PATIENCE):
                    assert (await loop.sock_recvfrom(us, 100))[1][0] == asked
        assert made.open_connections == len({one, other})


async def test_pods_are_detected_by_their_interface() -> None:
    async with server(b"1") as (one, _), server(b"2") as (two, _), proxy() as made:
        ways = [Decision(Verdict.FORWARD, (end,)) for end in (one, two)]
        for number, name in ((1, b"1!"), (2, b"2!")):
            at = key(UDP, f"10.96.0.{number}")
            detector = LocalDetector(interface="lo" if number == 1 else "eth9")
            sources = SourceClassifier(detector)
            plan = ListenerPlan(owner(UDP), LOCAL, 0, ways[0], ways[1], ways[1], sources)
            await made.start({at: plan})
            async with client(made.port(at)) as a:
                assert await a.ask(b"!") == name


async def test_datagrams_pass_if_the_kernel_does_not_tell_the_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(udp, "request_arrivals", lambda _: False)
    async with server(b"1") as (one, _), proxy() as made:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        async with client(made.port(key(UDP))) as a:
            assert await a.ask(b"!") == b"1!"
            made.remove([key(UDP)])


async def test_idle_clients_are_forgotten() -> None:
    async with server(b"1") as (one, answers), proxy(udp_idle=0.3) as made:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        async with client(made.port(key(UDP))) as a:
            assert await a.ask(b"a") == b"1a"
            await until(lambda: made.open_connections == 0)
            assert made.budget.used == 1
            assert await a.ask(b"b") == b"1b"
        assert len(answers.clients) == 2


async def test_a_slow_answer_still_finds_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp, "ANSWER_SECONDS", 3600.0)
    async with server(b"1") as (one, answers), proxy(udp_idle=0.1) as made:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        answers.keep = b"slow"
        async with client(made.port(key(UDP))) as slow, client(made.port(key(UDP))) as quick:
            asked = asyncio.create_task(slow.ask(b"slow"))
            await until(lambda: len(answers.kept) == 1)
            assert await quick.ask(b"quick") == b"1quick"
            await until(lambda: made.open_connections == 1)  # quick is idle, so slow would be too
            answers.give()
            assert await asked == b"1slow"
            await until(lambda: made.open_connections == 0)


async def test_datagrams_sent_before_a_hand_off_are_answered() -> None:
    async with server(b"1") as (one, answers), proxy() as made:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        answers.keep = b"slow"
        async with client(made.port(key(UDP))) as slow, client(made.port(key(UDP))) as late:
            asked = asyncio.create_task(slow.ask(b"slow"))
            await until(lambda: len(answers.kept) == 1)
            made.retire()
            late.transport.sendto(b"late")
            answers.give()
            assert await asked == b"1slow"
            assert len(answers.clients) == 1, "the other process is for that"
        assert made.open_connections == 1
        assert await made.drain(0) == 1
        assert made.open_connections == 0


async def test_unanswered_clients_end_soon_if_descriptors_are_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(udp, "ANSWER_SECONDS", 3600.0)
    async with server(b"1") as (one, answers), proxy(limit=9, udp_idle=0.1) as made:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        answers.keep = b"?"
        port = made.port(key(UDP))
        async with contextlib.AsyncExitStack() as stack:
            for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
                each = await stack.enter_async_context(client(port, source=source))
                each.transport.sendto(b"?")
            await until(lambda: len(answers.kept) == 3)  # of four sessions that there may be
            await until(lambda: made.open_connections == 2)
        assert made.budget.used == 3


async def test_a_client_moves_on_when_its_endpoint_is_gone_from_the_plan() -> None:
    async with server(b"1") as (one, _), server(b"2") as (two, _), proxy() as made:
        await made.start({key(UDP): listener(one, protocol=UDP, affinity_seconds=60)})
        async with client(made.port(key(UDP))) as a:
            assert await a.ask(b"!") == b"1!"
            await made.start({key(UDP): listener(two, protocol=UDP, affinity_seconds=60)})
            assert await a.ask(b"!") == b"2!"
        assert made.open_connections == 1


async def test_a_client_moves_on_when_its_endpoint_refuses() -> None:
    async with server(b"1") as (one, first), server(b"2") as (two, _), proxy() as made:
        await made.start({key(UDP): listener(one, two, protocol=UDP)})
        async with client(made.port(key(UDP))) as a:
            assert await a.ask(b"!") == b"1!"
            first.transport.close()
            await asyncio.sleep(0)
            a.transport.sendto(b"lost")
            await until(lambda: made.open_connections == 0)
            assert await a.ask(b"!") == b"2!"
            assert [t.failures for _, e, t in made.traffic if e == one] == [1]


async def test_a_flood_of_clients_is_bounded() -> None:
    async with server(b"") as (one, _), proxy(limit=11) as made:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(30):
                one_of_many = await stack.enter_async_context(client(made.port(key(UDP))))
                one_of_many.transport.sendto(b"garbage\0\xff")
            await until(lambda: made.budget.evicted == 29)
            assert made.open_connections == 1  # of five sessions: a client may have a quarter
            for number in range(2, 12):
                each = await stack.enter_async_context(
                    client(made.port(key(UDP)), source=f"127.0.0.{number}")
                )
                each.transport.sendto(b"garbage")
            await until(lambda: made.budget.evicted == 35)
            assert made.open_connections == 5


async def test_a_client_outside_of_the_source_ranges_gets_no_session() -> None:
    async with server(b"1") as (one, _), proxy() as made:
        ranges = ("203.0.113.0/24",)
        fenced, free = key(UDP), key(UDP, "10.96.0.2")
        await made.start({fenced: listener(one, protocol=UDP, source_ranges=ranges)})
        await made.start({free: listener(one, protocol=UDP)})
        async with client(made.port(fenced)) as a, client(made.port(free)) as b:
            a.transport.sendto(b"not mine")
            assert await b.ask(b"mine") == b"1mine"  # by then the other one was looked at
            assert made.open_connections == 1
            assert a.got.empty()


async def test_a_stopped_listener_forgets_its_clients() -> None:
    async with server(b"1") as (one, _), proxy() as made:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        async with client(made.port(key(UDP))) as a:
            assert await a.ask(b"!") == b"1!"
            made.remove([key(UDP)])
            assert made.open_connections == 0
            assert made.budget.used == 0


async def test_no_two_listeners_share_a_proxy_port() -> None:
    """Of UDP too: the kernel would give one of them the datagrams of both."""
    async with proxy() as made:
        (port,) = free_ports(1, UDP)
        made._ports = PortAllocator((port, port))
        await made.start({key(UDP): listener(protocol=UDP)})
        assert made.port(key(UDP)) == port
        with pytest.raises(ApplyError, match=f"no proxy port of {port}-{port} is free"):
            await made.start({key(UDP, "10.96.0.2"): listener(protocol=UDP)})


async def test_a_lack_of_descriptors_is_no_failure_of_the_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(address: str, protocol: str) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    async with server(b"1") as (one, _), proxy() as made:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        monkeypatch.setattr(udp, "open_socket", none)
        async with client(made.port(key(UDP))) as a:
            a.transport.sendto(b"!")
            await until(lambda: made.budget.refused == 1)
        assert made.open_connections == 0
        assert made.budget.used == 1
        assert made.traffic.of(owner(UDP), one).failures == 0
