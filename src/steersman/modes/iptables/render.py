"""From one ServicePlan to its chains and rules, in the spelling of iptables-save (behaviour 8.2).

Nothing is decided here: which chains exist and what they hold follows from the plan's Actions.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from steersman.model.names import Family, Protocol
from steersman.model.plan import (
    Action,
    Frontend,
    FrontendKind,
    LocalDetector,
    NodeSettings,
    Pool,
    ServicePlan,
    Verdict,
)
from steersman.modes.iptables.endpoints import Endpoints
from steersman.modes.iptables.names import (
    EXT,
    EXTERNAL_SERVICES,
    FW,
    LOCALHOST_ACCEPTED,
    MARK_MASQ,
    NODE_PORTS,
    PROXY_FIREWALL,
    SERVICE_PREFIXES,
    SERVICES,
    SVC,
    SVL,
    last_octet,
    part_chain,
)
from steersman.netfilter.names import FILTER, NAT, WHOLE, RuleKey, chain_hash, printed_name


class Features(msgspec.Struct, frozen=True):
    """What this machine's iptables and kernel can do, as far as it shows in rules."""

    random_fully: bool = True
    """MASQUERADE --random-fully (iptables >= 1.6.2)."""
    nfacct: bool = False
    """The counters of `-m nfacct` exist in the kernel."""
    tcp_liberal: bool = False
    """nf_conntrack_tcp_be_liberal was on at start: then INVALID packets are not dropped."""


_LOWER = {protocol: protocol.lower() for protocol in Protocol}
_BITS = {Family.IPV4: "/32", Family.IPV6: "/128"}
_REFUSE = {
    (Family.IPV4, Verdict.REJECT): ("no endpoints", "REJECT --reject-with icmp-port-unreachable"),
    (Family.IPV6, Verdict.REJECT): ("no endpoints", "REJECT --reject-with icmp6-port-unreachable"),
    (Family.IPV4, Verdict.DROP): ("no local endpoints", "DROP"),
    (Family.IPV6, Verdict.DROP): ("no local endpoints", "DROP"),
}
_PLACES = {prefix[5:8]: place for place, prefix in enumerate(SERVICE_PREFIXES)}
_WORDS = {
    FrontendKind.CLUSTER_IP: "cluster IP",
    FrontendKind.EXTERNAL_IP: "external IP",
    FrontendKind.LOAD_BALANCER_IP: "loadbalancer IP",
}


