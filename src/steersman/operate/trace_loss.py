"""Say where a packet or its answer was lost, of the places where it was seen. Pure.

A packet that the kernel drops is reported with a reason. One that vanishes was seen somewhere last:
what routing, neighbours and filters say there (Surroundings) tells why it went no further.
"""

from __future__ import annotations

from collections.abc import Sequence

from steersman.model.addresses import join_host_port
from steersman.model.plan import Value
from steersman.model.tracing import DROP_REASONS, Sighting

NETFILTER = "NETFILTER_DROP"
_NO_REASON = ("", "NOT_SPECIFIED", "NO_SOCKET")
"""Reasons of packets that are not lost on their way: used up, or refused by their receiver."""
_NO_ROUTE = ("IP_INNOROUTES", "IP_OUTNOROUTES", "IP_INADDRERRORS", "IPV6_NOROUTES")
TC_SIDES = {"TC_INGRESS": "ingress", "TC_EGRESS": "egress"}
_NEIGHBOUR = (
    "NEIGH_FAILED",
    "NEIGH_CREATEFAIL",
    "NEIGH_QUEUEFULL",
    "NEIGH_DEAD",
    "NEIGH_HH_FILLFAIL",
)
_TOO_BIG = ("PKT_TOO_BIG", "FRAG_TOO_FAR")


class Hop(Value, frozen=True):
    """Where a look-up of a route leads."""

    address: str = ""
    """That was looked up."""
    device: str = ""
    gateway: str = ""
    """"" if the address is reached directly."""
    mtu: int = 0
    """Of the route itself; 0 if it has none."""
    local: bool = False
    """The namespace itself has the address."""
    rule: str = ""
    """The policy rule that chose the table, or refuses; "" for the tables main and local."""
    trouble: str = ""
    """The kernel's reason if it has no route."""

    def __str__(self) -> str:
        if self.trouble:
            return self.trouble
        return f"{self.device} via {self.gateway}" if self.gateway else self.device


class Surroundings(Value, frozen=True):
    """What the namespace where a packet was seen last does with it."""

    place: str
    """For people, such as `this node`."""
    enter: str = ""
    """Beginning of a command that runs there, such as `nsenter --net=/run/netns/x `."""
    to: Hop = Hop()
    """The way on, with the packet's mark, source and device."""
    back: Hop = Hop()
    """The way back to its source."""
    neighbour: str = ""
    """State of the next hop if it does not answer: `FAILED`, `INCOMPLETE`."""
    rp_filter: str = ""
    """The sysctl that is on, as `net.ipv4.conf.eth0.rp_filter=1`."""
    drops: tuple[str, ...] = ()
    """Rules of netfilter that may have dropped it: first of all those that no trace reports."""
    programs: tuple[str, ...] = ()
    """Filters and programs of tc at the device, or its queueing disciplines."""
    full: str = ""
    """Entries of the connection table if it is full."""
    holders: tuple[str, ...] = ()
    """Namespaces that have the endpoint's address."""


class Difference(Value, frozen=True):
    """One point in which the kernel did something else than the plan says, such as a loss."""

    code: str
    """Stays the same for a kind of difference, such as `foreign-drop` or `no-route`."""
    text: str
    shows: str = ""
    """The command that shows the object; "" if there is none."""
    evidence: tuple[str, ...] = ()
    """Lines that a tool prints about it."""
    step: int = 0
    """Number of the step of the trace, from 1; 0 if it is about none."""


def first_drop(sightings: Sequence[Sighting]) -> Sighting | None:
    """Return the first drop that has a reason; None if there is none."""
    drops = [each for each in sightings if each.kind == "dropped" and each.what != "an ICMP error"]
    return next((each for each in drops if each.reason not in _NO_REASON), None)


def last_place(sightings: Sequence[Sighting]) -> Sighting | None:
    """Return the place that explains a loss: of a drop, or the last of the answer or the packet."""
    seen = [each for each in sightings if each.kind != "dropped" and each.what != "an ICMP error"]
    answers = [each for each in seen if each.reply]
    return first_drop(sightings) or next(reversed(answers or seen), None)


