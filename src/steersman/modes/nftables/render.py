"""From plans to elements of maps (and, for session affinity, a few chains). Pure.

A Frontend has an Action per class of sources (pods, this node, everyone else). If one chain can do
all three, the frontend's element in `service-ips` or `service-nodeports` goes to it; else it goes
to `by-source`, which looks the chain up in a map per class:

    service-ips      10.96.0.10 . tcp . 80      : goto cluster-lb-4        one chain for all
    service-ips      192.0.2.80 . tcp . 80      : goto by-source           one chain per class
      pod-service-ips                           : goto lb-4
      node-service-ips                          : goto masquerade-lb-4
      external-service-ips                      : goto local-lb-1
    service-endpoints  ... . slot               : 10.244.1.7 . 8080        lb- chains choose here

**Slots.** The data path chooses a slot at random, so slots must be dense. An endpoint keeps its
slot, and the last one moves into a hole (`assign_slots`): one endpoint more or less costs two
elements, in a Service of 3 or 1,000.

**Session affinity.** A client sticks to its endpoint whatever service IP it uses (behaviour 6), so
its entry belongs to the ServicePort: one affinity map per pool in use, filled by the data path
behind DNAT, where the endpoint is known, and by members only: an endpoint that was just removed
cannot come back. The frontend's chain looks the client up and else goes to an lb- chain.

**Node ports on loopback** are sockets in place of elements: a packet from a loopback address never
leaves the node, so no rule can redirect it (for IPv6 there is not even a sysctl). relay.py serves
them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, MutableMapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from steersman.model.names import Family, Protocol
from steersman.model.plan import (
    Action,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    Pool,
    ServicePlan,
    SourceClass,
    Verdict,
)
from steersman.modes.nftables import skeleton
from steersman.modes.nftables.layout import (
    CLUSTER_IP_SUFFIX,
    DROP,
    FIRST_SLOTS,
    LEARN_CHAIN,
    MAP_GROUPS,
    POOLS,
    PROTOCOLS,
    REJECT,
    SIZES,
    Kind,
    base_name,
    element_key,
    lb_chain,
    named,
    own_set_name,
    pack_address,
    pack_endpoints,
    pack_port,
    prefix,
    size_for,
    slot_keys,
    without_locality,
)
from steersman.netfilter.iptables.names import printed_name
from steersman.proxy.listeners import ListenerPlan, decision_of

Slots = MutableMapping[bytes, bytes]
"""Endpoints by slot, by the key of the first slot: the state that keeps slots stable.

