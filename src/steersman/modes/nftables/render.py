"""From plans to elements of maps (and, for session affinity, a few chains). Pure.

What a Frontend's three Actions mean is said in one word, the name of a chain; where the classes of
sources need different ones, `by-source` looks the word up in a map per class.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, MutableMapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from steersman.model.names import Family, ServicePortName
from steersman.model.plan import (
    Action,
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    Pool,
    ServicePlan,
    Verdict,
)
from steersman.modes.nftables import skeleton
from steersman.modes.nftables.affinity import AffinityNames
from steersman.modes.nftables.layout import (
    CLUSTER_IP_SUFFIX,
    DROP,
    FIRST_SLOTS,
    PROTOCOLS,
    REJECT,
    SIZES,
    Kind,
    bare,
    lb_chain,
    pack_address,
    pack_endpoints,
    pack_port,
    prefix,
    size_for,
    slot_keys,
)
from steersman.modes.nftables.slots import assign
from steersman.netfilter.names import printed_name

Slots = MutableMapping[bytes, tuple[bytes, ...]]
"""Endpoints by slot, by the key of the first slot: the value that keeps slots stable."""

_BY_SOURCE = {"": b"by-source", "np-": b"np-by-source"}
_LOCAL, _NODE_PORT = Pool.LOCAL, FrontendKind.NODE_PORT
_COMMENT_LIMIT = 100
_SUFFIXES = {
    FrontendKind.CLUSTER_IP: CLUSTER_IP_SUFFIX,
    FrontendKind.EXTERNAL_IP: b" external IP",
    FrontendKind.LOAD_BALANCER_IP: b" load balancer IP",
    FrontendKind.NODE_PORT: b" node port",
}


class _Space:
    """Where Frontends of a sort live: on addresses, or on node ports."""

    def __init__(self, family: Family, node_port: bool) -> None:
        kinds = _NODEPORT_KINDS if node_port else _SERVICE_KINDS
        self.name = "np-" if node_port else ""
        (
            self.dispatch,
            self.endpoints,
            self.pod,
            self.node,
            self.external,
            self.refused,
            self.affinity,
        ) = (prefix(kind, family) for kind in kinds)


_SERVICE_KINDS = (
    Kind.SERVICE_IPS,
    Kind.SERVICE_ENDPOINTS,
    Kind.POD_SERVICE_IPS,
    Kind.NODE_SERVICE_IPS,
    Kind.EXTERNAL_SERVICE_IPS,
    Kind.NO_ENDPOINT_SERVICES,
    Kind.AFFINITY_IPS,
)
_NODEPORT_KINDS = (
    Kind.SERVICE_NODEPORTS,
    Kind.NODEPORT_ENDPOINTS,
    Kind.POD_NODEPORTS,
    Kind.NODE_NODEPORTS,
    Kind.EXTERNAL_NODEPORTS,
    Kind.NO_ENDPOINT_NODEPORTS,
    Kind.AFFINITY_NODEPORTS,
)
_SPACES = {family: (_Space(family, False), _Space(family, True)) for family in Family}


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
        plan: what to do.
        settings: of the node.
        slots: who has which slot; read, and brought up to date for this plan.
    """
    return _ServiceRender(plan, settings.family(plan.key.family), slots).run()


