"""Render one ServicePlan as chains and rules, in the spelling of iptables-save (behaviour 8.2).

    KUBE-SERVICES -- cluster IP ---------------------------------.
         |                                                        v
         '--- external or -----> [KUBE-FW] --> KUBE-EXT --> KUBE-SVC (cluster) --> KUBE-SEP
              load balancer IP                   ^          KUBE-SVL (local)       (DNAT)
    KUBE-NODEPORTS ------------------------------'

KUBE-FW exists if there are source ranges. The chains to the right of the first column belong to one
ServicePort. No policy here: the plan's Actions determine which chains exist and what they contain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from steersman.model.names import Family, Protocol
from steersman.model.plan import (
    Frontend,
    FrontendKind,
    LocalDetector,
    NodeSettings,
    Pool,
    ServicePlan,
    Verdict,
)
from steersman.modes.iptables.names import (
    EXT,
    EXTERNAL_SERVICES,
    FW,
    LOCALHOST_ACCEPTED,
    MARK_MASQ,
    NODE_PORTS,
    PROXY_FIREWALL,
    SEP,
    SERVICES,
    SVC,
    SVL,
    bucket_chain,
    last_octet,
)
from steersman.netfilter.iptables.names import (
    FILTER,
    NAT,
    REJECT,
    WHOLE,
    RuleKey,
    chain_hash,
    printed_name,
)
from steersman.netfilter.iptables.saved import HOST_MASK, probability


class Features(msgspec.Struct, frozen=True):
    """Capabilities of this machine's iptables and kernel that change the rules."""

    random_fully: bool = True
    """MASQUERADE --random-fully (iptables >= 1.6.2)."""
    nfacct: bool = False
    """The kernel and iptables have the counters of `-m nfacct`."""
    tcp_liberal: bool = False
    """nf_conntrack_tcp_be_liberal was on at start: then INVALID packets are not dropped."""


_LOWER = {protocol: protocol.lower() for protocol in Protocol}
_BITS = {Family.IPV4: "/32", Family.IPV6: "/128"}
_ADDRESS_COMMENT = {
    FrontendKind.CLUSTER_IP: "cluster IP",
    FrontendKind.EXTERNAL_IP: "external IP",
    FrontendKind.LOAD_BALANCER_IP: "loadbalancer IP",
}


@lru_cache(maxsize=64)
def local_source(detector: LocalDetector, negate: bool = False) -> tuple[str, str]:
    """Return the match of traffic from local pods, or of all other: before `-d`, and after it."""
    not_ = " !" if negate else ""
    if detector.cidr:
        everyone = detector.cidr.endswith("/0") and not negate  # printed as no match at all
        return ("" if everyone else f"{not_} -s {detector.cidr}"), ""
    name = detector.interface or f"{detector.interface_prefix}+"
    return "", f"{not_} -i {name}"


def render_service(
    plan: ServicePlan, settings: NodeSettings, features: Features
) -> dict[RuleKey, str]:
    """Render one ServicePort's part of the Ruleset.

    The values are complete `-A CHAIN ...` lines, joined by newlines. A chain comes after those
    that it leads to, so that a large Diff can be cut anywhere (script.py). Every key contains the
    ServicePort's name: hashed in the chain, or as the part.
    """
    return _ServicePort(plan, settings, features).render()


