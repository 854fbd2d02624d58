"""Questions of DNS with search suffixes: the messages, and a client that asks through the proxy."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import Protocol
from steersman.proxy.dns import (
    BrokenMessageError,
    failed,
    queries,
    read_question,
    restored,
)
from tests.support.modes.userspace_proxy import UDP, client, key, listener, proxy, server

SUFFIXES = ("shop.svc.cluster.local", "svc.cluster.local")
NXDOMAIN = 3


def wire(name: str) -> bytes:
    return b"".join(bytes([len(x)]) + x.encode() for x in name.split(".") if x) + b"\0"


def query(name: str, kind: int = 1, number: int = 7, rest: bytes = b"") -> bytes:
    header = struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 1 if rest else 0)
    return header + wire(name) + struct.pack(">HH", kind, 1) + rest


def reply(to: bytes, *records: bytes, code: int = 0) -> bytes:
    header = struct.pack(">HHHHHH", 7, 0x8180 | code, 1, len(records), 0, 0)
    return header + read_question(to).wire + b"".join(records)


def record(owner: bytes, kind: int, data: bytes) -> bytes:
    return owner + struct.pack(">HHIH", kind, 1, 30, len(data)) + data


TO_QUESTION = b"\xc0\x0c"
ADDRESS = bytes((10, 96, 0, 10))


def test_suffixes_are_tried_in_their_order_and_the_rest_stays() -> None:
    asked = query("cart", rest=b"edns")
    assert queries(asked, SUFFIXES) == [
        asked,
        query("cart.shop.svc.cluster.local", rest=b"edns"),
        query("cart.svc.cluster.local", rest=b"edns"),
    ]


@pytest.mark.parametrize(
    "asked", [query("cart", kind=15), b"", b"\0" * 12, query("cart")[:-1], query("cart")[:15]]
)
def test_other_messages_are_left_alone(asked: bytes) -> None:
    assert queries(asked, SUFFIXES) == [asked]


def test_the_reply_answers_the_clients_own_query() -> None:
    asked = query("cart")
    tried = queries(asked, SUFFIXES)[1]
    alias = record(TO_QUESTION, 5, b"\x03web" + b"\xc0\x11")  # web.shop.svc.cluster.local
    owner = wire("web.shop.svc.cluster.local")
    got = restored(reply(tried, alias, record(owner, 1, ADDRESS), record(owner, 99, b"?")), asked)
    target = wire("web.shop.svc.cluster.local")
    records = record(TO_QUESTION, 5, target) + record(owner, 1, ADDRESS)
    assert got == reply(asked)[:6] + b"\0\2" + reply(asked)[8:] + records
    assert not failed(got)
    assert restored(reply(asked, alias), asked) == reply(asked, alias)


def test_a_name_that_goes_in_circles_is_an_error() -> None:
    tried = query("cart.local")
    circle = b"\xc0" + bytes([len(tried)])
    with pytest.raises(BrokenMessageError, match="without an end"):
        restored(reply(tried, circle), query("cart"))


def test_a_reply_cannot_grow_without_bound() -> None:
    """Pointers repeat a name that is sent once: 64 kB would become 100 MB."""
    tried = query("cart.local")
    name = (b"\x3f" + b"a" * 63) * 5 + b"\0"
    text = record(b"\0", 16, name)
    pointer = struct.pack(">H", 0xC000 | (len(tried) + len(text) - len(name)))
    with pytest.raises(BrokenMessageError, match="longer than 255 bytes"):
        restored(reply(tried, text, record(pointer, 5, pointer)), query("cart"))
    many = [record(TO_QUESTION, 1, ADDRESS)] * 600
    with pytest.raises(BrokenMessageError, match="600 records"):
        restored(reply(tried, *many), query("cart"))
    assert len(restored(reply(tried, *many[:500]), query("cart"))) > 8000


@given(st.binary(max_size=80), st.integers(0, 40))
def test_no_message_raises_another_error(junk: bytes, cut: int) -> None:
    asked = query("cart")
    assert queries(junk, SUFFIXES)[0] == junk
    failed(junk)
    tried = query("cart.local")
    for message in (junk, reply(tried, junk), reply(tried, record(TO_QUESTION, 5, junk))[:-cut]):
        try:
            assert restored(message, asked)[:2] == message[:2]
        except BrokenMessageError:
            continue


async def test_a_client_asks_once_and_the_proxy_searches() -> None:
    searched = [query("cart.shop.svc.cluster.local"), query("cart.svc.cluster.local")]
    known = reply(searched[1], record(TO_QUESTION, 1, ADDRESS))
    async with server(b"") as (one, answers), proxy() as made:
        got: list[bytes] = []

        def answer(data: bytes, addr: tuple[str, int]) -> None:
            got.append(data)
            says = known if data == searched[1] else reply(data, code=NXDOMAIN)
            answers.transport.sendto(says, addr)

        answers.datagram_received = answer  # type: ignore[method-assign]
        made.dns_search = SUFFIXES
        plan = listener(one, protocol=UDP)
        name = plan.owner.name._replace(port="dns", protocol=Protocol.UDP)
        plan = msgspec.structs.replace(plan, owner=plan.owner._replace(name=name))
        await made.start({key(UDP): plan})
        async with client(made.port(key(UDP))) as a:
            asked = query("cart")
            assert await a.ask(asked) == restored(known, asked)
            assert got == [asked, *searched]
            nobody = query("none")
            assert await a.ask(nobody) == reply(nobody, code=NXDOMAIN)
            assert got[-1] == query("none.svc.cluster.local")
