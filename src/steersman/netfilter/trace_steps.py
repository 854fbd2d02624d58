"""Put the events of a traced packet together: in order, with the rules they are about. Pure.

Events of nf_tables and of iptables-legacy arrive over two sockets. A packet passes the hooks in a
known order and each hook by priority, so that order merges them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from steersman.host.nlmsg import Message, attributes, string
from steersman.model.addresses import join_host_port
from steersman.model.tracing import STEERSMAN, TraceStep, WatchedFlow
from steersman.netfilter import nflog
from steersman.netfilter.names import BUILT_IN

# -- Who made a rule -------------------------------------------------------------------------------
#
# Guess who made a rule of netfilter, by the names of its table and chains.

ANOTHER = "another program"
"""Owner of a rule whose names say nothing."""

_PROGRAMS = (
    (re.compile(r"KUBE-(FIREWALL|KUBELET-CANARY|IPTABLES-HINT|MARK-DROP)$"), "kubelet"),
    (re.compile(r"KUBE-NWPLCY|KUBE-POD-FW|KUBE-ROUTER|KUBE-SRC-|KUBE-DST-"), "kube-router"),
    (re.compile(r"KUBE-|kube-proxy$|kube-proxy-"), "kube-proxy"),
    (re.compile(r"DOCKER|docker"), "Docker"),
    (re.compile(r"cali-|calico"), "Calico"),
    (re.compile(r"CILIUM_|OLD_CILIUM_"), "Cilium"),
    (re.compile(r"ANTREA-"), "Antrea"),
    (re.compile(r"FLANNEL-|flannel"), "Flannel"),
    (re.compile(r"WEAVE-"), "Weave Net"),
    (re.compile(r"CNI-|cni_"), "a CNI plugin"),
    (re.compile(r"NETAVARK"), "Podman"),
    (re.compile(r"ISTIO_"), "Istio"),
    (re.compile(r"LIBVIRT_|LIBVIRT-"), "libvirt"),
    (re.compile(r"ufw6?-"), "ufw"),
    (re.compile(r"firewalld$|(INPUT|FWD|IN|PRE|POST)_(ZONES|public|direct)"), "firewalld"),
    (re.compile(r"f2b-|fail2ban"), "fail2ban"),
    (re.compile(r"ts-(input|forward|postrouting)"), "Tailscale"),
    (re.compile(r"sshuttle-"), "sshuttle"),
    (re.compile(r"AWS-|ip-masq"), "the cloud's node agent"),
)
_JUMPS_TO = re.compile(r"(?:^|\s)(?:-j|-g|jump|goto)\s+(\S+)")


def owner_of(table: str, chain: str, rule: str, *, base: bool) -> str:
    """Return the name of the program that most likely made a rule.

    Args:
        table: its table, without the family.
        chain: its chain.
        rule: its text.
        base: whether the chain belongs to a hook, so that many programs write to it; the chain
            that the rule leads to then tells more.
    """
    target = _JUMPS_TO.search(rule)
    names = [target[1] if target else "", table] if base else [chain, table]
    for name in names:
        for pattern, program in _PROGRAMS:
            if pattern.match(name):
                return program
    return ANOTHER


# -- Events ----------------------------------------------------------------------------------------
#
# What netfilter reports about a traced packet: events of nftrace and of TRACE, as values.
#
# Both come from the bit `nf_trace` of a packet. nf_tables (iptables-nft included) sends a netlink
# message for each rule that matched and each chain that ended (linux/netfilter/nf_tables.h,
# NFTA_TRACE_*); iptables-legacy logs a line such as `TRACE: nat:KUBE-SERVICES:rule:3 `.

HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
"""Names of the hooks of IPv4 and IPv6, by their number in the kernel."""
FAMILY_NAMES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
"""nft's names of the families of tables, by NFPROTO_*."""
ICMP, ICMP6 = 1, 58
TRACE_MESSAGE = 10 << 8 | 17  # NFNL_SUBSYS_NFTABLES, NFT_MSG_TRACE

