"""Parse what lists kernel objects: `ipset save`, iptables-save, and /proc/net/ip_vs. Pure."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from steersman.model.addresses import join_host_port
from steersman.model.connections import ConnectionState, OpenConnection
from steersman.model.conntrack import pack_socket
from steersman.model.hashes import blake2b
from steersman.model.names import Protocol
from steersman.modes.ipvs.objects import CHAINS, OUR_SETS, MemberKey, ServerKey, SetKey, Target
from steersman.netfilter.iptables.names import BUILT_IN, JUMPS, WHOLE, RuleKey
from steersman.netfilter.iptables.saved import canonical, chains

_NUMBERS = {protocol.lower(): str(protocol.number) for protocol in Protocol}
_CREATE = 4  # words: create, name, type, family, ...
_CONNECTIONS = re.compile(r" +\d+ +\d+ *$", re.MULTILINE)
_DRAINED = re.compile(r" 0 +0 +0 *$", re.MULTILINE)


_ANY_PORT = "0000"
_STATES: Mapping[str, ConnectionState] = {
    **dict.fromkeys(("SYN_SENT", "SYN_RECV", "SYNACK"), ConnectionState.OPENING),
    **dict.fromkeys(("INIT1", "INIT", "COOKIE_SENT", "COOKIE_REPLIED"), ConnectionState.OPENING),
    **dict.fromkeys(("COOKIE_WAIT", "COOKIE", "COOKIE_ECHOED"), ConnectionState.OPENING),
    **dict.fromkeys(("FIN_WAIT", "CLOSE_WAIT", "LAST_ACK"), ConnectionState.CLOSING),
    **dict.fromkeys(
        ("SHUTDOWN_SENT", "SHUTDOWN_RECEIVED", "SHUTDOWN_ACK_SENT"), ConnectionState.CLOSING
    ),
    **dict.fromkeys(("TIME_WAIT", "CLOSE", "CLOSED", "REJECTED"), ConnectionState.ENDED),
}
"""States of TCP and SCTP as the kernel prints them; all others carry packets."""


def parse_sets(text: str) -> Iterator[tuple[SetKey | MemberKey, str]]:
    """Parse the output of `ipset save`; foreign sets are skipped."""
    for line in text.splitlines():
        words = line.split()
        if len(words) < 3 or words[1] not in OUR_SETS:
            continue
        if words[0] == "create" and len(words) > _CREATE:
            yield SetKey(words[1]), " ".join(words[2:5])
        elif words[0] == "add":
            # Some versions print protocols by name: 10.96.0.1,tcp:80
            address, comma, rest = words[2].partition(",")
            name, _, port = rest.partition(":")
            entry = f"{address},{_NUMBERS.get(name, name)}:{port}" if comma else words[2]
            yield MemberKey(words[1], entry), ""


def parse_rules(text: str, family: int) -> dict[RuleKey, str]:
    """Parse the output of iptables-save: our chains, and our jumps in the built-in ones."""
    found: dict[RuleKey, str] = {}
    names = {chain for _, chain in CHAINS}
    for table, chain, _, lines in chains(text):
        if (table, chain) in CHAINS:
            found[family, table, chain, WHOLE] = "\n".join(canonical(r, family) for r in lines)
        elif chain in BUILT_IN:
            ours = [r for r in lines if r.rpartition(" -j ")[2].split(" ")[0] in names]
            if ours:
                found[family, table, chain, JUMPS] = "\n".join(canonical(r, family) for r in ours)
    return found


class RealServer(NamedTuple):
    """A real server as the kernel lists it."""

    target: Target
    weight: int
    active: int
    """Established connections."""
    inactive: int

    @property
    def is_drained(self) -> bool:
        """Whether it gets no new connections and has none."""
        return not (self.weight or self.active or self.inactive)


class Connection(NamedTuple):
    """A connection of a virtual server."""

    destination: bytes
    """Protocol number, address and port of the virtual server, packed."""
    found: OpenConnection


def parse_servers(text: str) -> dict[ServerKey, list[RealServer]]:
    """Parse /proc/net/ip_vs: real servers by virtual server; those with a fwmark are skipped."""
    # TCP  0A600001:0050 rr persistent 10800 FFFFFFFF
    #   -> 0AF40002:1F90      Masq    1      3          4
    # The last columns are weight, active and inactive connections.
    found: dict[ServerKey, list[RealServer]] = {}
    current: list[RealServer] | None = None
    for line in text.splitlines()[3:]:
        words = line.split()
        if words[0] == "->":
            if current is not None:
                numbers = map(int, words[3:6])
                current.append(RealServer(_target(words[1]), *numbers))
        elif words[0] in Protocol.__members__:
            current = found.setdefault(ServerKey(Protocol(words[0]), *_target(words[1])), [])
        else:
            current = None
    return found


def _target(text: str) -> Target:
    """Parse an address and a port, both in hexadecimal; IPv6 addresses are in brackets."""
    address, _, port = text.rpartition(":")
    if address.startswith("["):
        packed = socket.inet_pton(socket.AF_INET6, address.strip("[]"))
        return socket.inet_ntop(socket.AF_INET6, packed), int(port, 16)
    return socket.inet_ntop(socket.AF_INET, bytes.fromhex(address)), int(port, 16)


def parse_connection(line: str, limits: Mapping[tuple[str, str], int]) -> Connection | None:
    """Parse a line of /proc/net/ip_vs_conn; None for headings, and for the affinity of a client.

    Args:
        line: of the file.
        limits: seconds without a packet after which a connection ends, by protocol and state.
    """
    # Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires
    # TCP 0AF40102 B7E2 0A600001 0050 0AF40005 1F90 ESTABLISHED     893
    words = line.split()
    if words[0] not in Protocol.__members__ or words[2] == _ANY_PORT:
        return None
    protocol, state = words[0], words[7]
    ends = [f"{_packed_hex(words[n])}:{words[n + 1]}" for n in (1, 3, 5)]
    client, frontend, endpoint = (_target(text) for text in ends)
    limit = limits.get((protocol, state))
    found = OpenConnection(
        endpoint=join_host_port(*endpoint),
        client=join_host_port(*client),
        frontend=join_host_port(*frontend),
        protocol=protocol,
        state=_STATES.get(state, ConnectionState.OPEN),
        idle=None if limit is None else float(max(0, limit - int(words[8]))),
    )
    return Connection(bytes((Protocol(protocol).number,)) + pack_socket(*frontend), found)


def _packed_hex(address: str) -> str:
    """Put an IPv6 address into brackets, as the other list has it."""
    return f"[{address}]" if ":" in address else address


def has_drained(text: str, is_ours: Callable[[ServerKey], bool]) -> bool:
    """Return whether /proc/net/ip_vs lists a drained real server of ours, for `read` to delete."""
    return bool(_DRAINED.search(text)) and any(  # the search is cheap, and nearly always enough
        is_ours(key) and any(real.is_drained for real in group)
        for key, group in parse_servers(text).items()
    )


def digest_servers(text: str) -> bytes:
    """Return a digest of /proc/net/ip_vs without its counts of connections."""
    return blake2b(_CONNECTIONS.sub("", text).encode(), digest_size=16).digest()