They are joined, which takes a third of the memory of a tuple; all of a pool have the same length.
"""

LOOPBACK: Mapping[Family, str] = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}

_LOCAL, _NODE_PORT = Pool.LOCAL, FrontendKind.NODE_PORT
_COMMENT_LIMIT = 100  # bytes of a ServicePort's name; nft takes comments of up to 128 bytes
_SUFFIXES = {
    FrontendKind.CLUSTER_IP: CLUSTER_IP_SUFFIX,
    FrontendKind.EXTERNAL_IP: b" external IP",
    FrontendKind.LOAD_BALANCER_IP: b" load balancer IP",
    FrontendKind.NODE_PORT: b" node port",
}
_MARKINGS: Mapping[tuple[bool, ...], str] = {
    (False, False, False): "",
    (True, True, True): "masquerade-",
    (False, True, True): "cluster-",
}
"""Marking in the name of a chain, by who is masqueraded: pods, this node, everyone else."""


def render_node(settings: NodeSettings) -> dict[bytes, object]:
    """Render the fixed part: two texts per family, and the addresses that serve node ports."""
    out: dict[bytes, object] = {}
    for family in settings.families:
        out[prefix(Kind.SKELETON, family)] = skeleton.foundation(family)
        out[prefix(Kind.RULES, family)] = skeleton.rules(settings, family)
        for address in settings.family(family).node_port_addresses or ():
            out[prefix(Kind.NODEPORT_IPS, family) + pack_address(address)] = b""
    return out


def render_service(plan: ServicePlan, settings: NodeSettings, slots: Slots) -> dict[bytes, object]:
    """Render one ServicePort.

    Args:
        plan: plan of the ServicePort.
        settings: settings of the node.
        slots: the slots of all endpoints; read, and brought up to date for this plan.
    """
    render = _ServiceRender(plan, settings.family(plan.key.family), slots)
    for frontend in plan.frontends:
        render.add_frontend(frontend)
    if plan.affinity_seconds:
        render.add_affinity()
    return render.out


class _ServiceRender:
    """The objects of one ServicePort, as far as they are rendered."""

    __slots__ = (
        "_base",
        "_comment",
        "_family",
        "_has_pods",
        "_plan",
        "_pools",
        "_protocol",
        "_slots",
        "out",
    )

    def __init__(self, plan: ServicePlan, own: FamilySettings, slots: Slots) -> None:
        name, self._family = plan.key
        self._plan = plan
        self._has_pods = bool(own.detector)  # without a detector, no source is known to be a pod
        self._slots = slots
        self._pools: dict[Pool, tuple[bytes, ...]] = {}
        """Endpoints by slot, of the pools in use."""
        self._protocol = PROTOCOLS[name.protocol]
        printed = printed_name(name)
        if len(printed) > _COMMENT_LIMIT:
            printed = printed[: _COMMENT_LIMIT - 3] + "..."
        self._comment = printed.encode()
        self._base = base_name(plan.key) if plan.affinity_seconds else ""
        self.out: dict[bytes, object] = {}

    def add_frontend(self, frontend: Frontend) -> None:
        """Add the elements of one frontend."""
        out = self.out
        group, family = MAP_GROUPS[frontend.kind is _NODE_PORT], self._family
        address = pack_address(frontend.address) if frontend.address else b""
        key = address + self._protocol + pack_port(frontend.port)
        comment = self._comment + _SUFFIXES[frontend.kind]
        external = frontend.external
        pod = frontend.pod if self._has_pods else external
        verdicts = _verdict_plan(pod, frontend.node, external)
        # The filter chains meet packets that are not sent on.
        if verdicts.refused:
            out[prefix(group.refused, family) + key] = verdicts.refused + comment
        # Endpoints by slot, of each pool that some class is sent to.
        for pool in verdicts.pools:
            local, start = pool is _LOCAL, prefix(group.endpoints, family) + key
            ends = self._pools.get(pool)
            if ends is None:  # the first frontend assigns the slots, the others have the same
                first = start + FIRST_SLOTS[local]
                wanted = pack_endpoints(self._family, self._plan.pool(pool)[: SIZES[-1]])
                ends = self._pools[pool] = self._assigned(first, wanted)
            for slot, end in zip(slot_keys(local, len(ends)), ends, strict=False):
                out[start + slot] = end
        # The chain to go to, or one for each class of sources.
        dispatch = prefix(group.dispatch, family) + key
        if verdicts.choice:
            out[dispatch] = self._chain(group.name, verdicts.choice) + b"\0" + comment
        elif verdicts.pools:
            out[dispatch] = f"{group.name}by-source".encode() + b"\0" + comment
            for kind, source, choice in zip(
                group.by_source, SourceClass, verdicts.choices, strict=True
            ):
                if choice and (self._has_pods or source is not SourceClass.POD):
                    out[prefix(kind, family) + key] = self._chain(group.name, choice) + b"\0"
        # Behind DNAT, the chain that learns the client's endpoint.
        if verdicts.pools and self._base:
            out[prefix(group.affinity, family) + key] = (
                f"{LEARN_CHAIN}-{self._base}".encode() + b"\0"
            )
        # Before DNAT, the check of source ranges.
        if frontend.source_ranges:
            out[prefix(Kind.FIREWALL_IPS, family) + key] = comment
            allowed = prefix(Kind.FIREWALL_ALLOWED, family) + key
            for cidr in skeleton.disjoint(frontend.source_ranges):
                network = ipaddress.ip_network(cidr)
                out[allowed + network.network_address.packed] = network.broadcast_address.packed

    def _assigned(self, first: bytes, wanted: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return the endpoints in the order of their slots, and remember it."""
        previous, joined = self._slots.get(first, b""), b"".join(wanted)
        if previous and wanted and previous != joined:
            size = len(wanted[0])
            slots = [previous[at : at + size] for at in range(0, len(previous), size)]
            wanted = assign_slots(tuple(slots), wanted)
            joined = b"".join(wanted)
        self._slots[first] = joined
        return wanted

    def _chain(self, group: str, choice: _PoolChoice) -> bytes:
        """Return the chain that marks and chooses; add it if it is the ServicePort's own.

        The value of such a chain describes its rules, and is kept in a comment: protocol, chain
        that marks (`-` for none), pool, chain that chooses.
        """
        local = choice.pool is _LOCAL
        count = len(self._pools[choice.pool])
        if not self._base:
            return _lb_chain(group, choice.marking, local, count)
        protocol = self._plan.key.name.protocol.lower()
        mark = f"mark-{choice.marking.rstrip('-')}" if choice.marking else "-"
        lb = lb_chain(group, "", local, size_for(count))
        name = f"{group}{choice.marking}{'local-' if local else ''}affinity-{self._base}"
        value = f"lookup {protocol} {mark} {POOLS[local]} {lb}"
        self.out[named(Kind.CHAIN, self._family, name)] = value.encode()
        return name.encode()

    def add_affinity(self) -> None:
        """Add the affinity maps of the pools in use, their members, and the chain that learns."""
        family, base = self._family, self._base
        pools = {pool is _LOCAL: ends for pool, ends in self._pools.items()}
        for local, ends in sorted(pools.items()):
            entries, members = (
                named(kind, family, own_set_name(kind, base, local))
                for kind in (Kind.AFFINITY, Kind.MEMBERS)
            )
            self.out[entries] = self.out[members] = b""
            start = element_key(members)
            self.out.update((start + without_locality(end), b"") for end in ends)
        if pools:
            words = " ".join(POOLS[local] for local in sorted(pools))
            value = f"learn {self._plan.affinity_seconds} {words}"
            self.out[named(Kind.CHAIN, family, f"{LEARN_CHAIN}-{base}")] = value.encode()