class _ServicePort:
    """The rules of one ServicePort while they are collected."""

    __slots__ = (
        "bits",
        "chains",
        "features",
        "groups",
        "hash",
        "heads",
        "name",
        "plan",
        "pools",
        "protocol",
        "settings",
    )

    def __init__(self, plan: ServicePlan, settings: NodeSettings, features: Features) -> None:
        key = plan.key
        self.plan = plan
        self.settings = settings
        self.features = features
        self.name = printed_name(key.name)
        self.protocol = _LOWER[key.name.protocol]
        self.hash = chain_hash(self.name + self.protocol)
        self.bits = _BITS[key.family]
        self.pools: set[Pool] = set()  # pools that some rule leads to
        self.heads: dict[str, str] = {}  # rules at the top of the chain of a pool
        self.chains: dict[str, str] = {}  # KUBE-EXT, and KUBE-FW behind it
        self.groups: dict[tuple[str, str], list[str]] = {}  # our rules in shared chains

    def render(self) -> dict[RuleKey, str]:
        plan = self.plan
        for frontend in plan.frontends:
            if frontend.kind is FrontendKind.CLUSTER_IP:
                self._cluster_ip(frontend)
            elif frontend.kind is FrontendKind.NODE_PORT:
                self._node_port(frontend)
            else:
                self._external_address(frontend)
        if plan.health_check_node_port:
            comment = f'-m comment --comment "{self.name} health check node port"'
            port = f"-m tcp --dport {plan.health_check_node_port}"
            self._rule(FILTER, NODE_PORTS, f" -p tcp {comment} {port} -j ACCEPT")
        family = int(plan.key.family)
        out: dict[RuleKey, str] = {}
        for chain, rules in itertools.chain(self._endpoint_chains(), self.chains.items()):
            out[family, NAT, chain, WHOLE] = rules
        for (table, chain), lines in self.groups.items():
            # a health check is TCP whatever the ServicePort is, and script.py sees only the rule
            protocol = "tcp" if table == FILTER and chain == NODE_PORTS else self.protocol
            out[family, table, chain, f"{self.name} {protocol}"] = "\n".join(lines)
        return out

    # Frontends: rules in shared chains, and the chains that these rules lead to

    def _cluster_ip(self, frontend: Frontend) -> None:
        action = frontend.external
        if action.verdict is not Verdict.FORWARD:
            self._block(frontend, SERVICES, action.verdict)
            return
        chain = self._pool_chain(action.pool)
        self._dispatch(frontend, chain)
        if not action.masquerade:
            return
        # KUBE-SVC begins with a rule that marks connections to be masqueraded. It matches the
        # cluster IP again, because external addresses lead to the same chain.
        before = after = ""
        detector = self.settings.family(self.plan.key.family).detector
        if detector and not frontend.pod.masquerade:
            before, after = local_source(detector, negate=True)
        self.heads[chain] = (
            f"-A {chain}{before} -d {frontend.address}{self.bits}{after} -p {self.protocol}"
            f' -m comment --comment "{self.name} cluster IP"'
            f" -m {self.protocol} --dport {frontend.port} -j {MARK_MASQ}"
        )

    def _external_address(self, frontend: Frontend) -> None:
        if _forwards(frontend):
            target = self._external_chain(frontend)
            if frontend.source_ranges:
                # KUBE-FW accepts the ranges; the filter table drops the packets it leaves alone.
                chain = FW + self.hash
                if chain not in self.chains:
                    comment = f'-m comment --comment "{self.name} loadbalancer IP"'
                    lines = [
                        f"-A {chain} -s {cidr} {comment} -j {target}"
                        for cidr in frontend.source_ranges
                    ]
                    rest = f"other traffic to {self.name} will be dropped by {PROXY_FIREWALL}"
                    lines.append(f'-A {chain} -m comment --comment "{rest}"')
                    self.chains[chain] = "\n".join(lines)
                rule = self._to(frontend, f"traffic not accepted by {chain}", "DROP")
                self._rule(FILTER, PROXY_FIREWALL, rule)
                target = chain
            self._dispatch(frontend, target)
        if frontend.external.verdict is not Verdict.FORWARD:
            self._block(frontend, EXTERNAL_SERVICES, frontend.external.verdict)

    def _node_port(self, frontend: Frontend) -> None:
        family, protocol = self.plan.key.family, self.protocol
        port = f"-m {protocol} --dport {frontend.port}"
        if _forwards(frontend):
            rest = f' -p {protocol} -m comment --comment "{self.name}" {port}'
            target = self._external_chain(frontend)
            # First a rule that only counts packets from loopback, if the kernel can count.
            counted = family is Family.IPV4 and self.settings.ipv4.localhost_node_ports
            if counted and self.features.nfacct:
                counter = f"-m nfacct --nfacct-name  {LOCALHOST_ACCEPTED}"
                self._rule(NAT, NODE_PORTS, f" -d 127.0.0.0/8{rest} {counter} -j {target}")
            self._rule(NAT, NODE_PORTS, f"{rest} -j {target}")
        verdict = frontend.external.verdict
        if verdict is not Verdict.FORWARD:
            why, target = _blocked(family, verdict)
            comment = f'-m comment --comment "{self.name} has {why}" -m addrtype --dst-type LOCAL'
            self._rule(FILTER, EXTERNAL_SERVICES, f" -p {protocol} {comment} {port} -j {target}")

    def _dispatch(self, frontend: Frontend, target: str) -> None:
        """Lead an address from KUBE-SERVICES, or from its bucket if that is split, to a chain."""
        split = self.settings.split_dispatch
        chain = bucket_chain(last_octet(frontend.address)) if split else SERVICES
        self._rule(NAT, chain, self._to(frontend, _ADDRESS_COMMENT[frontend.kind], target))

    def _block(self, frontend: Frontend, chain: str, verdict: Verdict) -> None:
        """Drop or reject traffic to an address in a chain of the filter table."""
        why, target = _blocked(self.plan.key.family, verdict)
        self._rule(FILTER, chain, self._to(frontend, f"has {why}", target))

    def _rule(self, table: str, chain: str, text: str) -> None:
        """Add a rule to a chain that ServicePorts share."""
        self.groups.setdefault((table, chain), []).append(f"-A {chain}{text}")

    def _to(self, frontend: Frontend, comment: str, target: str) -> str:
        """Match everything to an address and port."""
        return (
            f" -d {frontend.address}{self.bits} -p {self.protocol}"
            f' -m comment --comment "{self.name} {comment}"'
            f" -m {self.protocol} --dport {frontend.port} -j {target}"
        )

    # Chains of this ServicePort

    def _pool_chain(self, pool: Pool) -> str:
        """Return the chain that chooses among the endpoints of a pool."""
        self.pools.add(pool)
        return (SVC if pool is Pool.CLUSTER else SVL) + self.hash

    def _external_chain(self, frontend: Frontend) -> str:
        """Write KUBE-EXT once; all external Frontends of a ServicePort have the same Actions."""
        chain = EXT + self.hash
        if chain in self.chains:
            return chain
        pod, node, external = frontend.pod, frontend.node, frontend.external
        destinations = f"{self.name} external destinations"
        lines: list[str] = []

        def add(source: str, comment: str, match: str, target: str) -> None:
            comment = f'-m comment --comment "{comment} {destinations}"'
            lines.append(f"-A {chain}{source} {comment}{match} -j {target}")

        if pod == node == external:
            if external.masquerade:
                add("", "masquerade traffic for", "", MARK_MASQ)
        else:
            # Pods and this node are sent to their pools before all others.
            detector = self.settings.family(self.plan.key.family).detector
            if detector and pod.verdict is Verdict.FORWARD:
                target = self._pool_chain(pod.pool)
                add("".join(local_source(detector)), "pod traffic for", "", target)
            if node.verdict is Verdict.FORWARD:
                local = " -m addrtype --src-type LOCAL"
                if node.masquerade:
                    add("", "masquerade LOCAL traffic for", local, MARK_MASQ)
                add("", "route LOCAL traffic for", local, self._pool_chain(node.pool))
        if external.verdict is Verdict.FORWARD:
            lines.append(f"-A {chain} -j {self._pool_chain(external.pool)}")
        self.chains[chain] = "\n".join(lines)
        return chain

    def _endpoint_chains(self) -> Iterator[tuple[str, str]]:
        """Yield KUBE-SEP chains, then KUBE-SVC and KUBE-SVL if rules lead there."""
        plan, protocol, name = self.plan, self.protocol, self.name
        comments = not self.settings.large_cluster
        affinity, mask = plan.affinity_seconds, HOST_MASK[plan.key.family]

        # One chain for each endpoint: mark hairpins, remember the client, translate.
        seed = name + protocol
        reachable = [(SEP + chain_hash(seed + text), text) for text in map(str, plan.reachable)]
        comment = f' -m comment --comment "{name}"' if comments else ""
        for endpoint, (chain, printed) in zip(plan.reachable, reachable, strict=True):
            recent = f" -m recent --set --name {chain} --mask {mask} --rsource" if affinity else ""
            yield (
                chain,
                f"-A {chain} -s {endpoint.ip}{self.bits}{comment} -j {MARK_MASQ}\n"
                f"-A {chain} -p {protocol}{comment}{recent} -m {protocol}"
                f" -j DNAT --to-destination {printed}",
            )

        # One chain for each pool: the endpoint that the client had, or any, all equally likely.
        for pool in tuple(self.pools):
            chain = self._pool_chain(pool)
            among = plan.pool(pool)
            targets = reachable
            if among != plan.reachable:
                known = dict(zip(plan.reachable, reachable, strict=True))
                targets = [known[endpoint] for endpoint in among]
            heads = [f"-A {chain}"] * len(targets)
            if comments:
                start = f'-A {chain} -m comment --comment "{name} -> '
                heads = [f'{start}{printed}"' for _, printed in targets]
            lines = [self.heads[chain]] if chain in self.heads else []
            if affinity:
                lines += [
                    f"{head} -m recent --rcheck --seconds {affinity} --reap --name {target}"
                    f" --mask {mask} --rsource -j {target}"
                    for head, (target, _) in zip(heads, targets, strict=True)
                ]
            left = len(targets)
            for head, (target, _) in zip(heads, targets, strict=True):
                chance = f" -m statistic --mode random --probability {probability(left)}"
                lines.append(f"{head}{chance if left > 1 else ''} -j {target}")
                left -= 1
            yield chain, "\n".join(lines)


def _forwards(frontend: Frontend) -> bool:
    return any(
        action.verdict is Verdict.FORWARD
        for action in (frontend.pod, frontend.node, frontend.external)
    )


def _blocked(family: Family, verdict: Verdict) -> tuple[str, str]:
    """Return why a destination has no usable endpoints, and the target of its rules."""
    if verdict is Verdict.REJECT:
        return "no endpoints", REJECT[family]
    return "no local endpoints", "DROP"
