"""Names that rules of several modes share, and the keys under which rules are kept. Pure."""

from __future__ import annotations

import re
from typing import TypeAlias

from steersman.model.hashes import sha256
from steersman.model.names import Family, ServicePortName

FILTER, NAT, MANGLE = "filter", "nat", "mangle"
REJECT = {
    Family.IPV4: "REJECT --reject-with icmp-port-unreachable",
    Family.IPV6: "REJECT --reject-with icmp6-port-unreachable",
}
"""The target that rejects packets, as iptables-save prints it."""
BUILT_IN = frozenset({"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"})
"""Chains that netfilter itself calls."""
PRIORITIES = {"raw": -300, "mangle": -150, "nat": -100, "filter": 0, "security": 50}
"""The tables of iptables: lower ones see a packet first."""

RuleKey: TypeAlias = tuple[int, str, str, str]
"""Family, table, chain and part of the chain. A plain tuple, because there are many."""

# The parts of a chain that every mode has; a mode may add its own.
WHOLE = ""
"""The chain itself, with its rules unless several owners share it."""
JUMPS = "jumps"
"""The rules of a built-in chain that lead to chains of the mode."""


def command_of(command: str, family: int) -> str:
    """Return the name of a command of iptables for a family, such as `ip6tables-nft`."""
    return command if family == Family.IPV4 else command.replace("ip", "ip6", 1)


_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_PAIRS = tuple(a + b for a in _BASE32 for b in _BASE32)
_LONGEST = 3 * 63 + 2  # namespace, name and port, each at most a DNS label
_SAFE = re.compile(r"[\w./:-]+", re.ASCII).fullmatch


def chain_hash(text: str, _pairs: tuple[str, ...] = _PAIRS) -> str:
    """Return 16 characters of base32 of the SHA-256, as in upstream's chain names (behaviour 8).

    They encode the first ten bytes. Ten bits at a time is three times as fast as base64.b32encode.
    """
    n = int.from_bytes(sha256(text.encode()).digest()[:10], "big")
    return (
        _pairs[n >> 70]
        + _pairs[n >> 60 & 1023]
        + _pairs[n >> 50 & 1023]
        + _pairs[n >> 40 & 1023]
        + _pairs[n >> 30 & 1023]
        + _pairs[n >> 20 & 1023]
        + _pairs[n >> 10 & 1023]
        + _pairs[n & 1023]
    )


def printed_name(name: ServicePortName) -> str:
    """Return the name of a ServicePort as comments and hashes contain it (behaviour 3).

    Kubernetes allows only letters, digits, `-` and `.` in names, but a manifest may hold anything.
    Nothing in a name may end a quotation or a line, so other bytes become %XX. iptables cuts
    comments at 255 bytes, so a name that is longer than Kubernetes allows ends in a hash.
    """
    text = str(name)
    if not _SAFE(text):
        text = "".join(
            c if _SAFE(c) else "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "replace"))
            for c in text
        )
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 17]}/{chain_hash(text)}"
    return text
