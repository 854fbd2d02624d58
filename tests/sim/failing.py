"""Endpoints that fail, and what keeps a process from noticing it: begun by a life, ended by `heal`.

These troubles come where endpoints that fail are ejected.
"""

from __future__ import annotations

from collections.abc import Callable

from steersman.failover.watch import Failure
from steersman.model.failover import Backend, Observation
from steersman.model.names import ObjectName, Protocol
from steersman.model.switch import SwitchRequest
from tests.sim.endpoints import ATTACKER, BLACKHOLES, EVERYTHING, NAMES
from tests.sim.life import Life
from tests.sim.objects import STEADY, endpoint, service_of, slice_of
from tests.sim.switches import MODES, Asked, serves

_EJECTED = 40.0
"""Seconds within which a dead endpoint is ejected to which clients connect all the time."""
_BLIND = 65.0
"""Seconds after which a process tries again to watch connections."""


def _connect(life: Life, seconds: float, rate: float = 5.0) -> None:
    """Have clients connect for some time."""
    until = life.universe.now + seconds
    while life.universe.now < until:
        if life.node.daemon is not None:
            life.node.kernel.endpoints.connect(life.node.daemon.sync.state.plan)
        life.universe.run(life.dice.expovariate(rate))


def _listed(life: Life, namespace: str) -> list[Backend]:
    """The endpoints of Services of a namespace."""
    slices = [o for k, o in life.etcd.objects["EndpointSlice"].items() if k[0] == namespace]
    return [
        Backend(each["addresses"][0], port["port"], Protocol[port["protocol"]])
        for obj in slices
        for each in obj["endpoints"]
        for port in obj["ports"]
    ]


def endpoints_fail(life: Life) -> None:
    """Some endpoints of tenants do not answer, or refuse."""
    found = _listed(life, "tenant")
    for _ in range(life.dice.randint(1, 4)):
        if found:
            how = life.dice.choice(tuple(Observation)[1:])
            life.node.kernel.endpoints.break_(life.dice.choice(found).ip, how)
    _connect(life, life.dice.expovariate(1 / 20.0))


def node_fails(life: Life) -> None:
    life.node.kernel.endpoints.break_(life.dice.choice(("node-b", "node-c")))
    _connect(life, life.dice.expovariate(1 / 20.0))


def nobody_answers(life: Life) -> None:
    """This node has lost its link, it seems."""
    life.node.kernel.endpoints.break_(EVERYTHING)
    _connect(life, life.dice.expovariate(1 / 30.0))


def packets_are_lost(life: Life) -> None:
    life.node.kernel.endpoints.loss = life.dice.choice((0.01, 0.05))
    _connect(life, life.dice.expovariate(1 / 30.0), 20.0)


def nothing_is_seen(life: Life) -> None:
    """Connections cannot be watched any more."""
    life.node.kernel.endpoints.break_watches()
    life.recovery = max(life.recovery, 130.0)


def attacked(life: Life) -> None:
    """A tenant wants the endpoints of others to be ejected.

    A policy drops its packets to them, or rejects them; it forges sources, and ICMP errors about
    connections of its own. It has endpoints on the nodes of its victims that become blackholes, and
    claims the endpoints of others for a Service of its own. Some victims deny probes.
    """
    endpoints, dice = life.node.kernel.endpoints, life.dice
    victims = [each for each in _listed(life, "canary") if each.ip not in BLACKHOLES]
    plain = {each.ip for each in victims if each.ip.endswith("240")}
    if dice.random() < 0.5:
        endpoints.deny(plain)
    node = dice.choice(("node-b", "node-d"))
    blackholes = [endpoint(ip, node) for ip in BLACKHOLES]
    claimed = [endpoint(dice.choice(victims).ip, "node-b"), endpoint("10.244.2.77", "node-b")]
    listed = blackholes + (claimed if dice.random() < 0.5 else [])
    life.etcd.put(service_of("evil", "evil", 230))
    life.etcd.put(slice_of("evil", "evil", "evil-x", "IPv4", listed))
    life.universe.run(5.0)  # they answer a first probe
    for ip in BLACKHOLES:
        endpoints.break_(ip)
    one = dice.choice(victims)
    for _ in range(dice.randint(20, 200)):
        victim = one if dice.random() < 0.5 else dice.choice(victims)
        forged = f"{NAMES}{dice.randrange(2, 200)}" if dice.random() < 0.3 else ATTACKER
        outcome = dice.choice((Observation.SILENT, Observation.SILENT, *Observation))
        if outcome is not Observation.ANSWERED:
            for _ in range(dice.choice((1, 1, 5))):
                endpoints.tell(Failure(victim, outcome, forged))
        for ip in BLACKHOLES:
            endpoints.send(Backend(ip, 8080, Protocol.TCP), ATTACKER)
        life.universe.run(dice.expovariate(10.0))
        if life.node.daemon is not None:
            endpoints.connect(life.node.daemon.sync.state.plan)

    def end() -> None:
        endpoints.deny(())
        life.etcd.delete("Service", ("evil", "evil"))
        life.etcd.delete("EndpointSlice", ("evil", "evil-x"))

    life.heals.append(end)


