"""The userspace relay beside haproxy, socat and none, on loopback: a stream, connections, memory.

Connections are counted per second of the proxy's own processor time: one core's worth, whatever
else the machine does. haproxy and socat are left out where they are not installed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from benchmarks.figures import Figure, figure, interleaved

LOCAL, SINK, ANSWER, ECHO = "127.0.0.1", b"S", b"A", b"E"
_CHUNK = bytes(1 << 20)
_HAPROXY = """global
  nbthread 1
defaults
  mode tcp
  timeout connect 5s
  timeout client 60s
  timeout server 60s
listen proxy
  bind {local}:{port}
  server endpoint {local}:{endpoint}
"""


class Way(NamedTuple):
    """How clients reach the endpoint."""

    port: int
    pid: int = 0
    """Of the process that is asked for its processor time; 0 where that is not known."""


Measure: TypeAlias = Callable[[Way, float], float]


def run(quick: bool) -> list[Figure]:
    """Compare what there is with haproxy, all of it in turns."""
    seconds, runs, idle = (0.3, 1, 200) if quick else (1.0, 5, 1000)
    with contextlib.ExitStack() as stack:
        endpoint = _Endpoint()
        stack.callback(endpoint.close)
        ways = {**dict(_proxies(stack, endpoint.port)), "direct": Way(endpoint.port)}
        found: list[Figure] = []
        for what, unit, measure, left_out in _MEASURES:
            names = [name for name in ways if name not in left_out]
            values = interleaved(runs, *(lambda n=n, m=measure: m(ways[n], seconds) for n in names))
            by_name = dict(zip(names, values, strict=True))
            reference = by_name.get("haproxy")
            found += [figure(what, n, 0, (v, unit), reference) for n, v in by_name.items()]
        held = {n: _idle(ways[n], idle) / 1000 for n in ("haproxy", "userspace") if n in ways}
    what, reference = "memory of an idle connection", held.get("haproxy")
    return [*found, *(figure(what, n, 0, (kb, "kB"), reference) for n, kb in held.items())]


def _proxies(stack: contextlib.ExitStack, endpoint: int) -> Iterator[tuple[str, Way]]:
    """Start them; their names, ports and process ids."""
    for name, way in (("userspace", "splice"), (_COPYING, "copy")):
        port = _free_port()
        argv = [sys.executable, "-m", "benchmarks.proxy", str(port), str(endpoint), way]
        yield name, Way(port, _started(stack, port, argv))
    if shutil.which("haproxy"):
        port = _free_port()
        config = Path(stack.enter_context(tempfile.TemporaryDirectory()), "haproxy.cfg")
        config.write_text(_HAPROXY.format(local=LOCAL, port=port, endpoint=endpoint))
        yield "haproxy", Way(port, _started(stack, port, ["haproxy", "-db", "-f", str(config)]))
    if shutil.which("socat"):
        port = _free_port()
        listen = f"TCP-LISTEN:{port},bind={LOCAL},fork,reuseaddr,backlog=1024"
        yield (
            "socat",
            Way(port, _started(stack, port, ["socat", listen, f"TCP:{LOCAL}:{endpoint}"])),
        )


def _free_port() -> int:
    with socket.create_server((LOCAL, 0)) as sock:
        return int(sock.getsockname()[1])


def _started(stack: contextlib.ExitStack, port: int, argv: list[str]) -> int:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(OSError), socket.create_connection((LOCAL, port)):
            return process.pid
        if time.monotonic() > deadline:
            raise RuntimeError(f"{argv[0]} does not listen on port {port}")
        time.sleep(0.05)


class _Endpoint:
    """Takes everything, answers shortly, or echoes, as the first byte says; a thread each."""

    def __init__(self) -> None:
        self._sock = socket.create_server((LOCAL, 0), backlog=1024)
        self.port = int(self._sock.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=_serve, args=self._sock.accept()[:1], daemon=True).start()

    def close(self) -> None:
        self._sock.close()


def _serve(client: socket.socket) -> None:
    with client, contextlib.suppress(OSError):
        match client.recv(1):
            case b"S":
                taken = bytearray(len(_CHUNK))
                while client.recv_into(taken):
                    pass
            case b"A":
                client.sendall(bytes(100))
            case b"E":
                while data := client.recv(100):
                    client.sendall(data)


def _stream(way: Way, seconds: float) -> float:
    """GB/s of one connection."""
    sent, begun = 0, time.perf_counter()
    with socket.create_connection((LOCAL, way.port)) as sock:
        sock.sendall(SINK)
        while time.perf_counter() - begun < seconds:
            sock.sendall(_CHUNK)
            sent += len(_CHUNK)
    return sent / (time.perf_counter() - begun) / 1e9


def _cost(way: Way, seconds: float) -> float:
    """Seconds of the proxy's processor time that a GB of one connection takes."""
    before = _cpu(way.pid)
    rate = _stream(way, seconds)
    return (_cpu(way.pid) - before) / (rate * seconds)


