"""What netfilter reports about a traced packet: events of nftrace and of TRACE, as values. Pure.

Both come from the bit `nf_trace` of a packet. nf_tables (iptables-nft included) sends a netlink
message for each rule that matched and each chain that ended (linux/netfilter/nf_tables.h,
NFTA_TRACE_*); iptables-legacy logs a line such as `TRACE: nat:KUBE-SERVICES:rule:3 `.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from steersman.host.nlmsg import Message, attributes, string
from steersman.netfilter import nflog
from steersman.netfilter.nft.wire import FAMILY_NAMES, HEAD, HOOKS, SUBSYSTEM, TRACE

TRACE_MESSAGE = SUBSYSTEM | TRACE
"""The kind of message about a traced packet."""
FIRST, REPLY = "first-", "reply-"
"""Beginnings of the names of our chains that mark the first packet, and the first answer."""

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

    def marks(self, table: str, which: str) -> bool:
        """Whether our table has marked a packet here: FIRST or REPLY."""
        marking = self.table == table and self.chain.startswith(which)
        return marking and self.kind == "rule" and self.number > 0


def parse_nftrace(message: Message) -> TraceEvent | None:
    """Read a message of the group NFNLGRP_NFTRACE; None if it is none, or is malformed."""
    values = attributes(message.payload, HEAD.size)
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
    hook = logged.hook
    return TraceEvent(
        "legacy",
        FAMILY_NAMES.get(message.payload[0], ""),
        table,
        chain,
        "rule" if kind == "rule" else "return" if kind == "return" else "policy",
        int(number) if kind == "rule" else 0,
        "",
        0,
        parse_headers(logged.packet),
        HOOKS[hook] if hook < len(HOOKS) else "",
    )


def parse_headers(network: bytes, transport: bytes = b"") -> Headers | None:
    """Read the headers of a packet of IPv4, or of IPv6 without extension headers.

    Args:
        network: from the network header on.
        transport: from the transport header on, if that does not follow.
    """
    header = nflog.ip_header(network, transport)
    if header is None:
        return None
    what, behind = "", transport or network[header.size :]
    if header.protocol in (nflog.ICMP, nflog.ICMP6):
        if len(behind) >= 2:
            what = f"ICMP type {behind[0]} code {behind[1]}"
    elif header.protocol == 6 and len(behind) >= 14:
        flags = behind[13]
        what = "RST" if flags & 4 else _TCP_ANSWERS.get(flags & 0x12, "")
    return Headers(*header[:5], what)


def _number(values: dict[int, bytes], kind: int) -> int:
    """Return a number in network byte order; 0 if it is missing."""
    return int.from_bytes(values.get(kind, b""), "big")
