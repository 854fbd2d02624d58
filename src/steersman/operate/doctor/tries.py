"""The ways that doctor tries: which frontends, from which places, how often, and the trouble.

A way is a frontend at one of its addresses, tried from one place. Only ways that the plan forwards
are tried: what a policy or a source range excludes is no failure. Every way is tried a few times;
then endpoints that nobody has met are looked for, until the budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from steersman.compile.conflicts import describe
from steersman.compile.trace import Flow, TraceResult, trace
from steersman.model.addresses import is_loopback, join_host_port
from steersman.model.names import ObjectName, PlanKey, Protocol
from steersman.model.plan import (
    Endpoint,
    Frontend,
    FrontendKind,
    NodePlan,
    ServicePlan,
    SourceClass,
)
from steersman.netfilter.conntrack.flows import Tracked
from steersman.operate.doctor.traffic_dial import Dial, Target
from steersman.operate.places import Place

MOST = 200
"""Connections that one run of doctor makes at most, those to endpoints themselves included."""
TRIES = 3
"""Usual number of connections of a way: each may meet another endpoint."""
_MOST_WAYS = 60
_SAMPLE = 8
_ADDRESSES = 3
"""Addresses of this node at which a node port is tried from one place."""
_PER_MISSED = 4
"""Connections in one round for each endpoint that was not met yet."""


class Way(NamedTuple):
    """A frontend at one address, tried from one place."""

    place: Place
    key: PlanKey
    words: str
    """Describes the frontend, for people."""
    target: Target
    flow: Flow
    predicted: TraceResult

    @property
    def source(self) -> str:
        """The address that its client sends from; "" if the kernel chooses one."""
        return self.place.addresses.get(self.key.family, "")

    @property
    def endpoints(self) -> frozenset[str]:
        """The endpoints that the plan sends it to."""
        return frozenset(map(str, self.predicted.endpoints))

    def __str__(self) -> str:
        return f"{self.words} from {self.place.name}"

    def __hash__(self) -> int:
        return hash((self.place.name, self.key, self.target))


class Tried(NamedTuple):
    """One connection of a way, and the entry that the kernel tracked it with."""

    way: Way
    dial: Dial
    entry: Tracked | None = None

    @property
    def met(self) -> str:
        """The endpoint that the kernel sent it to; "" if that is not known."""
        return (
            join_host_port(self.entry.endpoint, self.entry.endpoint_port)
            if self.entry is not None
            else ""
        )


class Choice(NamedTuple):
    """The ways to try, and the others."""

    ways: tuple[Way, ...]
    untried: tuple[str, ...] = ()
    """In a few words each."""


# The choice of ways


def choose(
    plan: NodePlan,
    plans: Iterable[ServicePlan],
    places: Sequence[Place],
    node_source: Callable[[str], str] = lambda _: "",
) -> Choice:
    """Return the ways of some ServicePorts; a few of each if there are too many.

    Args:
        plan: decides which ways are forwarded.
        plans: of the ServicePorts.
        places: to try from.
        node_source: returns the address that this node uses to an address; "" if not known.
    """
    every = [list(_ways_of(plan, each, places, node_source)) for each in plans]
    # One way of each ServicePort first, then the second ones: no port is left out for another.
    ways = [way for way in chain.from_iterable(zip_longest(*every)) if way is not None]
    sctp = [way for way in ways if way.target.protocol is Protocol.SCTP]
    ways = [way for way in ways if way.target.protocol is not Protocol.SCTP]
    untried = ["SCTP"] * bool(sctp)
    if (more := len(ways) - _MOST_WAYS) > 0:
        untried.append(f"{more} more addresses and places")
    return Choice(tuple(ways[:_MOST_WAYS]), tuple(untried))


def _ways_of(
    plan: NodePlan,
    service: ServicePlan,
    places: Sequence[Place],
    node_source: Callable[[str], str],
) -> Iterable[Way]:
    """Yield the ways of one ServicePort, places in turn."""
    family, protocol = service.key.family, service.key.name.protocol
    settings = plan.settings.family(family)
    for frontend in service.frontends:
        node_port = frontend.kind is FrontendKind.NODE_PORT
        for place in places:
            if not place.has(family) or not _serves(frontend, place):
                continue
            addresses = settings.local_addresses if node_port else (frontend.address,)
            found = 0
            for address in addresses:
                if found == _ADDRESSES or (is_loopback(address) and place.kind != "node"):
                    continue  # another namespace's loopback is not the node's
                source = node_source(address) if place.kind == "node" else ""
                source = place.addresses.get(family, source)
                flow = Flow(
                    source or SourceClass.NODE, address, frontend.port, protocol, place.device
                )
                result = trace(plan, flow)
                if result.verdict == "forward" and _comes_back(place, result):
                    found += 1
                    words = describe(service.key, frontend)
                    words = f"{words} at {address}" if node_port else words
                    target = Target(address, frontend.port, protocol)
                    yield Way(place, service.key, words, target, flow, result)


def _serves(frontend: Frontend, place: Place) -> bool:
    """Whether clients at a place use such a frontend: no route outside leads to cluster IPs."""
    return place.kind != "outside" or frontend.kind is not FrontendKind.CLUSTER_IP


def _comes_back(place: Place, result: TraceResult) -> bool:
    """Whether an answer finds our client outside: only this node knows the route to it."""
    return (
        place.kind != "outside" or result.masquerade or all(end.local for end in result.endpoints)
    )


def sample(
    plans: Sequence[ServicePlan], troubled: Collection[ObjectName], uses: Mapping[PlanKey, int]
) -> list[ServicePlan]:
    """Return the ServicePorts to try for a whole node: in trouble, most used, one of each kind.

    Args:
        plans: all of them.
        troubled: Services with problems.
        uses: connections by ServicePort.
    """
    served = sorted((plan for plan in plans if plan.reachable), key=lambda plan: str(plan.key))
    in_trouble = [plan for plan in served if plan.key.name.object_name in troubled]
    used = [plan for plan in served if uses.get(plan.key)]
    used.sort(key=lambda plan: uses[plan.key], reverse=True)
    chosen = {plan.key: plan for plan in (*in_trouble[:_SAMPLE], *used[:_SAMPLE])}
    kinds = set(map(_kind, chosen.values()))
    for plan in served:
        if _kind(plan) not in kinds and len(kinds) < 2 * _SAMPLE:
            kinds.add(_kind(plan))
            chosen.setdefault(plan.key, plan)
    return list(chosen.values())


def _kind(plan: ServicePlan) -> tuple[object, ...]:
    """Return what tells a ServicePort from others in how its packets are treated."""
    frontends = frozenset(frontend.kind for frontend in plan.frontends)
    name, local, sticky = plan.key.name, bool(plan.local), bool(plan.affinity_seconds)
    return plan.key.family, name.protocol, frontends, local, sticky


# The budget


def first_round(ways: Sequence[Way], most: int) -> list[Way]:
    """Return the connections to make first: of each way the same number."""
    number = min(TRIES, most // len(ways)) if ways else 0
    return [way for _ in range(number) for way in ways] if number else list(ways[:most])


def next_round(
    made: Mapping[Way, Sequence[Tried]], sticky: Collection[PlanKey], most: int
) -> list[Way]:
    """Return more connections, to meet from each place the endpoints that it has not met yet.

    Args:
        made: the connections so far.
        sticky: ServicePorts with session affinity: each place is but one client.
        most: number of connections that may be made.
    """
    groups: dict[tuple[PlanKey, str], list[Way]] = {}
    for way, tries in made.items():
        if way.key not in sticky and all(tried.entry is not None for tried in tries):
            groups.setdefault((way.key, way.place.name), []).append(way)
    out: list[list[Way]] = []
    for ways in groups.values():
        missed = frozenset().union(*(way.endpoints for way in ways))
        missed -= {tried.met for way in ways for tried in made[way]}
        if missed:
            best = max(ways, key=lambda way: len(way.endpoints & missed))
            out.append([best] * (len(missed) * _PER_MISSED))
    return [way for way in chain.from_iterable(zip_longest(*out)) if way is not None][:most]


# The judgement


def trouble(tried: Tried, answering: Collection[str]) -> str:
    """Return the trouble of a connection, "" for none that is known.

    Args:
        tried: the connection.
        answering: endpoints that answered a datagram when they were dialled themselves.
    """
    way, dial, entry = tried
    if entry is not None and way.endpoints and tried.met not in way.endpoints:
        ends = " or ".join(sorted(way.endpoints)[:3])
        to = "was not translated" if tried.met == str(way.target) else f"went to {tried.met}"
        return f"the packet {to}, not to {ends}: {dial}"
    if not dial.good:
        return str(dial) if dial.outcome != "failed" else ""
    if dial.outcome == "silent" and tried.met in answering:
        return f"no answer, although the endpoint {tried.met} answers when it is dialled itself"
    return ""


def wrong_source(tried: Tried, local: Collection[str]) -> str:
    """Return how the source that the endpoint sees differs from the plan's, "" if it does not."""
    entry, result = tried.entry, tried.way.predicted
    if entry is None or not entry.answered:
        return ""
    ours = entry.seen_source in local
    hairpins: tuple[Endpoint, ...] = result.hairpins
    wanted = result.masquerade or tried.met in map(str, hairpins)
    if wanted and not ours:
        return f"the endpoint sees {entry.seen_source} instead of an address of this node"
    if not wanted and entry.seen_source != entry.client:
        return f"the endpoint sees {entry.seen_source} instead of the client {entry.client}"
    return ""