_KINDS: dict[int, Literal["rule", "return", "policy"]] = {3: "rule", 2: "return", 1: "policy"}
_VERDICTS = {0: "drop", 1: "accept", 2: "stolen", 3: "queue", -1: "continue", -2: "break"}
_JUMP, _GOTO, _RETURN = -3, -4, -5
_TABLE, _CHAIN, _HANDLE, _TYPE, _VERDICT, _ID = 1, 2, 3, 4, 5, 6  # NFTA_TRACE_*
_NETWORK, _TRANSPORT, _POLICY = 8, 9, 16
_PREFIX = re.compile(r"TRACE: (\S+):(\S+):(rule|return|policy):(\d+)")
_TCP_ANSWERS = {0x12: "SYN-ACK", 0x02: "SYN"}


class Headers(NamedTuple):
    """The addresses of a packet."""

    source: str
    source_port: int
    destination: str
    port: int
    protocol: int
    """IANA's number."""
    what: str = ""
    """`SYN`, `SYN-ACK`, `RST`, `ICMP type 3 code 3`, ...; "" for others."""


class TraceEvent(NamedTuple):
    """One rule that matched, or the end of a chain."""

    backend: Literal["nft", "legacy"]
    family: str
    """nft's name of the table's family; of legacy `ip` or `ip6`."""
    table: str
    chain: str
    kind: Literal["rule", "return", "policy"]
    number: int
    """Of a rule: its handle, or of legacy its place in the chain, from 1; else 0. (Linux 6.1
    also names some rule at the end of a chain.)"""
    verdict: str
    """As in `TraceStep.verdict`; "" of legacy, which does not say."""
    packet: int
    """The same for all events of a packet in one hook; 0 of legacy."""
    headers: Headers | None
    """In the first event of a hook, and in all of legacy."""
    hook: str = ""
    """Of legacy: the hook."""


def parse_nftrace(message: Message) -> TraceEvent | None:
    """Read a message of the group NFNLGRP_NFTRACE; None if it is none, or is malformed."""
    values = attributes(message.payload, 4)
    kind = _KINDS.get(_number(values, _TYPE))
    if message.kind != TRACE_MESSAGE or kind is None:
        return None
    if kind == "policy":
        verdict = _VERDICTS.get(_number(values, _POLICY), "drop")
    else:
        inner = attributes(values.get(_VERDICT, b""))
        # The upper half of a drop may hold an errno for the sender (NF_DROP_ERR).
        code = int.from_bytes(inner.get(1, b"\0"), "big", signed=True)
        target = string(inner.get(2, b""))
        named = {_JUMP: f"jump {target}", _GOTO: f"goto {target}", _RETURN: "return"}
        verdict = named.get(code) or _VERDICTS.get(code) or _VERDICTS.get(code & 0xFF, "drop")
    return TraceEvent(
        "nft",
        FAMILY_NAMES.get(message.payload[0], str(message.payload[0])),
        string(values.get(_TABLE, b"")),
        string(values.get(_CHAIN, b"")),
        kind,
        _number(values, _HANDLE) if kind == "rule" else 0,
        verdict,
        _number(values, _ID),
        parse_headers(values.get(_NETWORK, b""), values.get(_TRANSPORT, b"")),
    )


def parse_legacy(message: Message) -> TraceEvent | None:
    """Read a packet of nfnetlink_log; None if it is not of TRACE."""
    logged = nflog.read(message)
    prefix = _PREFIX.match(logged.prefix) if logged else None
    if logged is None or prefix is None:
        return None
    table, chain, kind, number = prefix.groups()
    packet, hook = logged.packet, logged.hook
    size = 40 if packet[:1] >= b"\x60" else (packet[0] & 15) * 4 if packet else 0
    return TraceEvent(
        "legacy",
        FAMILY_NAMES.get(message.payload[0], ""),
        table,
        chain,
        "rule" if kind == "rule" else "return" if kind == "return" else "policy",
        int(number) if kind == "rule" else 0,
        "",
        0,
        parse_headers(packet[:size], packet[size:]),
        HOOKS[hook] if hook < len(HOOKS) else "",
    )