def probes_are_interrupted(life: Life) -> None:
    """An endpoint dies and revives while its probes are cancelled; in the end it is ejected.

    A switch of the mode cancels the probes that are under way, and so does losing the sight of
    connections. Whatever they would have shown, the endpoint's state must not stay as it was.
    """
    node, dice, universe = life.node, life.dice, life.universe
    wanted = node.document["steersman"]["ejectFailingEndpoints"]
    endpoints, process = node.kernel.endpoints, node.process
    if life.heals or life.lasting or not wanted or not serves(node):
        return
    # A node that reaches nobody ejects nobody.
    if universe.now < life.started + 60.0 or endpoints.is_broken(EVERYTHING):
        return
    victim = Backend(STEADY[1], 8080, Protocol.TCP)
    for _ in range(dice.randint(1, 4)):
        endpoints.break_(victim.ip)
        for _ in range(dice.randint(1, 4)):
            endpoints.send(victim, f"10.244.1.{dice.randrange(2, 200)}")
            universe.run(dice.uniform(0.0, 1.0))
        universe.run(dice.choice((0.0, 12.0)) * dice.random())
        dice.choice((_interrupt_by_switch, _interrupt_by_blindness))(life)
        if dice.random() < 0.5:
            endpoints.revive(victim.ip)
            universe.run(dice.choice((1.0, 30.0)) * dice.random())
    endpoints.blind = False
    endpoints.break_(victim.ip)
    universe.run(_BLIND)
    ejected = False
    until = universe.now + _EJECTED
    while not ejected and universe.now < until:
        endpoints.send(victim, f"10.244.1.{dice.randrange(2, 200)}")
        universe.run(0.5)
        ejected = _is_ejected(life, victim)
    if not ejected and process is node.process and serves(node):
        node.kernel.fail(f"{victim} is dead and not ejected")


def _interrupt_by_switch(life: Life) -> None:
    if serves(life.node):
        asked = Asked(life.node, SwitchRequest(life.dice.choice(MODES), force=True))
        until = life.universe.now + 30.0
        while not asked.ended and life.universe.now < until:
            life.universe.run(0.1)


def _interrupt_by_blindness(life: Life) -> None:
    life.node.kernel.endpoints.break_watches()
    life.universe.run(life.dice.choice((0.1, 70.0)))
    life.node.kernel.endpoints.blind = False


def _is_ejected(life: Life, backend: Backend) -> bool:
    assert life.node.daemon is not None
    found = life.node.daemon.sync.store.snapshot.ejected.get(ObjectName("steady", "steady"), ())
    return backend in {each.backend for each in found}


FAILURES: tuple[Callable[[Life], None], ...] = (
    *(endpoints_fail, endpoints_fail, node_fails, nobody_answers, packets_are_lost),
    *(nothing_is_seen, attacked, attacked),
    *(probes_are_interrupted, probes_are_interrupted),
)
"""What goes wrong where endpoints that fail are ejected."""
