"""Replacing a table that is not ours: what goes into the one transaction that nft makes. Pure.

nft cannot write, in the same go, the chains of session affinity; for the milliseconds until they
are in, simpler elements stand in for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steersman.model.names import Family
from steersman.modes.nftables.expressions import FIREWALL, FIREWALL_BASES, FIREWALL_CHECK
from steersman.modes.nftables.layout import SETS, TABLE, Form, Kind, bare, named
from steersman.modes.nftables.skeleton import HEADER

_PROTOCOL = {Family.IPV4: "ip protocol", Family.IPV6: "ip6 nexthdr"}
_HOOKS = {0: "prerouting", 3: "output"}
_LEARNED = (Kind.AFFINITY_IPS, Kind.AFFINITY_NODEPORTS)


def loadable(family: Family, new: Mapping[bytes, Any]) -> dict[bytes, bytes]:
    """Elements of one family as nft can load them: no session affinity, no word of who is local."""
    return {
        key: _loadable(family, key, value, new)
        for key, value in new.items()
        if key[0] in SETS and key[1] == family and key[0] not in _LEARNED
    }


def _loadable(family: Family, key: bytes, value: bytes, new: Mapping[bytes, Any]) -> bytes:
    match SETS[key[0]].form:
        case Form.VERDICTS:
            return _plain(family, value, new)
        case Form.ENDPOINTS:
            return bare(value)
        case _:
            return value


def _plain(family: Family, value: bytes, new: Mapping[bytes, Any]) -> bytes:
    """Go where the ServicePort's own chain would go for a client that it does not know."""
    chain, _, comment = value.partition(b"\0")
    does = new.get(named(Kind.CHAIN, family, chain.decode()))
    if does is None:
        return value
    _, _, mark, _, draw = does.decode().split()
    space = "np-" if draw.startswith("np-") else ""
    marking = "" if mark == "-" else mark.removeprefix("mark-") + "-"
    return f"{space}{marking}{draw.removeprefix(space)}".encode() + b"\0" + comment


def guarded_meanwhile(family: Family, loaded: Mapping[bytes, bytes]) -> str:
    """Rules for load balancer IPs with source ranges, where there are some (see firewall_rules)."""
    if not any(key[0] == Kind.FIREWALL_IPS and key[1] == family for key in loaded):
        return ""
    header = HEADER[family]
    service = f"{header} daddr . {_PROTOCOL[family]} . th dport"
    rules = (
        f"{FIREWALL} {service} . {header} saddr @firewall-allowed return",
        f"{FIREWALL} drop",
        f"{FIREWALL_CHECK} {service} @firewall-ips goto {FIREWALL}",
    )
    lines = [f"rule {header} {TABLE} {rule}" for rule in rules]
    for base in FIREWALL_BASES:
        where = f"type {base.kind} hook {_HOOKS[base.hook]} priority {base.priority}"
        lines += [
            f"chain {header} {TABLE} {base.name} {{ {where} ; }}",
            f"rule {header} {TABLE} {base.name} ct state new jump {FIREWALL_CHECK}",
        ]
    return "".join(f"add {line}\n" for line in lines)