def parse_headers(network: bytes, transport: bytes) -> Headers | None:
    """Read the headers of a packet of IPv4, or of IPv6 without extension headers."""
    if len(network) >= 40 and network[0] >> 4 == 6:
        protocol, source, destination = network[6], network[8:24], network[24:40]
    elif len(network) >= 20 and network[0] >> 4 == 4:
        protocol, source, destination = network[9], network[12:16], network[16:20]
    else:
        return None
    ports, what = (0, 0), ""
    if protocol in (ICMP, ICMP6):
        if len(transport) >= 2:
            what = f"ICMP type {transport[0]} code {transport[1]}"
    elif len(transport) >= 4:
        ports = struct.unpack_from("!HH", transport)
        if protocol == 6 and len(transport) >= 14:
            flags = transport[13]
            what = "RST" if flags & 4 else _TCP_ANSWERS.get(flags & 0x12, "")
    addresses = str(ip_address(source)), str(ip_address(destination))
    return Headers(addresses[0], ports[0], addresses[1], ports[1], protocol, what)


def _number(values: dict[int, bytes], kind: int) -> int:
    """Return a number in network byte order; 0 if it is missing."""
    return int.from_bytes(values.get(kind, b""), "big")


# -- The rules that they name ----------------------------------------------------------------------
#
# The texts of rules, by table, chain and number; what iptables-save and nft print.
#
# nf_tables numbers rules by handle, iptables-legacy by place. rule_reader.py reads them.

RuleId = tuple[str, str, str, str, int]
"""Backend, family, table, chain and number, as in a TraceEvent."""
_LEGACY_PRIORITIES = {"raw": -300, "mangle": -150, "nat": -100, "filter": 0, "security": 50}
_HANDLE_COMMENT = re.compile(r" # handle (\d+)$")


class BaseChain(NamedTuple):
    """Where a chain is called from."""

    hook: str
    priority: int


class RuleBook(msgspec.Struct, frozen=True):
    """The rules in the kernel, as far as they are known."""

    rules: Mapping[RuleId, str] = {}
    bases: Mapping[tuple[str, str, str], BaseChain] = {}
    """By family, table and chain of nf_tables."""
    policies: Mapping[tuple[str, str, str], str] = {}
    """By family, table and chain of iptables-legacy; "" for chains that others jump to."""

    def text(self, event: TraceEvent) -> str:
        """Return the text of an event's rule; "" at the end of a chain, or if it is not known."""
        if event.kind != "rule":
            return ""
        return self.rules.get(
            (event.backend, event.family, event.table, event.chain, event.number), ""
        )

    def base(self, event: TraceEvent) -> BaseChain | None:
        """Return where an event's chain is called from; None for a chain that others jump to."""
        if event.backend == "nft":
            return self.bases.get((event.family, event.table, event.chain))
        if event.chain not in BUILT_IN:
            return None
        return BaseChain(event.hook, _LEGACY_PRIORITIES.get(event.table, 0))


def parse_save(text: str) -> tuple[dict[tuple[str, str, int], str], dict[tuple[str, str], str]]:
    """Read iptables-save: rules by table, chain and place from 1; policies of all chains."""
    rules: dict[tuple[str, str, int], str] = {}
    policies: dict[tuple[str, str], str] = {}
    counts: dict[tuple[str, str], int] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":"):
            chain, policy, *_ = line[1:].split()
            policies[table, chain] = policy.lower().strip("-")
        elif line.startswith("-A "):
            chain = line.split(" ", 2)[1]
            counts[table, chain] = place = counts.get((table, chain), 0) + 1
            rules[table, chain, place] = line
    return rules, policies


def parse_nft(text: str) -> dict[tuple[str, int], str]:
    """Read `nft -a list table`: rules by chain and handle."""
    rules: dict[tuple[str, int], str] = {}
    chain, pending = "", ""
    for line in text.splitlines():
        words = line.split()
        if line.startswith("\tchain "):
            chain, pending = words[1].strip('"'), ""
        elif line.startswith("\t}"):
            chain = ""
        elif chain and words and not (words[0] == "type" and "hook" in words):
            # A long rule takes several lines; the last one has the handle.
            pending = f"{pending} {line.strip()}".lstrip()
            if handle := _HANDLE_COMMENT.search(pending):
                rules[chain, int(handle[1])] = pending[: handle.start()]
                pending = ""
    return rules


