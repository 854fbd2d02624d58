"""Hostile clients of the process's servers: silent, slow, rude, many at once, and in bursts.

However they behave, every one of them is dropped in time, a probe beside them is answered at once,
and the event loop turns between two connections that are accepted.
"""

from __future__ import annotations

from tests.sim.life import Life
from tests.sim.network import Address, Peer, request_of
from tests.sim.node import HEALTH
from tests.sim.universe import Process

_DROPPED = 13.0
"""Seconds after which a client is dropped that has sent no whole request."""
_SLOWEST_PROBE = 1.0
_BEGINNINGS = (
    b"",
    b"G",
    b"GET / HTTP/1.1\r\n",
    b"GET /livez HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 500,
    b"POST /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\r\n" * 40,
    b"GET /" + b"a" * 9_000,
)


def hostile_clients(life: Life) -> None:
    """Many clients connect, and send nothing, too little, or text that is no request."""
    process, dice = life.node.process, life.dice
    peers: list[Peer] = []
    for _ in range(dice.choice((3, 20, 300))):
        at = _some_server(life)
        if at is None:
            break
        peer = Peer(life.universe)
        peers.append(peer)
        peer.on_close = lambda peer=peer: setattr(peer, "closed", True)  # type: ignore[misc]
        peer.send(dice.choice(_BEGINNINGS))
        life.universe.network.listening[at].connect(peer)
        if dice.random() < 0.1:
            life.universe.run(dice.expovariate(20.0))
    for _ in range(3):  # a byte every few seconds keeps nobody connected
        _probe(life, process)
        life.universe.run(_DROPPED / 3)
        for peer in peers:
            peer.send(b"a")
    life.universe.run(3.0)
    connected = sum(not peer.closed for peer in peers)
    if connected and process is life.node.process and process and process.running:
        life.node.kernel.fail(f"{connected} clients that sent no request are still connected")
    for peer in peers:
        peer.close(reset=dice.random() < 0.5)


def burst(life: Life) -> None:
    """Somebody keeps the backlog of a server full of short requests."""
    at = _some_server(life)
    if at is None:
        return
    universe, process = life.universe, life.node.process
    server = universe.network.listening[at]
    path = life.dice.choice(("/livez", "/healthz", "/", "/metrics"))
    user = life.dice.choice((0, 1000))  # the local socket is for root
    until = universe.now + life.dice.uniform(0.05, 0.3)

    def another() -> Peer | None:
        if universe.now + universe.charged >= until:
            return None
        return _request(life, at, path, user)

    for _ in range(life.dice.randint(1, 100)):
        server.connect(_request(life, at, path, user))
    server.refill = another
    _probe(life, process)
    universe.run(1.0)


def _request(life: Life, at: Address, path: str, user: int) -> Peer:
    peer = Peer(life.universe, request_of(at, path))
    peer.credentials = (7, user)
    return peer


def _some_server(life: Life) -> Address | None:
    """A server of the process that runs."""
    process = life.node.process
    found = (
        [at for at, s in life.universe.network.listening.items() if s.loop is process.loop]
        if process
        else []
    )
    return life.dice.choice(found) if found else None


def _probe(life: Life, process: Process | None) -> None:
    """See that a probe of the kubelet is answered beside them."""
    network, node = life.universe.network, life.node
    server = network.listening.get(HEALTH)
    if process is None or server is None or server.loop is not process.loop:
        return

    def told(status: int, _: bytes) -> None:
        if not status and process is node.process and process.running:
            node.kernel.fail("a probe is not answered beside hostile clients")

    network.ask(HEALTH, "/livez", told, _SLOWEST_PROBE)