@lru_cache(maxsize=64)
def local_source(detector: LocalDetector, negate: bool = False) -> tuple[str, str]:
    """Matches of traffic of local pods, or of all other: what goes before `-d`, and after it."""
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
    that it leads to, so that a large Diff can be cut anywhere (script.py). All keys hold the
    ServicePort's name: hashed in the chain, or as the part.
    """
    return _Port(plan, settings, features).render()


class _Shared:
    """What is written of one ServicePort, and its rules in chains that it shares with others."""

    __slots__ = (
        "bits",
        "chains",
        "features",
        "groups",
        "hash",
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
        self.pools: set[Pool] = set()  # those that some rule leads to
        self.chains: dict[str, str] = {}
        self.groups: dict[tuple[str, str], list[str]] = {}

    def _rule(self, table: str, chain: str, text: str) -> None:
        self.groups.setdefault((table, chain), []).append(f"-A {chain}{text}")

    def _to(self, frontend: Frontend, comment: str, target: str) -> str:
        """Match everything to an address and port."""
        return (
            f" -d {frontend.address}{self.bits} -p {self.protocol}"
            f' -m comment --comment "{self.name} {comment}"'
            f" -m {self.protocol} --dport {frontend.port} -j {target}"
        )

    def _dispatch(self, frontend: Frontend, target: str) -> None:
        split = self.settings.split_dispatch
        chain = part_chain(last_octet(frontend.address)) if split else SERVICES
        self._rule(NAT, chain, self._to(frontend, _WORDS[frontend.kind], target))

    def _refuse(self, frontend: Frontend, chain: str, verdict: Verdict) -> None:
        why, target = _REFUSE[self.plan.key.family, verdict]
        self._rule(FILTER, chain, self._to(frontend, f"has {why}", target))


class _Port(_Shared):
    """The rules of one ServicePort while they are written."""

    __slots__ = ()

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
        self._endpoint_lists()
        return self._ruleset()

    def _ruleset(self) -> dict[RuleKey, str]:
        family = int(self.plan.key.family)
        out: dict[RuleKey, str] = {}
        for chain in sorted(self.chains, key=_place):
            out[family, NAT, chain, WHOLE] = self.chains[chain]
        for (table, chain), lines in self.groups.items():
            # a health check is TCP whatever the ServicePort is, and parse.py sees only the rule
            protocol = "tcp" if table == FILTER and chain == NODE_PORTS else self.protocol
            out[family, table, chain, f"{self.name} {protocol}"] = "\n".join(lines)
        return out

    # Frontends

    def _cluster_ip(self, frontend: Frontend) -> None:
        action = frontend.external
        if action.verdict is not Verdict.FORWARD:
            self._refuse(frontend, SERVICES, action.verdict)
            return
        chain = self._pool_chain(action.pool)
        self._dispatch(frontend, chain)
        if not action.masquerade:
            return
        before = after = ""
        detector = self.settings.family(self.plan.key.family).detector
        if detector and not frontend.pod.masquerade:
            before, after = local_source(detector, negate=True)
        self.chains[chain] = (
            f"-A {chain}{before} -d {frontend.address}{self.bits}{after} -p {self.protocol}"
            f' -m comment --comment "{self.name} cluster IP"'
            f" -m {self.protocol} --dport {frontend.port} -j {MARK_MASQ}"
        )

    def _external_address(self, frontend: Frontend) -> None:
        if _forwards(frontend):
            target = self._external_chain(frontend)
            if frontend.source_ranges:
                target = self._firewall_chain(frontend, target)
            self._dispatch(frontend, target)
        if frontend.external.verdict is not Verdict.FORWARD:
            self._refuse(frontend, EXTERNAL_SERVICES, frontend.external.verdict)

    def _node_port(self, frontend: Frontend) -> None:
        family, protocol = self.plan.key.family, self.protocol
        port = f"-m {protocol} --dport {frontend.port}"
        if _forwards(frontend):
            rest = f' -p {protocol} -m comment --comment "{self.name}" {port}'
            target = self._external_chain(frontend)
            counted = family is Family.IPV4 and self.settings.ipv4.localhost_node_ports
            if counted and self.features.nfacct:
                counter = f"-m nfacct --nfacct-name  {LOCALHOST_ACCEPTED}"
                self._rule(NAT, NODE_PORTS, f" -d 127.0.0.0/8{rest} {counter} -j {target}")
            self._rule(NAT, NODE_PORTS, f"{rest} -j {target}")
        verdict = frontend.external.verdict
        if verdict is not Verdict.FORWARD:
            why, target = _REFUSE[family, verdict]
            comment = f'-m comment --comment "{self.name} has {why}" -m addrtype --dst-type LOCAL'
            self._rule(FILTER, EXTERNAL_SERVICES, f" -p {protocol} {comment} {port} -j {target}")

    # Chains

    def _pool_chain(self, pool: Pool) -> str:
        self.pools.add(pool)
        return (SVC if pool is Pool.CLUSTER else SVL) + self.hash

    def _external_chain(self, frontend: Frontend) -> str:
        """Write KUBE-EXT once; all external Frontends of a ServicePort have the same Actions."""
        chain = EXT + self.hash
        if chain in self.chains:
            return chain
        pod, node, external = frontend.pod, frontend.node, frontend.external
        lines: list[str] = []
        if pod == node == external:
            if external.masquerade:
                comment = f"masquerade traffic for {self.name} external destinations"
                lines.append(f'-A {chain} -m comment --comment "{comment}" -j {MARK_MASQ}')
        else:
            lines += self._short_circuits(chain, pod, node)
        if external.verdict is Verdict.FORWARD:
            lines.append(f"-A {chain} -j {self._pool_chain(external.pool)}")
        self.chains[chain] = "\n".join(lines)
        return chain

    def _short_circuits(self, chain: str, pod: Action, node: Action) -> list[str]:
        """Send pods and this node where they go, before all others."""
        lines: list[str] = []
        detector = self.settings.family(self.plan.key.family).detector
        what = f"for {self.name} external destinations"
        if detector and pod.verdict is Verdict.FORWARD:
            source = "".join(local_source(detector))
            comment = f'-m comment --comment "pod traffic {what}"'
            lines.append(f"-A {chain}{source} {comment} -j {self._pool_chain(pod.pool)}")
        if node.verdict is Verdict.FORWARD:
            for verb, target in (
                ("masquerade", MARK_MASQ if node.masquerade else ""),
                ("route", self._pool_chain(node.pool)),
            ):
                if target:
                    comment = f'-m comment --comment "{verb} LOCAL traffic {what}"'
                    rest = f"-m addrtype --src-type LOCAL -j {target}"
                    lines.append(f"-A {chain} {comment} {rest}")
        return lines

    def _firewall_chain(self, frontend: Frontend, target: str) -> str:
        """Write KUBE-FW once, and have what it does not accept dropped in the filter table."""
        chain = FW + self.hash
        if chain not in self.chains:
            comment = f'-m comment --comment "{self.name} loadbalancer IP"'
            lines = [f"-A {chain} -s {c} {comment} -j {target}" for c in frontend.source_ranges]
            rest = f"other traffic to {self.name} will be dropped by {PROXY_FIREWALL}"
            lines.append(f'-A {chain} -m comment --comment "{rest}"')
            self.chains[chain] = "\n".join(lines)
        self._rule(
            FILTER, PROXY_FIREWALL, self._to(frontend, f"traffic not accepted by {chain}", "DROP")
        )
        return chain

    def _endpoint_lists(self) -> None:
        """Write KUBE-SEP chains, and KUBE-SVC and KUBE-SVL as far as rules lead there."""
        plan, comments = self.plan, not self.settings.large_cluster
        writer = Endpoints(self.name, self.protocol, plan, comments)
        self.chains.update(writer.chains())
        for pool in self.pools:
            chain = (SVC if pool is Pool.CLUSTER else SVL) + self.hash
            lines = [self.chains[chain]] if chain in self.chains else []
            self.chains[chain] = "\n".join(lines + writer.choices(chain, plan.pool(pool)))


def _place(chain: str) -> int:
    return _PLACES[chain[5:8]]


def _forwards(frontend: Frontend) -> bool:
    return any(
        action.verdict is Verdict.FORWARD
        for action in (frontend.pod, frontend.node, frontend.external)
    )