# -- Steps -----------------------------------------------------------------------------------------

Owns = Callable[[str, str], bool]
"""Whether a chain is ours: by family and table (`ip nat`), and chain."""
_FROM_OUTSIDE = ("prerouting", "input", "forward", "output", "postrouting")
_FROM_INSIDE = ("output", "postrouting", "prerouting", "input", "forward")
_TARGET = re.compile(r" -([jg]) (\S+)")
_FINAL = {"ACCEPT", "DNAT", "SNAT", "MASQUERADE", "REDIRECT", "NETMAP", "TPROXY"}
_REJECTS = re.compile(r"(^|\s)(reject\b|-j REJECT\b)")
_CHANGES_DESTINATION = re.compile(r"(^|\s)(-j (DNAT|REDIRECT|NETMAP)|(dnat|redirect)( |$))")
_CHANGES_SOURCE = re.compile(r"(^|\s)(-j (SNAT|MASQUERADE|NETMAP)|(snat|masquerade)( |$))")


class _Item(NamedTuple):
    """A step with its place."""

    step: TraceStep
    priority: int
    headers: Headers | None


def first_headers(events: Iterable[TraceEvent], table: str, prefix: str) -> Headers | None:
    """Return the headers of the first packet that was marked; None if none was yet.

    Args:
        events: as they arrived.
        table: our table that marks packets.
        prefix: of its chains that mark the first packet.
    """
    for event in events:
        marks = event.table == table and event.kind == "rule" and event.number
        if marks and event.chain.startswith(prefix) and event.headers:
            return event.headers
    return None


def to_steps(
    events: Sequence[TraceEvent],
    book: RuleBook,
    flow: WatchedFlow,
    *,
    table: str,
    reply_prefix: str,
    owns: Owns,
    to_endpoint: bool = True,
) -> tuple[TraceStep, ...]:
    """Return the steps of the packet, and then those of the first answer.

    Args:
        events: as they arrived, those of each backend in order.
        book: the rules.
        flow: the packet's.
        table: our table that marks packets; it is left out.
        reply_prefix: prefix of its chains that mark answers.
        owns: which chains are ours.
        to_endpoint: whether the rule that changes the destination chooses the endpoint.
    """
    marked = {
        event.packet
        for event in events
        if event.table == table
        and event.chain.startswith(reply_prefix)
        and event.kind == "rule"
        and event.number
    }
    clients = {(flow.source, flow.source_port)}
    for event in events:  # before conntrack translates it, an answer goes to a masquerading node
        if event.packet in marked and event.headers:
            clients.add((event.headers.destination, event.headers.port))
    directions: dict[int, Literal["original", "reply"]] = {}
    bases: dict[int, BaseChain] = {}
    kept: dict[int, Headers | None] = {}
    ways: dict[str, list[_Item]] = {"original": [], "reply": []}
    for event in events:
        # Which of the two packets? Legacy has no number of the packet, but always its headers.
        headers = event.headers
        direction = directions.get(event.packet) if event.packet else None
        if direction is None:
            answer = event.packet in marked or (
                headers is not None
                and (
                    headers.protocol in (ICMP, ICMP6)  # an error
                    or (headers.destination, headers.port) in clients
                )
            )
            direction = "reply" if answer else "original"
            directions[event.packet] = direction
            if headers and not answer:
                clients.add((headers.source, headers.source_port))
        # A chain that others jump to belongs to the hook of the last base chain.
        base = book.base(event)
        if base:
            bases[event.packet] = base
        elif event.backend == "legacy":
            before = ways[direction]
            base = BaseChain(event.hook, before[-1].priority if before else 0)
        else:
            base = bases.get(event.packet, BaseChain("", 0))
        if event.backend == "nft" and event.kind == "rule" and not event.number:
            # The end of a chain, once more; but it may have the headers of the hook.
            kept[event.packet] = headers
            continue
        headers = headers or kept.pop(event.packet, None)
        step = _step(event, book, base, direction, owns)
        ways[direction].append(_Item(step, base.priority, headers))
    if len({event.backend for event in events}) > 1:
        # Put the steps of both backends in the order in which a packet meets them.
        for items in filter(None, ways.values()):
            inside = items[0].step.hook == "output"
            rank = {h: n for n, h in enumerate(_FROM_INSIDE if inside else _FROM_OUTSIDE)}
            items.sort(key=lambda item: (rank.get(item.step.hook, 9), item.priority))
    merged = [_with_translations(items, to_endpoint) for items in ways.values()]
    return tuple(step for steps in merged for step in steps if step.table != f"inet {table}")