def explain_drop(drop: Sighting, around: Surroundings) -> Difference:
    """Say who dropped a packet, for a drop with a reason."""
    what = "the answer was dropped" if drop.reply else "dropped"
    where = f"at {drop.device} of {around.place}" if drop.device else f"in {around.place}"
    if drop.reason == NETFILTER:
        if around.full:
            text = f"{what} {where}: the connection table is full ({around.full})"
            shows = "sysctl net.netfilter.nf_conntrack_count net.netfilter.nf_conntrack_max"
            return Difference("conntrack-full", text, around.enter + shows)
        if around.drops:
            text = f"{what} {where} by {around.drops[0]}"
            if len(around.drops) > 1:
                text = f"{what} {where} by a rule of netfilter, likely {around.drops[0]}"
            shows = f"{around.enter}nft -a list ruleset"
            return Difference("foreign-drop", text, shows, around.drops[1:])
        if found := _no_route(around, what):  # netfilter drops what it cannot route again
            return found
        text = f"{what} {where} by a rule of netfilter that no trace reports"
        return Difference("foreign-drop", text, f"{around.enter}nft list ruleset")
    if side := TC_SIDES.get(drop.reason):
        text = (
            f"{what} by a filter or program of tc at the {side} of {drop.device} of {around.place}"
        )
        shows = f"{around.enter}tc filter show dev {drop.device} {side}"
        shows += f"; {around.enter}bpftool net show dev {drop.device}"
        return Difference("device-program", text, shows, around.programs)
    if drop.reason == "QDISC_DROP":
        if around.programs and around.programs[0].startswith("qdisc noqueue"):
            text = (
                f"{what} {where}, which has no carrier: it or the device at its other end is down"
            )
            return Difference("no-carrier", text, f"{around.enter}ip link show dev {drop.device}")
        text = f"{what} by the queueing discipline (qdisc) of {drop.device} of {around.place}"
        shows = f"{around.enter}tc -s qdisc show dev {drop.device}"
        return Difference("device-queue", text, shows, around.programs)
    if drop.reason == "XDP":
        text = f"{what} by the XDP program of {drop.device} of {around.place}"
        return Difference("device-program", text, f"{around.enter}ip link show dev {drop.device}")
    if drop.reason == "IP_RPFILTER":
        text = (
            f"{what} {where} by rp_filter ({around.rp_filter or 'net.ipv4.conf.*.rp_filter'}): the"
            f" way back to {drop.source} is {around.back}, not {drop.device}"
        )
        return Difference("rp-filter", text, f"{around.enter}ip route get {drop.source}")
    if drop.reason in _NO_ROUTE and (found := _no_route(around, what)):
        return found
    if drop.reason in _NEIGHBOUR:
        return _neighbour(around, what)
    return _by_kernel(drop, f"{what} {where}", around)


def _by_kernel(drop: Sighting, dropped: str, around: Surroundings) -> Difference:
    """Return a drop with the kernel's own reason in words."""
    words = DROP_REASONS.get(drop.reason, "")
    if drop.reason == "IP_INHDR" and drop.function in ("ip_forward", "ip6_forward"):
        words = "its TTL (hop limit) has run out"
    reason = f"{drop.reason}, in {drop.function}" if drop.function else drop.reason
    text = f"{dropped} by the kernel ({reason})" + (f": {words}" if words else "")
    if drop.reason == "XFRM_POLICY":
        return Difference("ipsec", text, f"{around.enter}ip xfrm policy")
    code = "too-big" if drop.reason in _TOO_BIG else "kernel-drop"
    return Difference(code, text, f"{around.enter}ip -s link show" if drop.device else "")