def _connect(way: Way) -> None:
    """Connect, ask, be answered, close."""
    with socket.create_connection((LOCAL, way.port)) as sock:
        sock.sendall(ANSWER)
        while sock.recv(1000):
            pass


def _rate(way: Way, seconds: float) -> float:
    """Connections per second of the proxy's processor time."""
    before, count, begun = _cpu(way.pid), 0, time.perf_counter()
    while time.perf_counter() - begun < seconds or _cpu(way.pid) == before:
        _connect(way)
        count += 1
    return count / (_cpu(way.pid) - before)


def _clocked(way: Way, seconds: float) -> float:
    """Connections per second by the clock, one after another."""
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        _connect(way)
        count += 1
    return count / (time.perf_counter() - begun)


_COPYING = "userspace, copying"
_MEASURES: tuple[tuple[str, str, Measure, tuple[str, ...]], ...] = (
    ("one stream", "GB/s", _stream, ()),
    ("processor time of a stream", "s/GB", _cost, ("socat", "direct")),  # socat forks
    ("connections of one core", "1/s", _rate, (_COPYING, "direct")),
    ("connections by the clock", "1/s", _clocked, (_COPYING,)),
)
"""What, its unit, how, and which programs it excludes."""


def _cpu(pid: int) -> float:
    """Seconds of processor time of a process and its ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _idle(way: Way, count: int) -> float:
    """Bytes of resident memory for each connection that does nothing."""
    with contextlib.ExitStack() as stack:
        before = _resident(way.pid)
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection((LOCAL, way.port)))
            sock.sendall(ECHO + b"x")
            sock.recv(1)
        return (_resident(way.pid) - before) / count


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def proxy(port: int, endpoint: int, way: str) -> None:
    """Proxy one port to another until killed, by `splice` or `copy`; in a process of its own."""
    import asyncio  # noqa: PLC0415

    from steersman.model.names import Family, PlanKey, Protocol, ServicePortName  # noqa: PLC0415
    from steersman.model.plan import Endpoint, Verdict  # noqa: PLC0415
    from steersman.proxy import relay  # noqa: PLC0415
    from steersman.proxy.engine import Proxy  # noqa: PLC0415
    from steersman.proxy.listeners import (  # noqa: PLC0415
        LISTENER,
        Decision,
        FrontendKey,
        ListenerPlan,
    )
    from steersman.proxy.ports import PortAllocator  # noqa: PLC0415

    if way == "copy":
        relay.SPLICE_AFTER = sys.maxsize

    async def serve() -> None:
        made = Proxy(PortAllocator(), 1.0)
        key = FrontendKey(LISTENER, Family.IPV4, Protocol.TCP, LOCAL, port)
        owner = PlanKey(ServicePortName("bench", "proxy", "", Protocol.TCP), Family.IPV4)
        choice = Decision(Verdict.FORWARD, (Endpoint(LOCAL, endpoint),))
        await made.start({key: ListenerPlan(owner, LOCAL, port, choice, choice, choice)})
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    proxy(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
