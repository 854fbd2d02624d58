"""Conntrack cleanup with a scripted kernel: what does not happen on demand."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from typing import Self

import msgspec
import pytest

from steersman.compile.conntrack import ServedPort, stale
from steersman.host.netlink import DumpInterruptedError, NetlinkError
from steersman.host.nlmsg import Message, Request, attr, attributes, be32, nested, u8
from steersman.host.sysctl import SysctlError
from steersman.model.conntrack import Stale
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint
from steersman.netfilter.conntrack import stale as module
from steersman.netfilter.conntrack.stale import delete_stale
from steersman.netfilter.conntrack.usage import Usage
from steersman.netfilter.conntrack.wire import (
    LAYOUTS,
    _parsed_keys,
    entry_keys,
    is_of,
    listed_keys,
)
from tests.support.lab.conntrack_flows import FlowEntry, creation, unpack_entry
from tests.support.modes.inline import Inline
from tests.support.stale import Entry

DNS = ServedPort(Protocol.UDP, 53, ("10.96.0.10",), 0, (Endpoint("10.244.1.5", 53),))
STALE = stale(Family.IPV4, [DNS])
WORKER = Inline()
GONE = FlowEntry(17, "10.244.1.7", 40000, "10.96.0.10", 53, "10.244.1.6", 53)


def payload(flow: FlowEntry, number: int = 1) -> bytes:
    return creation(flow).payload + be32(12, number)


class Kernel:
    """Stands in for both sockets."""

    def __init__(self, *payloads: bytes) -> None:
        self.payloads = payloads
        self.interrupts = False
        self.refuses: dict[int, int] = {}
        self.listed: list[Request] = []
        self.deleted: list[Request] = []
        self.routes: list[bytes] = []
        self.route_type: int | None = 2

    def __call__(self, _protocol: int) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def dump(self, request: Request) -> Iterator[Message]:
        self.listed.append(request)
        for body in self.payloads:
            yield Message(0x100, 0, 1, body)
        if self.interrupts:
            raise DumpInterruptedError(errno.EINTR, "changed")

    def request(self, request: Request) -> list[Message]:
        self.routes.append(attributes(request.payload, 12)[1])
        if self.route_type is None:
            raise NetlinkError(errno.ENETUNREACH, "no route")
        return [Message(24, 0, 1, bytes((*request.payload[:7], self.route_type, 0, 0, 0, 0)))]

    def batch(self, requests: Sequence[Request]) -> dict[int, NetlinkError]:
        self.deleted += requests
        refused = {i: code for i, code in self.refuses.items() if i < len(requests)}
        return {i: NetlinkError(code, "refused") for i, code in refused.items()}


def play(monkeypatch: pytest.MonkeyPatch, *payloads: bytes) -> Kernel:
    kernel = Kernel(*payloads)
    monkeypatch.setattr(module, "Netlink", kernel)
    return kernel


V6 = FlowEntry(17, "fd01::7", 40000, "fd00::a", 53, "fd01::6", 5353)


@pytest.mark.parametrize(
    ("flow", "family"),
    [(GONE, Family.IPV4), (GONE._replace(protocol=132), Family.IPV4), (V6, Family.IPV6)],
)
def test_the_short_way_to_read_an_entry_is_the_long_one(flow: FlowEntry, family: Family) -> None:
    body = payload(flow)
    keys = entry_keys(body)
    assert keys == _parsed_keys(body)
    assert unpack_entry(family, *keys) == Entry(
        flow.protocol, flow.destination, flow.port, flow.source, flow.source_port
    )
    assert body[4:8] == LAYOUTS[body[0]].orig  # it was the short way


def test_an_entry_with_more_in_its_tuples_is_read_the_long_way() -> None:
    def tuple_(kind: int, source: bytes, destination: bytes, ports: bytes) -> bytes:
        addresses = nested(1, attr(1, source), attr(2, destination))
        zone = attr(3, b"\0\7\0\0")
        proto = nested(2, u8(1, 17), attr(2, ports[:2]), attr(3, ports[2:]))
        return nested(kind, addresses, proto, zone)

    client, vip, pod = b"\x0a\0\0\1", b"\x0a\x60\0\x0a", b"\x0a\0\0\2"
    body = b"\2\0\0\0" + tuple_(1, client, vip, b"\1\1\0\x35") + tuple_(2, pod, client, b"\2\2\1\1")
    keys = entry_keys(body)
    assert keys == (b"\x11" + vip + b"\0\x35", pod + b"\2\2")


HTTP, HTTP_ELSEWHERE = b"\6\x0a\x60\0\1\0\x50", b"\6\x0a\x60\0\2\0\x50"
NODE_PORT, TCP, UDP = b"\6\0\x50", b"\6", b"\x11"
HTTP6 = b"\6" + bytes(15) + b"\1\0\x50"


@pytest.mark.parametrize(
    ("family", "keys", "listed"),
    [
        (Family.IPV4, [HTTP, HTTP_ELSEWHERE], [HTTP, HTTP_ELSEWHERE]),
        (Family.IPV4, [HTTP, NODE_PORT], [NODE_PORT]),
        (Family.IPV6, [HTTP6], [NODE_PORT]),  # the kernel cannot select by address
        (Family.IPV4, [b"\6\x0a\x60\0" + bytes((n, 0, 80)) for n in range(5)], [TCP]),
    ],
)
def test_no_entry_is_listed_twice(family: Family, keys: list[bytes], listed: list[bytes]) -> None:
    assert listed_keys(family, keys) == listed
    for destination in keys:
        assert [is_of(key, destination) for key in listed].count(True) == 1
        assert not is_of(UDP, destination)


def test_an_entry_without_ports_is_nobodys() -> None:
    icmp = nested(1, nested(1, attr(1, bytes(4)), attr(2, bytes(4))), nested(2, u8(1, 1)))
    keys = entry_keys(b"\2\0\0\0" + icmp)
    assert keys == (b"", b"")
    assert not STALE.contains(*keys)


async def test_exactly_the_entry_seen_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    zoned = GONE._replace(zone=7, client_port=40001)
    kernel = play(monkeypatch, payload(GONE, 5), payload(zoned, 6))
    assert (await delete_stale(WORKER, STALE))[:3] == (2, 0, True)
    for flow, number, request in zip((GONE, zoned), (5, 6), kernel.deleted, strict=True):
        have = attributes(request.payload, 4)
        seen = attributes(payload(flow, number), 4)
        assert have == {kind: seen[kind] for kind in (1, 12, 18) if kind in seen}


async def test_an_interrupted_list_is_used_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = play(monkeypatch, payload(GONE))
    kernel.interrupts = True
    assert (await delete_stale(WORKER, STALE))[:3] == (1, 0, False)


async def test_a_pass_counts_its_cpu_time_and_not_what_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy node a pass waits for the CPU, and the rest after it would hold up the next."""
    kernel = play(monkeypatch, payload(GONE))
    dump = kernel.dump

    def slow(request: Request) -> Iterator[Message]:
        time.sleep(0.5)
        yield from dump(request)

    monkeypatch.setattr(kernel, "dump", slow)
    result = await delete_stale(WORKER, STALE)
    assert result.deleted == 1
    assert 0 < result.seconds < 0.5