@lru_cache(maxsize=1024)
def _lb_chain(group: str, marking: str, local: bool, count: int) -> bytes:
    """Return the name of a fixed chain for so many endpoints."""
    return lb_chain(group, marking, local, size_for(count)).encode()


# Verdicts


class _PoolChoice(NamedTuple):
    """The work of an lb- chain: mark, then choose an endpoint of a pool."""

    marking: str
    """As in the names of chains."""
    pool: Pool


class _VerdictPlan(NamedTuple):
    """How the three Actions of a Frontend are carried out."""

    refused: bytes
    """Verdict in the filter chains for packets that are not sent on, and a NUL; b"" for none."""
    pools: tuple[Pool, ...]
    """Pools that packets are sent to."""
    choice: _PoolChoice | None
    """The chain that serves all classes of sources, if there is one."""
    choices: tuple[_PoolChoice | None, ...]
    """Else the chain of each class; None for a class that is not sent on."""


@lru_cache(maxsize=256)  # there are a dozen
def _verdict_plan(pod: Action, node: Action, external: Action) -> _VerdictPlan:
    """Return how Actions are carried out; the refusal is the first one, from the outside."""
    actions = (pod, node, external)
    refusals = [a.verdict for a in reversed(actions) if a.verdict is not Verdict.FORWARD]
    refused = b""
    if refusals:
        refused = (DROP if refusals[0] is Verdict.DROP else REJECT) + b"\0"
    used = sorted({a.pool for a in actions if a.verdict is Verdict.FORWARD})
    choices = tuple(_choice((action,) * 3) for action in actions)
    return _VerdictPlan(refused, tuple(used), _choice(actions), choices)


def _choice(actions: Sequence[Action]) -> _PoolChoice | None:
    """Return the work of one chain for all three; None if they differ, or send nothing on."""
    marking = _MARKINGS.get(tuple(action.masquerade for action in actions))
    if len({(action.verdict, action.pool) for action in actions}) > 1 or marking is None:
        return None
    return _PoolChoice(marking, actions[0].pool) if actions[0].verdict is Verdict.FORWARD else None


# Slots


def assign_slots(previous: tuple[bytes, ...], wanted: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return `wanted`, free of duplicates, in the order of their slots.

    Endpoints that have a slot in `previous` keep it; new ones take the holes, then the end; the
    last ones move into the holes that remain.
    """
    if not previous or previous == wanted:
        return wanted
    had = set(previous)
    gone, come = had.difference(wanted), set(wanted).difference(had)
    if len(had) < len(previous):  # an endpoint twice: another program wrote it; b"" is a hole
        previous = tuple([b"" if end in previous[:at] else end for at, end in enumerate(previous)])
    elif len(gone) == len(come) == 1:  # the usual change
        at = previous.index(gone.pop())
        return (*previous[:at], come.pop(), *previous[at + 1 :])
    # New endpoints take the holes in their order; those without one come behind.
    new = iter([end for end in wanted if end in come])
    slots = [next(new, b"") if end in gone or not end else end for end in previous]
    slots.extend(new)
    # The last endpoints move into the holes that remain.
    for hole in [at for at, end in enumerate(slots) if not end]:
        while slots and not slots[-1]:
            slots.pop()
        if hole < len(slots):
            slots[hole] = slots.pop()
    return tuple([end for end in slots if end])


# Loopback


def render_localhost(plan: ServicePlan, settings: NodeSettings) -> dict[bytes, ListenerPlan]:
    """Render the listeners of one ServicePort's node ports on loopback."""
    if not settings.traits.relays_localhost:
        return {}
    name, family = plan.key
    if not settings.family(family).localhost_node_ports or name.protocol is Protocol.SCTP:
        return {}
    listeners = {}
    for frontend in plan.frontends:
        if frontend.kind is _NODE_PORT and frontend.node.verdict is Verdict.FORWARD:
            # A client on loopback is this node, so all classes have the node's decision.
            decision = decision_of(frontend.node, plan.pool(frontend.node.pool))
            key = prefix(Kind.RELAY, family) + PROTOCOLS[name.protocol] + pack_port(frontend.port)
            listeners[key] = ListenerPlan(
                owner=plan.key,
                bind=LOOPBACK[family],
                port=frontend.port,
                pod=decision,
                node=decision,
                external=decision,
                affinity_seconds=plan.affinity_seconds,
                least_connections=plan.least_connections,
            )
    return listeners
