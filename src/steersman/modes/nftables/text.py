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
    ENDPOINT_KINDS,
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
from steersman.modes.nftables.skeleton import HEADER, table_name

_PROTOCOL = {Family.IPV4: "ip protocol", Family.IPV6: "ip6 nexthdr"}
_HOOKS = {0: "prerouting", 3: "output"}
NOUNS = {Kind.CHAIN: "chain", Kind.LAZY: "chain", Kind.MEMBERS: "set", Kind.AFFINITY: "map"}
"""What nft calls objects with a name."""


def ruleset_text(ruleset: Ruleset) -> str:
    """Return the commands that add everything, sorted by kind, family and key."""
    return "".join(f"{_command(key, ruleset[key])}\n" for key in sorted(ruleset))


def describe(keys: Iterable[bytes]) -> str:
    """Name objects in a few words, for error messages."""
    listed = list(keys)
    first = listed[0]
    kind = Kind(kind_of(first))
    if kind in SETS:
        what = f"element {_fields_text(first)} of {set_name(first)}"
    else:
        what = f"{kind.name.lower()} {name_of(first)}".rstrip()
    more = f" and {len(listed) - 1} more" if len(listed) > 1 else ""
    return f"{what}{more} in table {table_name(family_of(first))}"


def _command(key: bytes, value: bytes) -> str:
    """Return the command that adds an object; what nft has no words for follows as a comment."""
    kind, table = Kind(kind_of(key)), table_name(family_of(key))
    if kind in SETS or kind is Kind.MEMBER:
        local = "  # local" if kind in ENDPOINT_KINDS and is_local(value) else ""
        return f"add element {table} {set_name(key)} {{ {element_text(key, value)} }}{local}"
    does = f"  # {value.decode()}" if value else ""
    return f"add {NOUNS[kind]} {table} {name_of(key)}{does}"


def set_name(key: bytes) -> str:
    """Return the set or map that has an element."""
    spec = SETS.get(kind_of(key))
    return spec.name if spec else name_of(key)


def key_text(key: bytes, value: bytes) -> str:
    """Return an element without its value, as nft deletes it; a range ends with the value."""
    kind = kind_of(key)
    if kind in SETS:
        is_range = SETS[kind].form is Form.INTERVALS
        return _fields_text(key) + (f"-{unpack_address(value)}" if is_range else "")
    own = split_element(key)[1]
    if kind == Kind.STALE_AFFINITY:
        return unpack_address(own)
    address, port = unpack_endpoint(own)
    return f"{address} . {port}"


def element_text(key: bytes, value: bytes) -> str:
    """Return an element as nft prints it."""
    element = key_text(key, value)
    match SETS[kind_of(key)].form if kind_of(key) in SETS else Form.SET:
        case Form.VERDICTS:
            chain, _, comment = value.partition(b"\0")
            verdict = chain.decode() if chain in (DROP, REJECT) else f"goto {chain.decode()}"
            return f"{element}{_comment(comment)} : {verdict}"
        case Form.ENDPOINTS:
            address, port = unpack_endpoint(value)
            return f"{element} : {address} . {port}"
        case Form.INTERVALS:
            return element
        case _:
            return element + _comment(value)


def _fields_text(key: bytes) -> str:
    return " . ".join(printed_fields(key))


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
