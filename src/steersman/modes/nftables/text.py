"""A Ruleset of this mode as nft commands: for scripts, for goldens, and for `nft -f -`. Pure.

A table that is not as this version made it (upstream's has the same name) is replaced in one
transaction of nft that holds the skeleton and all elements (`loadable`). nft 1.0.6 cannot write the
chains of session affinity and of source ranges as we need them; for the milliseconds until netlink
has put them in, simpler elements and rules stand in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steersman.model.names import Family
from steersman.model.ruleset import Ruleset
from steersman.modes.nftables.layout import (
    DROP,
    REJECT,
    SETS,
    TABLE,
    Form,
    Kind,
    family_number,
    family_of,
    is_local,
    kind_of,
    name_of,
    named,
    printed_fields,
    split_element,
    unpack_address,
    unpack_endpoint,
    without_locality,
)
from steersman.modes.nftables.rules import FIREWALL, FIREWALL_BASES, FIREWALL_CHECK
from steersman.modes.nftables.skeleton import HEADER

_PROTOCOL = {Family.IPV4: "ip protocol", Family.IPV6: "ip6 nexthdr"}
_HOOKS = {0: "prerouting", 3: "output"}
_NOUNS = {Kind.CHAIN: "chain", Kind.MEMBERS: "set"}


def ruleset_text(ruleset: Ruleset) -> str:
    """Return the commands that add everything, sorted by kind, family and key."""
    return "".join(f"{_command(key, ruleset[key])}\n" for key in sorted(ruleset))


def describe(keys: Iterable[bytes]) -> str:
    """Name objects in a few words, for error messages."""
    listed = list(keys)
    first = listed[0]
    if spec := SETS.get(kind_of(first)):
        what = f"element {' . '.join(printed_fields(first))} of {spec.name}"
    else:
        what = f"{Kind(kind_of(first)).name.lower()} {name_of(first)}".rstrip()
    more = f" and {len(listed) - 1} more" if len(listed) > 1 else ""
    return f"{what}{more} in table {_table_of(first)}"


def _table_of(key: bytes) -> str:
    """Return family and name of the table that an object is in."""
    return f"{HEADER[family_of(key)]} {TABLE}"


def _command(key: bytes, value: bytes) -> str:
    """Return the command that adds an object; what nft has no words for follows as a comment."""
    kind = Kind(kind_of(key))
    if kind in SETS:
        local = "  # local" if SETS[kind].form is Form.ENDPOINTS and is_local(value) else ""
        element = element_text(key, value)
        return f"add element {_table_of(key)} {SETS[kind].name} {{ {element} }}{local}"
    if kind is Kind.MEMBER:
        return f"add element {_table_of(key)} {name_of(key)} {{ {member_text(key)} }}"
    does = f"  # {value.decode()}" if value else ""
    return f"add {_NOUNS.get(kind, 'map')} {_table_of(key)} {name_of(key)}{does}"


def element_text(key: bytes, value: bytes) -> str:
    """Return an element of a fixed set as nft prints it."""
    element = " . ".join(printed_fields(key))
    match SETS[kind_of(key)].form:
        case Form.VERDICTS:
            chain, _, comment = value.partition(b"\0")
            verdict = chain.decode() if chain in (DROP, REJECT) else f"goto {chain.decode()}"
            return f"{element}{_comment(comment)} : {verdict}"
        case Form.ENDPOINTS:
            address, port = unpack_endpoint(value)
            return f"{element} : {address} . {port}"
        case Form.INTERVALS:
            return f"{element}-{unpack_address(value)}"
        case _:
            return element + _comment(value)


def member_text(key: bytes) -> str:
    """Return an element of a ServicePort's set of endpoints as nft prints it."""
    address, port = unpack_endpoint(split_element(key)[1])
    return f"{address} . {port}"


def _comment(comment: bytes) -> str:
    return f' comment "{comment.decode()}"' if comment else ""


# Replacing a table


def loadable(family: Family, new: Mapping[bytes, Any]) -> dict[bytes, bytes]:
    """Return the elements of one family that nft can load.

    They are without session affinity, and without the locality of endpoints. An element that goes
    to a ServicePort's own chain goes where that chain sends a client without an affinity entry.
    """
    loaded: dict[bytes, bytes] = {}
    number = int(family)
    for key, value in new.items():
        kind = kind_of(key)
        if kind not in SETS or family_number(key) != number:
            continue
        if kind in (Kind.AFFINITY_IPS, Kind.AFFINITY_NODEPORTS):
            continue
        loaded[key] = value
        match SETS[kind].form:
            case Form.ENDPOINTS:
                loaded[key] = without_locality(value)
            case Form.VERDICTS:
                chain, _, comment = value.partition(b"\0")
                if does := new.get(named(Kind.CHAIN, family, chain.decode())):
                    _, _, mark, _, lb = does.decode().split()
                    group = "np-" if lb.startswith("np-") else ""
                    marking = "" if mark == "-" else mark.removeprefix("mark-") + "-"
                    chain = f"{group}{marking}{lb.removeprefix(group)}".encode()
                    loaded[key] = chain + b"\0" + comment
    return loaded


def interim_firewall(family: Family, loaded: Mapping[bytes, bytes]) -> str:
    """Return rules that check source ranges until those of `rules.firewall_rules` are in.

    They are "" if no loaded load balancer IP has source ranges.
    """
    if not any(kind_of(k) == Kind.FIREWALL_IPS and family_number(k) == family for k in loaded):
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
