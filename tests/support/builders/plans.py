"""Builds ServicePlans by hand: compile/ is not involved."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import (
    Action,
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    LocalDetector,
    NodeSettings,
    Pool,
    ServicePlan,
    Verdict,
)

DROP = Action(Verdict.DROP)
REJECT = Action(Verdict.REJECT)
CLUSTER = Action(Verdict.FORWARD)
CLUSTER_MASQ = Action(Verdict.FORWARD, masquerade=True)
LOCAL = Action(Verdict.FORWARD, Pool.LOCAL)
LOCAL_MASQ = Action(Verdict.FORWARD, Pool.LOCAL, masquerade=True)

Actions = tuple[Action, Action, Action]
PLAIN: Actions = (CLUSTER, CLUSTER_MASQ, CLUSTER_MASQ)
INTERNAL_LOCAL: Actions = (LOCAL, LOCAL_MASQ, LOCAL_MASQ)
MASQUERADED: Actions = (CLUSTER_MASQ,) * 3
EXTERNAL_LOCAL: Actions = (CLUSTER, CLUSTER_MASQ, LOCAL)
NONE_HERE: Actions = (CLUSTER, CLUSTER_MASQ, DROP)
REJECTED: Actions = (REJECT,) * 3
DROPPED: Actions = (DROP,) * 3

SETTINGS = NodeSettings(
    families=(Family.IPV4, Family.IPV6),
    ipv4=FamilySettings(
        detector=LocalDetector(cidr="10.244.0.0/16"),
        local_addresses=("10.250.1.2", "127.0.0.1"),
        localhost_node_ports=True,
    ),
    ipv6=FamilySettings(detector=LocalDetector(cidr="fd00:10:244::/56")),
)


def key(name: str, protocol: Protocol = Protocol.TCP, family: Family = Family.IPV4) -> PlanKey:
    """`ns/service:port` as the key of a plan."""
    namespace, _, rest = name.partition("/")
    service, _, port = rest.partition(":")
    return PlanKey(ServicePortName(namespace, service, port, protocol), family)


def cluster_ip(address: str, actions: Actions = PLAIN, port: int = 80) -> Frontend:
    return Frontend(FrontendKind.CLUSTER_IP, address, port, *actions)


def external_ip(address: str, actions: Actions = MASQUERADED, port: int = 80) -> Frontend:
    return Frontend(FrontendKind.EXTERNAL_IP, address, port, *actions)


def load_balancer(
    address: str, actions: Actions = MASQUERADED, ranges: tuple[str, ...] = (), port: int = 80
) -> Frontend:
    return Frontend(FrontendKind.LOAD_BALANCER_IP, address, port, *actions, ranges)


def node_port(port: int, actions: Actions = MASQUERADED) -> Frontend:
    return Frontend(FrontendKind.NODE_PORT, "", port, *actions)


def endpoints(*addresses: str, port: int = 8080) -> tuple[Endpoint, ...]:
    return tuple(sorted((Endpoint(a, port) for a in addresses), key=str))


def plan(
    name: PlanKey | str,
    *frontends: Frontend,
    cluster: Iterable[Endpoint] = (),
    local: Iterable[Endpoint] = (),
    affinity: int = 0,
    health: int = 0,
    **more: Any,
) -> ServicePlan:
    """Build a plan, of its two pools of endpoints; `more` are fields of ServicePlan."""
    of = key(name) if isinstance(name, str) else name
    pools = tuple(cluster), tuple(local)
    reachable = tuple(sorted({*pools[0], *pools[1]}, key=str))
    return ServicePlan(of, frontends, *pools, reachable, affinity, health, **more)


def simple(number: int, count: int = 3, family: Family = Family.IPV4) -> ServicePlan:
    """A ClusterIP Service, the number-th of up to 65,536."""
    high, low = divmod(number, 256)
    if family is Family.IPV4:
        address, pods = f"10.96.{high}.{low}", [f"10.{200 + i}.{high}.{low}" for i in range(count)]
    else:
        address = f"fd00:96::{number + 1:x}"
        pods = [f"fd00:{200 + i}::{number + 1:x}" for i in range(count)]
    name = key(f"ns-{number % 50}/svc-{number}:http", family=family)
    return plan(name, cluster_ip(address), cluster=endpoints(*pods))


def random_plan(rng: Random, number: int, family: Family) -> ServicePlan:
    """Any shape of ServicePort, its addresses and ports determined by its number."""
    head = "10.96.0." if family is Family.IPV4 else "fd00:96::"
    pods = "10.244.0." if family is Family.IPV4 else "fd00:10:244::"

    def at(net: int) -> str:
        return f"10.{net}.0.{number}" if family is Family.IPV4 else f"fd00:{net}::{number + 1}"

    protocol = rng.choice(list(Protocol))
    name = key(f"ns/svc-{number}" + rng.choice(["", ":p"]), protocol, family)
    some = endpoints(*(f"{pods}{n}" for n in rng.sample(range(1, 200), rng.randint(1, 4))))
    local = some[: rng.randint(1, len(some))]
    internal = rng.choice([PLAIN, INTERNAL_LOCAL, MASQUERADED, REJECTED, DROPPED])
    external = rng.choice([MASQUERADED, EXTERNAL_LOCAL, NONE_HERE, REJECTED])
    frontends = [cluster_ip(f"{head}{number + 1}", internal)]
    if rng.random() < 0.4:
        frontends.append(external_ip(at(97), external))
    if rng.random() < 0.4:
        source = "192.0.2.0/24" if family is Family.IPV4 else "2001:db8::/64"
        ranges = rng.choice([(), (source,)]) if external is not REJECTED else ()
        frontends += [
            load_balancer(at(98), external, ranges),
            load_balancer(at(99), external, ranges),
        ]
    if rng.random() < 0.5:
        frontends.append(node_port(30000 + number, external))
    actions = [action for each in frontends for action in (each.pod, each.node, each.external)]
    used = {action.pool for action in actions if action.verdict is Verdict.FORWARD}
    return plan(
        name,
        *frontends,
        cluster=some if Pool.CLUSTER in used else (),
        local=local if Pool.LOCAL in used else (),
        affinity=rng.choice([0, 0, 10800]),
        health=rng.choice([0, 0, 0, 32000 + number]),
    )
