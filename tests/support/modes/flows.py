"""One question asked three ways: what becomes of a packet, by trace, by rules, by real packets.

Every way gives an Answer, and every Answer is compared with the same Expected: so the ways can
disagree neither with each other nor with the case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from steersman.compile.trace import Flow, trace
from steersman.model.addresses import canonical_ip, split_host_port
from steersman.model.names import Family, Protocol
from steersman.model.plan import NodePlan, Traits
from tests.support.lab.cluster import Lab
from tests.support.modes.iptables_rules import Packet, Rules

TRIES = 20
"""Probes per expected endpoint until each must have been seen: one in 10**8 is missed by chance."""
ENOUGH = 8
"""Probes per expected endpoint, and one more endpoint, that would show one too many: of 10,000
checks of rules with an endpoint too many one does not notice."""
PATIENCE = 60.0
"""Seconds for an answer that is expected: other tests run at the same time."""
DROP_TIMEOUT, DROP_TIMEOUT6 = 0.4, 1.5
"""Seconds without an answer that count as a drop, where one is expected. In a lab the first
ICMPv6 error reaches a TCP socket before it is ready for it, only the one after a second counts."""


@dataclass(frozen=True)
class FlowCase:
    """A connection and its expected result."""

    name: str
    source: str
    address: str
    port: int
    protocol: str
    """Kubernetes' spelling."""
    kind: str
    """forward, drop, reject or untouched."""
    endpoints: frozenset[str] = frozenset()
    masquerade: bool = False
    """Whether endpoints see an address of the node; one that calls itself always does."""
    interface: str = ""
    """The node's interface that it comes in by, where that matters."""
    sticky: bool = False
    """Whether repeated connections of one client must all reach the same endpoint."""

    @property
    def expected(self) -> Answer:
        """The Answer that is right."""
        return Answer(
            self.kind,
            frozenset(
                (name, self.masquerade or self.calls_itself(name)) for name in self.endpoints
            ),
        )

    def calls_itself(self, endpoint: str) -> bool:
        """Whether the client is that endpoint."""
        return split_host_port(endpoint)[0] == self.source

    def __str__(self) -> str:
        return f"{self.name} ({self.source} -> {self.address} port {self.port}/{self.protocol})"


def as_served(flow: FlowCase, traits: Traits) -> FlowCase:
    """A flow as modes of these traits serve it, where the question is of no particular mode."""
    if flow.protocol == "SCTP" and not traits.forwards_sctp:
        return replace(flow, kind="untouched", endpoints=frozenset(), masquerade=False)
    hidden = flow.kind == "forward" and traits.terminates_connections
    return replace(flow, masquerade=flow.masquerade or hidden)


@dataclass(frozen=True)
class Answer:
    """What becomes of a flow."""

    kind: str
    ends: frozenset[tuple[str, bool]] = frozenset()
    """For `forward`: endpoint, and whether the source is rewritten."""
    note: str = ""

    def __str__(self) -> str:
        if self.kind != "forward":
            return f"{self.kind} {self.note}".strip()
        ends = [f"{name}{' masqueraded' if masq else ''}" for name, masq in sorted(self.ends)]
        return f"forward to {', '.join(ends)} {self.note}".strip()


def compare(flow: FlowCase, answer: Answer) -> str:
    """The difference between the expected result and the observed one; "" for none."""
    if (answer.kind, answer.ends) == (flow.expected.kind, flow.expected.ends) and not answer.note:
        return ""
    return f"{flow}: expected {flow.expected}, got {answer}"


def by_trace(plan: NodePlan, flow: FlowCase) -> Answer:
    """Ask `steersman.compile.trace`."""
    protocol = Protocol(flow.protocol)
    decision = trace(plan, Flow(flow.source, flow.address, flow.port, protocol, flow.interface))
    if decision.verdict != "forward":
        return Answer({"accept": "untouched"}.get(decision.verdict, decision.verdict))
    names = [str(endpoint) for endpoint in decision.endpoints]
    return Answer(
        "forward",
        frozenset((name, decision.masquerade or flow.calls_itself(name)) for name in names),
    )


def by_rules(rules: dict[Family, Rules], flow: FlowCase) -> Answer:
    """Walk through rendered rules."""
    family = Family.IPV6 if ":" in flow.address else Family.IPV4
    packet = Packet(flow.source, flow.address, flow.port, flow.protocol.lower(), flow.interface)
    ends = rules[family].ends(packet)
    kinds = {
        ("forward" if end.endpoint else "untouched") if end.verdict == "accept" else end.verdict
        for end in ends
    }
    if len(kinds) != 1:
        return Answer("/".join(sorted(kinds)), note="(it depends)")
    (kind,) = kinds
    if kind == "untouched" and any(end.masquerade for end in ends):
        return Answer(kind, note="but masqueraded")
    forwarded = frozenset((end.endpoint, end.masquerade) for end in ends if end.endpoint)
    return Answer(kind, forwarded)


def by_packets(lab: Lab, flow: FlowCase) -> Answer:
    """Open connections until every expected endpoint was seen, and none other."""
    if flow.kind != "forward":
        patience = DROP_TIMEOUT6 if ":" in flow.address else DROP_TIMEOUT
        with lab.sentinel(flow.address, flow.port, flow.protocol):
            return _probe(lab, flow, patience if flow.kind == "drop" else PATIENCE)
    wanted = flow.expected.ends
    seen: set[tuple[str, bool]] = set()
    for count in range(max(TRIES, TRIES * len(wanted))):
        answer = _probe(lab, flow, PATIENCE)
        if answer.kind != "forward" or answer.note:
            return answer
        seen |= answer.ends
        if not seen <= wanted or (flow.sticky and len(seen) > 1):
            return Answer("forward", frozenset(seen), f"at connection {count + 1}")
        if flow.sticky and count == 12:
            return flow.expected
        if seen == wanted and not flow.sticky and count > ENOUGH * (len(wanted) + 1):
            break
    return Answer("forward", frozenset(seen))


KINDS = {"refused": "reject", "timeout": "drop", "unreachable": "unreachable"}


def _probe(lab: Lab, flow: FlowCase, timeout: float) -> Answer:
    outcome = lab.probe(flow.source, flow.address, flow.port, flow.protocol, timeout=timeout)
    if outcome.kind != "answered":
        return Answer(KINDS[outcome.kind], note=outcome.endpoint)
    source = canonical_ip(outcome.source) or ""
    if outcome.endpoint == "untouched":
        same = source == flow.source
        return Answer("untouched", note="" if same else f"but seen from {source}")
    masquerade = source in lab.node_addresses and (
        source != flow.source or flow.masquerade or flow.calls_itself(outcome.endpoint)
    )
    note = "" if masquerade or source == flow.source else f"seen from {source}"
    return Answer("forward", frozenset({(outcome.endpoint, masquerade)}), note)
