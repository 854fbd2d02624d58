"""From plans to elements of maps (and, for session affinity, a few chains). Pure.

What a Frontend's three Actions mean is said in one word, the name of a chain; where the classes of
sources need different ones, `by-source` looks the word up in a map per class.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from steersman.model.names import Family, PlanKey
from steersman.model.plan import (
    Action,
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
    LOCAL_SLOTS,
    PROTOCOLS,
    REJECT,
    SIZES,
    Kind,
    lb_chain,
    pack_address,
    pack_port,
    pack_slot,
    prefix,
    size_for,
)
from steersman.modes.nftables.slots import assign

Slots = MutableMapping[bytes, tuple[bytes, ...]]
"""Endpoints by slot, by the key of the first slot: the value that keeps slots stable."""

_BY_SOURCE = {"": "by-source", "np-": "np-by-source"}
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
_SPACES = {
    (family, node_port): _Space(family, node_port)
    for family in Family
    for node_port in (False, True)
}


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

    def __init__(self, plan: ServicePlan, own: FamilySettings, slots: Slots) -> None:
        self._plan = plan
        self._own = own
        self._slots = slots
        self._out: dict[bytes, object] = {}
        self._pools: dict[Pool, tuple[bytes, ...]] = {}
        self._protocol = PROTOCOLS[plan.key.name.protocol]
        self._comment = _printed(plan.key)
        self._affinity = AffinityNames(plan.key) if plan.affinity_seconds else None

    def run(self) -> dict[bytes, object]:
        for frontend in self._plan.frontends:
            self._frontend(frontend)
        if self._affinity and self._pools:
            self._out.update(
                self._affinity.render(
                    self._plan.affinity_seconds,
                    {pool is Pool.LOCAL: ends for pool, ends in self._pools.items()},
                )
            )
        return self._out

    def _frontend(self, frontend: Frontend) -> None:
        space = _SPACES[self._plan.key.family, frontend.kind is FrontendKind.NODE_PORT]
        address = pack_address(frontend.address) if frontend.address else b""
        key = address + self._protocol + pack_port(frontend.port)
        comment = self._comment + _SUFFIXES[frontend.kind]
        pod, node, external = self._actions(frontend)
        self._refuse(space, key, comment, (external, node, pod))
        used = {a.pool for a in (pod, node, external) if a.verdict is Verdict.FORWARD}
        for pool in used:
            self._endpoints(space, key, pool)
        if used:
            self._dispatch(space, key, comment, (pod, node, external))
        if used and self._affinity:
            learn = self._affinity.learn.encode() + b"\0"
            self._out[space.affinity + key] = learn
        if frontend.source_ranges:
            family = self._plan.key.family
            self._out.update(_firewall(family, key, comment, frontend.source_ranges))

    def _actions(self, frontend: Frontend) -> tuple[Action, Action, Action]:
        """Actions by class; the pod class has no members where pods cannot be told."""
        pod = frontend.pod if self._own.detector else frontend.external
        return pod, frontend.node, frontend.external

    def _refuse(self, space: _Space, key: bytes, comment: bytes, actions: Iterable[Action]) -> None:
        """Whoever is not sent on ends in the filter chains; the first of the Actions counts."""
        for action in actions:
            if action.verdict is not Verdict.FORWARD:
                verdict = DROP if action.verdict is Verdict.DROP else REJECT
                self._out[space.refused + key] = verdict + b"\0" + comment
                return

    def _endpoints(self, space: _Space, key: bytes, pool: Pool) -> None:
        base = LOCAL_SLOTS if pool is Pool.LOCAL else 0
        start = space.endpoints + key
        ends = self._pools.get(pool)
        if ends is None:
            ends = self._pools[pool] = self._assign(start + pack_slot(base), pool)
        for slot, data in enumerate(ends, base):
            self._out[start + pack_slot(slot)] = data

    def _assign(self, first: bytes, pool: Pool) -> tuple[bytes, ...]:
        wanted = [
            pack_address(endpoint.ip) + pack_port(endpoint.port)
            for endpoint in self._plan.pool(pool)[: SIZES[-1]]
        ]
        ends = self._slots[first] = assign(self._slots.get(first, ()), wanted)
        return ends

    def _dispatch(
        self, space: _Space, key: bytes, comment: bytes, actions: tuple[Action, Action, Action]
    ) -> None:
        word = self._word(space, actions)
        if word:
            self._out[space.dispatch + key] = word + b"\0" + comment
            return
        self._out[space.dispatch + key] = _BY_SOURCE[space.name].encode() + b"\0" + comment
        for kind, action in zip((space.pod, space.node, space.external), actions, strict=True):
            if kind == space.pod and not self._own.detector:
                continue
            if word := self._word(space, (action,) * 3):
                self._out[kind + key] = word + b"\0"

    def _word(self, space: _Space, actions: tuple[Action, Action, Action]) -> bytes:
        """Name of the chain that does it for all three; b"" where it takes different ones."""
        if len({(action.verdict, action.pool) for action in actions}) > 1:
            return b""
        marking = _MARKINGS.get(tuple(action.masquerade for action in actions))
        if marking is None or actions[0].verdict is not Verdict.FORWARD:
            return b""
        local = actions[0].pool is Pool.LOCAL
        size = size_for(len(self._pools[actions[0].pool]))
        if not self._affinity:
            return lb_chain(space.name, marking, local, size).encode()
        draw = lb_chain(space.name, "", local, size)
        name, value = self._affinity.lookup(space.name, marking, local, draw)
        self._out[prefix(Kind.CHAIN, self._plan.key.family) + name] = value
        return name


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


def _printed(key: PlanKey) -> bytes:
    """Printed name as a comment, which nft takes up to 128 bytes long."""
    name = str(key.name)
    return (name if len(name) <= _COMMENT_LIMIT else name[: _COMMENT_LIMIT - 3] + "...").encode()