class _ServiceRender:
    """One ServicePort on its way into a Ruleset."""

    __slots__ = (
        "_affinity",
        "_comment",
        "_out",
        "_plan",
        "_pods",
        "_pools",
        "_protocol",
        "_slots",
        "_spaces",
    )

    def __init__(self, plan: ServicePlan, own: FamilySettings, slots: Slots) -> None:
        name, family = plan.key
        self._plan = plan
        # The pod class has no members where pods cannot be told.
        self._pods = bool(own.detector)
        self._slots = slots
        self._out: dict[bytes, object] = {}
        self._pools: dict[Pool, tuple[bytes, ...]] = {}
        self._spaces = _SPACES[family]
        self._protocol = PROTOCOLS[name.protocol]
        self._comment = _printed(name)
        self._affinity = AffinityNames(plan.key) if plan.affinity_seconds else None

    def run(self) -> dict[bytes, object]:
        for frontend in self._plan.frontends:
            self._frontend(frontend)
        if self._affinity and self._pools:
            self._out.update(
                self._affinity.render(
                    self._plan.affinity_seconds,
                    {pool is _LOCAL: map(bare, ends) for pool, ends in self._pools.items()},
                )
            )
        return self._out

    def _frontend(self, frontend: Frontend) -> None:
        space = self._spaces[frontend.kind is _NODE_PORT]
        address = pack_address(frontend.address) if frontend.address else b""
        key = address + self._protocol + pack_port(frontend.port)
        comment = self._comment + _SUFFIXES[frontend.kind]
        external = frontend.external
        way = _way(frontend.pod if self._pods else external, frontend.node, external)
        if way.refused:
            self._out[space.refused + key] = way.refused + comment
        for pool in way.pools:
            self._endpoints(space.endpoints + key, pool)
        if way.pools:
            self._dispatch(space, key, comment, way)
            if self._affinity:
                self._out[space.affinity + key] = self._affinity.learn.encode() + b"\0"
        if frontend.source_ranges:
            family = self._plan.key.family
            self._out.update(_firewall(family, key, comment, frontend.source_ranges))

    def _endpoints(self, start: bytes, pool: Pool) -> None:
        """Put a pool into the slots of a frontend."""
        local = pool is _LOCAL
        ends = self._pools.get(pool)
        if ends is None:
            first = start + FIRST_SLOTS[local]
            ends = self._pools[pool] = self._assign(first, self._plan.pool(pool))
        out = self._out
        for slot, data in zip(slot_keys(local, len(ends)), ends, strict=False):
            out[start + slot] = data

    def _assign(self, first: bytes, endpoints: Sequence[Endpoint]) -> tuple[bytes, ...]:
        wanted = pack_endpoints(self._plan.key.family, endpoints[: SIZES[-1]])
        ends = self._slots[first] = assign(self._slots.get(first, ()), wanted)
        return ends

    def _dispatch(self, space: _Space, key: bytes, comment: bytes, way: _Way) -> None:
        if way.draw:
            self._out[space.dispatch + key] = self._chain(space, way.draw) + b"\0" + comment
            return
        self._out[space.dispatch + key] = _BY_SOURCE[space.name] + b"\0" + comment
        for kind, draw in zip((space.pod, space.node, space.external), way.draws, strict=True):
            if draw and (kind != space.pod or self._pods):
                self._out[kind + key] = self._chain(space, draw) + b"\0"

    def _chain(self, space: _Space, draw: _Draw) -> bytes:
        """Name of the chain that marks and draws."""
        local = draw.pool is _LOCAL
        count = len(self._pools[draw.pool])
        if not self._affinity:
            return _lb_chain(space.name, draw.marking, local, count)
        fixed = lb_chain(space.name, "", local, size_for(count))
        name, value = self._affinity.lookup(space.name, draw.marking, local, fixed)
        self._out[prefix(Kind.CHAIN, self._plan.key.family) + name] = value
        return name


@lru_cache(maxsize=1024)
def _lb_chain(space: str, marking: str, local: bool, count: int) -> bytes:
    return lb_chain(space, marking, local, size_for(count)).encode()


class _Draw(NamedTuple):
    """What a chain does."""

    marking: str
    """As in the names of chains."""
    pool: Pool


class _Way(NamedTuple):
    """What becomes of the three Actions of a Frontend."""

    refused: bytes
    """What whoever is not sent on meets in the filter chains, and a NUL; b"" where all are."""
    pools: tuple[Pool, ...]
    """Where packets are sent on to."""
    draw: _Draw | None
    """Where one chain serves all classes of sources."""
    draws: tuple[_Draw | None, ...]
    """Else, by class; None for those that are not sent on."""


@lru_cache(maxsize=256)  # there are a dozen
def _way(pod: Action, node: Action, external: Action) -> _Way:
    """Sort Actions out; of those that send nobody on, the first from the outside counts."""
    refusals = [a for a in (external, node, pod) if a.verdict is not Verdict.FORWARD]
    refused = b""
    if refusals:
        refused = (DROP if refusals[0].verdict is Verdict.DROP else REJECT) + b"\0"
    actions = (pod, node, external)
    used = sorted({a.pool for a in actions if a.verdict is Verdict.FORWARD})
    return _Way(refused, tuple(used), _draw(actions), tuple(_draw((a,) * 3) for a in actions))


def _draw(actions: Sequence[Action]) -> _Draw | None:
    """What one chain does for all three; None where they take different ones, or none."""
    marking = _MARKINGS.get(tuple(action.masquerade for action in actions))
    if len({(action.verdict, action.pool) for action in actions}) > 1 or marking is None:
        return None
    return _Draw(marking, actions[0].pool) if actions[0].verdict is Verdict.FORWARD else None


def _firewall(
    family: Family, key: bytes, comment: bytes, ranges: Sequence[str]
) -> dict[bytes, bytes]:
    """Let only these sources in."""
    out = {prefix(Kind.FIREWALL_IPS, family) + key: comment}
    allowed = prefix(Kind.FIREWALL_ALLOWED, family) + key
    for cidr in skeleton.disjoint(ranges):
        network = ipaddress.ip_network(cidr)
        out[allowed + network.network_address.packed] = network.broadcast_address.packed
    return out


_MARKINGS: Mapping[tuple[bool, ...], str] = {
    (False, False, False): "",
    (True, True, True): "masquerade-",
    (False, True, True): "cluster-",
}
"""Marking by who is masqueraded: pods, this node, everyone else."""


def _printed(port: ServicePortName) -> bytes:
    """Printed name as a comment, which nft takes up to 128 bytes long."""
    name = printed_name(port)
    return (name if len(name) <= _COMMENT_LIMIT else name[: _COMMENT_LIMIT - 3] + "...").encode()