def explain_silence(
    last: Sighting, around: Surroundings, asked: tuple[str, int], client: int
) -> Difference:
    """Say where a packet or its answer vanished, if the kernel reported no drop.

    Args:
        last: where it was seen last.
        around: the look-ups there.
        asked: the address and port that the client named.
        client: inode of the client's namespace.
    """
    it = "the answer" if last.reply else "the packet"
    at = f"{last.device} of {around.place}" if last.device else around.place
    if last.reply and last.netns == client and last.kind == "received":
        if (last.source, last.source_port) == asked:
            return Difference("not-taken", f"the answer reached {at}, but not the client's socket")
        text = (
            f"the answer reached {at} from {join_host_port(last.source, last.source_port)} instead"
            f" of {join_host_port(*asked)}: it did not come back through the connection table of"
            " the node that translated the packet"
        )
        return Difference("answer-untranslated", text, f"{around.enter}tcpdump -ni {last.device}")
    if found := _no_route(around, it):
        return found
    if around.to.local and last.kind == "received":
        arrived = f"{it} arrived at {at}"
        if around.back.trouble:
            text = f"{arrived}, which has no route back to {last.source}: {around.back.trouble}"
            return Difference("no-route", text, f"{around.enter}ip route get {last.source}")
        if around.neighbour:
            return _neighbour(around, f"{arrived}, and the answer is not sent")
        return Difference(
            "not-answered", f"{arrived}, and nothing there answers", f"{around.enter}ss -ltn"
        )
    if last.kind == "received" and around.neighbour:
        return _neighbour(around, f"{it} is not sent")
    if last.kind == "received":
        text = f"{it} was received by {at} and not sent on, to {around.to}"
        return Difference("not-forwarded", text, f"{around.enter}ip -s link show dev {last.device}")
    text = f"{it} left {around.place} by {last.device}, and nothing came back"
    if around.to.rule:
        text += f"; the policy rule {around.to.rule!r} chose this way"
        return Difference("policy-rule", text, f"{around.enter}ip rule")
    return Difference("left", text, f"{around.enter}ip route get {last.destination}")


def explain_unsent(around: Surroundings) -> Difference | None:
    """Say why the client could not send the packet; None if nothing tells."""
    if around.neighbour:
        return _neighbour(around, "the packet is not sent")
    if not around.to.trouble:
        return None
    text = f"{around.place} cannot send the packet: {around.to}"
    return Difference("no-route", text, f"{around.enter}ip route")


def other_source(sightings: Sequence[Sighting], endpoint: str) -> Difference | None:
    """Return that the answer comes from another address than the endpoint's; None if not so."""
    answers = [each for each in sightings if each.reply and each.what != "an ICMP error"]
    if not answers or not endpoint:
        return None
    source = join_host_port(answers[0].source, answers[0].source_port)
    if source == endpoint or answers[0].kind != "sent":
        return None
    text = f"the endpoint {endpoint} answers from {source}, by {answers[0].device}"
    return Difference("answer-source", text)


def shared_address(endpoint: str, around: Surroundings) -> Difference | None:
    """Return that several namespaces have the endpoint's address; None if one has it."""
    if len(around.holders) < 2:
        return None
    address = endpoint.rpartition(":")[0].strip("[]")
    names = " and ".join(around.holders)
    text = f"{address} is an address of {len(around.holders)} pods of this node: {names}"
    return Difference("shared-address", text, f"ip neigh show {address}; ip route get {address}")


def _no_route(around: Surroundings, it: str) -> Difference | None:
    if not around.to.trouble:
        return None
    text = f"{it} in {around.place}: no route to {around.to.address}: {around.to}"
    if not it.endswith("dropped"):
        text = f"{around.place} has no route for {it} to {around.to.address}: {around.to}"
    if around.to.rule:
        return Difference(
            "policy-rule",
            f"{text}, by the policy rule {around.to.rule!r}",
            f"{around.enter}ip rule",
        )
    return Difference("no-route", text, f"{around.enter}ip route get {around.to.address}")


def _neighbour(around: Surroundings, it: str) -> Difference:
    hop = around.back if around.to.local else around.to
    address = hop.gateway or hop.address
    text = (
        f"{it}: the next hop {address} on {hop.device} of {around.place} does not answer ARP or"
        f" neighbour discovery ({around.neighbour or 'FAILED'})"
    )
    return Difference("neighbour", text, f"{around.enter}ip neigh show {address}")