def _step(
    event: TraceEvent,
    book: RuleBook,
    base: BaseChain,
    direction: Literal["original", "reply"],
    owns: Owns,
) -> TraceStep:
    rule = book.text(event)
    name = f"{event.family} {event.table}"
    if event.backend == "legacy":
        name += " (legacy)"
    is_base = book.base(event) is not None
    if owns(f"{event.family} {event.table}", event.chain):
        owner = STEERSMAN
    else:
        owner = owner_of(event.table, event.chain, rule, base=is_base)
        targets = [event.verdict.partition(" ")[2], *(found[1] for found in _TARGET.findall(rule))]
        if is_base and any(owns(f"{event.family} {event.table}", name) for name in targets):
            owner = STEERSMAN  # our jump in a chain of all programs
    return TraceStep(
        hook=base.hook,
        chain=event.chain,
        rule=rule,
        verdict=_verdict(event, book, rule),
        table=name,
        handle=event.number,
        owner=owner if event.kind == "rule" or owner == STEERSMAN else ANOTHER,
        note="" if rule or event.kind != "rule" else "the text of this rule cannot be read",
        direction=direction,
    )


def _verdict(event: TraceEvent, book: RuleBook, rule: str) -> str:
    """Return the verdict as in `TraceStep.verdict`; that of legacy follows from the rule."""
    if event.kind == "return":
        return "return"
    if event.verdict:
        return "reject" if event.verdict == "drop" and _REJECTS.search(rule) else event.verdict
    if event.kind == "policy":
        return book.policies.get((event.family, event.table, event.chain), "accept")
    found = _TARGET.search(rule)
    if not found:
        return "continue"
    kind, target = found.groups()
    if target in ("DROP", "REJECT", "RETURN"):
        return target.lower()
    if target in _FINAL:
        return "accept"
    # Other names than those of chains are targets that let the packet go on, such as MARK.
    if (event.family, event.table, target) not in book.policies:
        return "continue"
    return f"{'jump' if kind == 'j' else 'goto'} {target}"


def _with_translations(items: list[_Item], to_endpoint: bool) -> list[TraceStep]:
    """Note a change of the packet's addresses at the rule before it that made it.

    Conntrack translates answers back without any rule.
    """
    steps: list[TraceStep] = []
    known: Headers | None = None
    for item in items:
        now = item.headers
        if now and known and item.step.direction == "original":
            if (now.destination, now.port) != (known.destination, known.port):
                where = join_host_port(now.destination, now.port)
                place = _note(steps, _CHANGES_DESTINATION, f"the destination is now {where}")
                if to_endpoint:
                    steps[place] = replace(steps[place], endpoint=where)
            if (now.source, now.source_port) != (known.source, known.source_port):
                where = join_host_port(now.source, now.source_port)
                _note(steps, _CHANGES_SOURCE, f"the source is now {where}")
        known = now or known
        steps.append(item.step)
    return steps


def _note(steps: list[TraceStep], kind: re.Pattern[str], change: str) -> int:
    """Note a change at the last rule of its kind, or else at the last step; return its place."""
    found = [place for place, step in enumerate(steps) if kind.search(step.rule)]
    place = found[-1] if found else len(steps) - 1
    note = ", ".join(filter(None, (steps[place].note, change)))
    steps[place] = replace(steps[place], note=note)
    return place