async def test_entries_that_are_gone_count_neither_way(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = play(monkeypatch, *[payload(GONE, number) for number in range(4)])
    kernel.refuses = {1: errno.ENOENT, 2: errno.EPERM}
    assert (await delete_stale(WORKER, STALE))[:3] == (2, 1, True)


async def test_many_are_deleted_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = play(monkeypatch, *[payload(GONE, number) for number in range(1000)])
    assert (await delete_stale(WORKER, STALE))[:3] == (1000, 0, True)
    assert len(kernel.deleted) == 1000


@pytest.mark.parametrize(("kind", "deleted"), [(2, 1), (1, 0), (None, 0)])
async def test_a_node_port_is_at_addresses_of_the_node_only(
    monkeypatch: pytest.MonkeyPatch, kind: int | None, deleted: int
) -> None:
    flow = GONE._replace(destination="203.0.113.9", port=30053)
    again = flow._replace(client_port=40001, destination="203.0.113.9")
    kernel = play(monkeypatch, payload(flow), *[payload(GONE)] * (deleted + 1))
    kernel.route_type = kind
    node_port = stale(Family.IPV4, [msgspec.structs.replace(DNS, addresses=(), node_port=30053)])
    assert (await delete_stale(WORKER, node_port))[:3] == (deleted, 0, True)
    kernel.payloads = (payload(flow), payload(again))
    assert (await delete_stale(WORKER, node_port)).deleted == 2 * deleted
    assert kernel.routes == [bytes((203, 0, 113, 9))] * 2, "each is asked for once in a pass"


@pytest.mark.parametrize("in_use", [True, False])
async def test_without_conntrack_nothing_is_stale(
    monkeypatch: pytest.MonkeyPatch, in_use: bool
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    def usage() -> Usage:
        if not in_use:
            raise SysctlError(errno.ENOENT, "conntrack is not in use")
        return Usage(1, 2)

    monkeypatch.setattr(module, "Netlink", refuse)
    monkeypatch.setattr(module, "usage", usage)
    if in_use:
        with pytest.raises(OSError, match="not supported"):
            await delete_stale(WORKER, STALE)
    else:
        assert (await delete_stale(WORKER, STALE))[:3] == (0, 0, True)


async def test_only_what_is_still_stale_after_the_listing_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An endpoint that came while the table was listed may have its first clients already."""
    new = GONE._replace(client_port=40001, source="10.244.1.7")
    kernel, asked = play(monkeypatch, payload(GONE, 5), payload(new, 6)), 0

    async def confirm() -> Stale:
        nonlocal asked
        asked += 1
        assert kernel.listed
        endpoints = (Endpoint("10.244.1.5", 53), Endpoint("10.244.1.7", 53))
        return stale(Family.IPV4, [msgspec.structs.replace(DNS, endpoints=endpoints)])

    assert (await delete_stale(WORKER, STALE, confirm))[:3] == (1, 0, True)
    assert [attributes(request.payload, 4)[12] for request in kernel.deleted] == [b"\0\0\0\5"]
    assert asked == 1
    kernel.payloads = ()
    assert (await delete_stale(WORKER, STALE, confirm))[:3] == (0, 0, True)
    assert asked == 1, "nothing was found"


async def test_many_destinations_are_asked_for_by_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = play(monkeypatch)
    endpoints = (Endpoint("10.244.1.5", 53),)
    many = [ServedPort(Protocol.UDP, 53, (f"10.96.0.{i}",), 0, endpoints) for i in range(50)]
    many.append(ServedPort(Protocol.TCP, 53, ("10.96.0.1",), 0, endpoints, close_connections=True))
    await delete_stale(WORKER, stale(Family.IPV4, many))
    assert len(kernel.listed) == 2
    kernel.listed.clear()
    await delete_stale(WORKER, stale(Family.IPV4, many[:3]))
    assert len(kernel.listed) == 3
