"""One connection of HTTP/2 beside four of HTTP/1.1: connections, bytes, memory, CPU of an event.

A process opens a node's four watches by the program's own client, and takes events in protobuf from
one of them. The server is in another process, so that only the client's CPU time is measured. It
sends one event, or a burst in one piece, whenever the client has taken the last.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import struct
import sys
import tempfile
from pathlib import Path

import h11
import msgspec
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived

from benchmarks.figures import Figure, figure
from benchmarks.http2_client import BURST, Cost
from benchmarks.process import ROOT, environment
from benchmarks.wire import endpoint_slice
from tests.support.apiserver import protobuf
from tests.support.apiserver.certificates import Authority

_HEAD = [("content-type", protobuf.CONTENT_TYPE)]


class Peer(asyncio.Protocol):
    """The server's end of a connection, which answers each GET with the head of a watch."""

    transport: asyncio.Transport

    def __init__(self, peers: list[Peer]) -> None:
        self._peers = peers
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self._h11 = h11.Connection(h11.SERVER)
        self._stream = 0  # of the last request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._shared = transport.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        self._peers.append(self)
        if self._shared:
            self._h2.initiate_connection()
            self.transport.write(self._h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        if self._shared:
            for event in self._h2.receive_data(data):
                if isinstance(event, RequestReceived):
                    self._stream = event.stream_id or 0
                    self._h2.send_headers(self._stream, [(":status", "200"), *_HEAD])
            self.transport.write(self._h2.data_to_send())
            return
        self._h11.receive_data(data)
        while isinstance(part := self._h11.next_event(), h11.Request | h11.EndOfMessage):
            if isinstance(part, h11.EndOfMessage):
                head = h11.Response(status_code=200, headers=_HEAD)
                self.transport.write(self._h11.send(head) or b"")

    def send(self, events: list[bytes]) -> None:
        """Send events to the last watch: each in a record of TLS, as Go's server does."""
        pieces = []
        for event in events:
            if self._shared:
                self._h2.send_data(self._stream, event)
                pieces.append(self._h2.data_to_send())
            else:
                pieces.append(self._h11.send(h11.Data(data=event)) or b"")
        self.transport.writelines(pieces)

    def traffic(self) -> int:
        """Return the bytes of this connection so far, TLS included."""
        sock: socket.socket = self.transport.get_extra_info("socket")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
        received, sent = (struct.unpack_from("=Q", info, at)[0] for at in (128, 200))
        return int(received + sent)


async def measure(version: str, events: int) -> list[float]:
    """Return connections, bytes to open them, bytes of an event, and the client's costs."""
    frames = [
        protobuf.frame_of({"type": "MODIFIED", "object": endpoint_slice(number)})
        for number in range(BURST)
    ]
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory() as folder:
        tls = Authority().server_context(Path(folder))
    tls.set_alpn_protocols([version])
    server = await asyncio.get_running_loop().create_server(
        lambda: Peer(peers), "127.0.0.1", 0, ssl=tls
    )
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        argv = (sys.executable, "-m", "benchmarks.http2_client", url, str(events))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, cwd=ROOT, env=environment()
        )
        assert process.stdin is not None
        assert process.stdout is not None
        sent, opening = 0, 0
        while wanted := (await process.stdout.readexactly(1))[0]:
            opening = opening or sum(peer.traffic() for peer in peers)
            peers[-1].send(frames[:wanted])
            sent += wanted
        carried = sum(peer.traffic() for peer in peers) - opening
        process.stdin.close()
        cost = msgspec.json.decode(await process.stdout.read(), type=Cost)
        await process.wait()
    return [len(peers), opening, carried / sent, *msgspec.structs.astuple(cost)]


def run(quick: bool) -> list[Figure]:
    """Take 4,000 events (400 when quick) of each kind by both, in turn."""
    rounds, events = (1, 400) if quick else (7, 4000)
    seen: dict[str, list[list[float]]] = {"h2": [], "http/1.1": []}
    for _ in range(rounds):
        for version, runs in seen.items():
            runs.append(asyncio.run(measure(version, events)))
    new, old = (
        [statistics.median(column) for column in zip(*runs, strict=True)] for runs in seen.values()
    )
    names = (
        *(("connections", ""), ("bytes to open four watches", "B"), ("bytes of an event", "B")),
        ("memory of four watches", "kB"),
        ("CPU of an event", "us"),
        (f"CPU of an event, {BURST} at once", "us"),
        ("CPU until it is stored", "us"),
        (f"CPU until it is stored, {BURST} at once", "us"),
    )
    return [
        figure(f"HTTP/2; 1.1: {name}", "", 0, (value, unit), reference)
        for (name, unit), value, reference in zip(names, new, old, strict=True)
    ]
