"""Connections of every kind through a node whose mode is switched."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from steersman.model.plan import Frontend, FrontendKind, NodePlan, NodeSettings
from steersman.model.ruleset import diff
from steersman.modes.base import Mode
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import MASQUERADED
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.ebpf import release_now
from tests.support.lab.inside import Inside
from tests.support.lab.sockets import see_at_once
from tests.support.modes.registry import MODES, render

NODE, OUTSIDE, CLIENT = "192.0.2.1", "203.0.113.9", "10.244.7.7"


ENDS = ("10.244.0.0", "10.244.0.2")


WAYS = (
    (CLIENT, "10.96.0.10", 80),
    (OUTSIDE, NODE, 30080),
    (OUTSIDE, "198.51.100.1", 80),
    (NODE, "10.96.0.10", 80),
    (ENDS[0], "10.96.0.10", 80),
)


FRONTENDS = (
    make.cluster_ip(),
    Frontend(FrontendKind.EXTERNAL_IP, "198.51.100.1", 80, *MASQUERADED),
    Frontend(FrontendKind.NODE_PORT, "", 30080, *MASQUERADED),
)


ONLY_V4 = NodeSettings(node_name="here", ipv4=make.SETTINGS.ipv4)


SERVICE = make.port([0, 2], frontends=FRONTENDS)


PLAN = NodePlan(ONLY_V4, {SERVICE.key: SERVICE})


class Echo:
    """Endpoints that send back what they get, for as long as a connection lasts."""

    def __init__(self, lab: Lab) -> None:
        self._sockets: list[socket.socket] = []
        for address in ENDS:
            server = lab.netns(address).socket(address, "TCP")
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((address, 8080))
            server.listen(64)
            self._sockets.append(server)
            threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    @staticmethod
    def _serve(client: socket.socket) -> None:
        with client, suppress(OSError):  # a client may reset it
            while data := client.recv(100):
                client.sendall(data)

    def close(self) -> None:
        for server in self._sockets:
            server.shutdown(socket.SHUT_RDWR)
            server.close()


def connected(sock: socket.socket, source: str, address: str, port: int) -> socket.socket:
    """A new connection from an address."""
    try:
        sock.settimeout(60)
        sock.bind((source, 0))
        sock.connect((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def ask(sock: socket.socket, way: tuple[str, str, int]) -> str:
    """The problem with a new connection; "" if there is none."""
    try:
        with connected(sock, *way):
            see_at_once(sock)
            sock.sendall(b"new")
            answer = sock.recv(9)
    except OSError as error:
        return f"{way}: {error!r}"
    return "" if answer == b"new" else f"{way}: {answer!r}"


class Stalls:
    """Notes when this machine stood still: then TCP sends a packet again that was not lost."""

    LONGEST = 0.5
    """Seconds; TCP waits one for the answer to its first packet."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(0.05):
            now = time.monotonic()
            if now - before > self.LONGEST:
                self._seen.append((before, now))
            before = now

    def excuse(self, wrong: str, began: float) -> bool:
        """Whether all that is wrong with a connection is that the machine stood still."""
        return "sent again" in wrong and self.since(began)

    def since(self, began: float) -> bool:
        """Whether the machine stood still at some time since then."""
        time.sleep(0.1)  # until a stall that has just ended is noted
        return any(end > began for _, end in self._seen)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class Clients:
    """Connections that stay open, and new ones opened without pause."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._stop = threading.Event()
        self.opening = threading.Lock()
        """Held from the opening of a connection to its close."""
        self.opened = 0
        self.failed: list[str] = []
        self.live = [connected(lab.socket(way[0], "TCP"), *way) for way in WAYS]
        self._stalls = Stalls()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for way in WAYS:
                began = time.monotonic()
                with self.opening:
                    wrong = ask(self._lab.socket(way[0], "TCP"), way)
                if wrong and not self._stalls.excuse(wrong, began):
                    self.failed.append(wrong)
                self.opened += 1

    def check(self) -> None:
        """Every live connection still carries data, both ways."""
        for sock in self.live:
            sock.sendall(b"live")
            assert sock.recv(9) == b"live"

    def pause(self) -> None:
        """Wait until one more was opened."""
        before, end = self.opened, time.monotonic() + 60
        while self.opened == before and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._stalls.close()
        for sock in self.live:
            sock.close()


@pytest.fixture
def lab() -> Iterator[Lab]:
    pods = tuple(Pod(address) for address in (*ENDS, CLIENT))
    with Lab(Layout({"eth0": (f"{NODE}/24",)}, (OUTSIDE,), pods)) as lab:
        echo = Echo(lab)
        yield lab
        echo.close()


def mode_of(lab: Lab, name: str, variant: str) -> Mode:
    """Make a mode for a lab's node; the lab releases it."""
    mode = MODES[name].make(Inside(lab.node.path), variant)
    if not MODES[name].stays:
        lab.at_close.callback(release_now, mode)
    return mode


async def program(mode: Mode, plan: NodePlan = PLAN) -> None:
    assert (await mode.worker.do(mode.probe)).usable
    want = render(plan, mode)
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))
