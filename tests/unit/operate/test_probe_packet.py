"""Probes on loopback: what comes back, and what it is called."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from steersman.model.names import Protocol
from steersman.operate.answer import QuestionError
from steersman.operate.probe_packet import ProbePacket, Reply, crc32c, sctp_init


def ask(protocol: Protocol, port: int, address: str = "127.0.0.1", timeout: float = 30) -> Reply:
    with ProbePacket(protocol, address, port) as probe:
        assert probe.flow.source_port
        return asyncio.run(probe.send(timeout))


def closed_port(kind: socket.SocketKind) -> int:
    with socket.socket(socket.AF_INET, kind) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_tcp_is_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reply = ask(Protocol.TCP, server.getsockname()[1])
    assert (reply.kind, reply.text, reply.answered) == ("answer", "SYN-ACK", True)
    assert reply.milliseconds >= 0


def test_tcp_is_refused() -> None:
    reply = ask(Protocol.TCP, closed_port(socket.SOCK_STREAM))
    assert (reply.kind, reply.text, reply.answered) == ("reset", "RST", False)


async def test_a_reset_behind_the_answer_is_no_refusal() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ProbePacket(Protocol.TCP, "127.0.0.1", server.getsockname()[1]) as probe,
    ):
        sending = asyncio.ensure_future(probe.send(30))
        await asyncio.sleep(0)  # it has sent its SYN, and has not seen yet that it is connected
        accepted, _ = server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        reply = await sending
    assert (reply.kind, reply.text, reply.answered) == ("answer", "SYN-ACK, then RST", True)


def test_udp_is_refused_by_icmp() -> None:
    reply = ask(Protocol.UDP, closed_port(socket.SOCK_DGRAM))
    assert (reply.kind, reply.text) == ("icmp", "ICMP port unreachable from 127.0.0.1")


def test_udp_is_answered_or_silent() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        silent = ask(Protocol.UDP, port, timeout=0.05)
        assert (silent.kind, silent.text) == ("none", "nothing within 0.05 s")

        async def answered() -> Reply:
            with ProbePacket(Protocol.UDP, "127.0.0.1", port) as probe:
                sending = asyncio.ensure_future(probe.send(30))
                server.setblocking(False)
                loop = asyncio.get_running_loop()
                while True:
                    data, client = await loop.sock_recvfrom(server, 100)
                    if client[1] == probe.flow.source_port:
                        break
                server.sendto(data, client)
                return await sending

        reply = asyncio.run(answered())
    assert (reply.kind, reply.text) == ("answer", "a datagram of 16 bytes")


def test_a_source_that_this_machine_lacks() -> None:
    with pytest.raises(QuestionError, match=r"from 203\.0\.113\.77 on this node: Cannot assign"):
        ProbePacket(Protocol.TCP, "127.0.0.1", 80, source="203.0.113.77")


def test_sctp_packets_have_the_checksum_of_their_bytes() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    packet = sctp_init(40000, 80)
    (checksum,) = struct.unpack_from("<I", packet, 8)
    assert struct.unpack_from("!HH", packet) == (40000, 80)
    assert packet[12] == 1
    assert crc32c(packet[:8] + bytes(4) + packet[12:]) == checksum
