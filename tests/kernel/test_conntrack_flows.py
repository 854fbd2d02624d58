"""Real flows through translated destinations, before and after a cleanup."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from steersman.compile.conntrack import ServedPort, stale
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint
from steersman.netfilter.conntrack.stale import delete_stale
from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.inline import Inline

pytestmark = pytest.mark.kernel

VIP = "10.96.0.10"
OLD, NEW = 5301, 5302


def _send_to(protocol: Protocol, port: int) -> None:
    """Have the Service's address lead to a port of this machine, as a mode's rules would."""
    word = protocol.lower()
    sh("ip route replace 10.96.0.0/16 dev lo && iptables -w -t nat -F OUTPUT")
    sh(
        f"iptables -w -t nat -A OUTPUT -d {VIP} -p {word} --dport 53"
        f" -j DNAT --to-destination 127.0.0.1:{port}"
    )


def _served(protocol: Protocol, port: int) -> ServedPort:
    endpoints = (Endpoint("127.0.0.1", port),)
    return ServedPort(protocol, 53, (VIP,), 0, endpoints, close_connections=True)


@contextmanager
def _socket(kind: socket.SocketKind, port: int = 0) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, kind) as sock:
        sock.settimeout(60)
        sock.bind(("127.0.0.1", port))
        yield sock


def test_a_udp_flow_moves_to_the_endpoint_that_is_left() -> None:
    kind = socket.SOCK_DGRAM

    async def body() -> None:
        with _socket(kind, OLD) as old, _socket(kind, NEW) as new, _socket(kind) as client:
            _send_to(Protocol.UDP, OLD)
            client.sendto(b"one", (VIP, 53))
            assert old.recv(9) == b"one"
            _send_to(Protocol.UDP, NEW)
            client.sendto(b"two", (VIP, 53))
            assert old.recv(9) == b"two"  # this is why somebody has to clean up
            result = await delete_stale(Inline(), stale(Family.IPV4, [_served(Protocol.UDP, NEW)]))
            assert result[:3] == (1, 0, True)
            client.sendto(b"three", (VIP, 53))
            assert new.recv(9) == b"three"
            result = await delete_stale(Inline(), stale(Family.IPV4, [_served(Protocol.UDP, NEW)]))
            assert result[:3] == (0, 0, True)  # a flow that is right stays
            client.sendto(b"four", (VIP, 53))
            assert new.recv(9) == b"four"

    in_namespace(body)


@pytest.mark.parametrize("gone", [True, False], ids=["endpoint gone", "endpoint there"])
def test_a_tcp_connection_is_reset_if_its_endpoint_is_gone(gone: bool) -> None:
    kind = socket.SOCK_STREAM

    async def body() -> None:
        with _socket(kind, OLD) as old, _socket(kind, NEW) as new, _socket(kind) as client:
            old.listen()
            new.listen()
            _send_to(Protocol.TCP, OLD)
            client.connect((VIP, 53))
            server, _ = old.accept()
            with server:
                _send_to(Protocol.TCP, NEW)
                served = [_served(Protocol.TCP, NEW if gone else OLD)]
                result = await delete_stale(Inline(), stale(Family.IPV4, served))
                assert result.deleted == gone
                client.send(b"hello")
                if gone:
                    with pytest.raises(ConnectionResetError):
                        await asyncio.to_thread(client.recv, 9)
                else:
                    assert server.recv(9) == b"hello"

    in_namespace(body)


def test_a_connection_that_nobody_translated_is_let_be() -> None:
    """A node port counts on every address: also of what only has the same number."""
    kind = socket.SOCK_STREAM

    async def body() -> None:
        with _socket(kind, OLD) as listener, _socket(kind) as client:
            listener.listen()
            _send_to(Protocol.TCP, NEW)
            client.connect(("127.0.0.1", OLD))
            served = _served(Protocol.TCP, NEW)
            served = msgspec.structs.replace(served, node_port=OLD)
            assert (await delete_stale(Inline(), stale(Family.IPV4, [served])))[:3] == (0, 0, True)

    in_namespace(body)
