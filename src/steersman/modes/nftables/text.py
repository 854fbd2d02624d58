"""A Ruleset of this mode as nft commands: for operators, for goldens, and for `nft -f -`. Pure.

A table that is not as this version made it (upstream's has the same name) is replaced in one
transaction of nft that holds the skeleton and all elements (`loadable`). nft 1.0.6 cannot write the
chains of session affinity and of source ranges as we need them; for the milliseconds until netlink
has put them in, simpler elements and rules stand in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steersman.model.names import Family
from steersman.model.ruleset import Diff, Ruleset, diff, patch
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
    prefix,
    printed_fields,
    split_element,
    unpack_address,
    unpack_endpoint,
    without_locality,
)
from steersman.modes.nftables.rules import FIREWALL, FIREWALL_BASES, FIREWALL_CHECK
from steersman.modes.nftables.skeleton import HEADER
from steersman.modes.nftables.transaction import derived
from steersman.proxy.listeners import ListenerPlan

_PROTOCOL = {Family.IPV4: "ip protocol", Family.IPV6: "ip6 nexthdr"}
_HOOKS = {0: "prerouting", 3: "output"}
_NOUNS = {Kind.CHAIN: "chain", Kind.MEMBERS: "set"}


def ruleset_text(ruleset: Ruleset) -> str:
    """Return the commands that add everything, sorted by kind, family and key."""
    lines = (_command("add", key, ruleset[key]).rstrip("\n") for key in sorted(ruleset))
    return "".join(f"{line}\n" for line in lines)


def diff_text(change: Diff) -> str:
    """Return the commands that carry out a Diff."""
    lines = [_command("delete", key, value) for key, value in sorted(change.removed.items())]
    for key, (old, new) in sorted(change.changed.items()):
        lines += [_command("delete", key, old), _command("add", key, new)]
    lines += [_command("add", key, value) for key, value in sorted(change.added.items())]
    return "".join(f"{line}\n" for line in lines)


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


def _command(verb: str, key: bytes, value: bytes | str | ListenerPlan) -> str:
    """Return an object as an nft command; as a comment if nft has no words for it."""
    kind = Kind(kind_of(key))
    if isinstance(value, ListenerPlan):
        return f"# {verb} listener at {value}"
    if isinstance(value, str):
        return value if verb == "add" else f"{verb} table {_table_of(key)}"
    if kind in SETS:
        local = "  # local" if SETS[kind].form is Form.ENDPOINTS and is_local(value) else ""
        element = " . ".join(printed_fields(key))
        match SETS[kind].form:
            case Form.VERDICTS:
                chain, _, comment = value.partition(b"\0")
                verdict = chain.decode() if chain in (DROP, REJECT) else f"goto {chain.decode()}"
                element += f"{_comment(comment)} : {verdict}"
            case Form.ENDPOINTS:
                element += f" : {_endpoint(value)}"
            case Form.INTERVALS:
                element += f"-{unpack_address(value)}"
            case _:
                element += _comment(value)
        return f"{verb} element {_table_of(key)} {SETS[kind].name} {{ {element} }}{local}"
    if kind is Kind.MEMBER:
        members, endpoint = split_element(key)
        return f"{verb} element {_table_of(key)} {name_of(members)} {{ {_endpoint(endpoint)} }}"
    does = f"  # {value.decode()}" if value else ""
    return f"{verb} {_NOUNS.get(kind, 'map')} {_table_of(key)} {name_of(key)}{does}"


def _endpoint(data: bytes) -> str:
    address, port = unpack_endpoint(data)
    return f"{address} . {port}"


def _comment(comment: bytes) -> str:
    return f' comment "{comment.decode()}"' if comment else ""


# -- replacing a table ----------------------------------------------------------------------


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


# -- Diffs as commands -----------------------------------------------------------------------------
#
# A Diff as commands of nft, which `nft -c -f -` accepts.
#
# nft 1.0.6 cannot write the rules of session affinity: they are comments here, as for `describe`. A
# table that is replaced is written as for the first of its two steps (text.py, `loadable`).

_SETS = {
    Kind.AFFINITY: "map {table} {name} {{ typeof {A} saddr : {A} daddr . th dport ;"
    " flags dynamic,timeout ; }}",
    Kind.MEMBERS: "set {table} {name} {{ typeof {A} daddr . th dport ; }}",
}
_AFFINITY = """\
# session affinity: nft cannot write these rules, steersman puts them in over netlink
"""


def script(have: Ruleset, change: Diff) -> str:
    """Return the commands that carry out a Diff, apart from sockets.

    Args:
        have: the objects in the kernel.
        change: the Diff.
    """
    want, text = patch(have, change), ""
    for family in Family:
        old, new = (
            {key: value for key, value in each.items() if family_number(key) == family}
            for each in (have, want)
        )
        table, skeleton = f"{HEADER[family]} {TABLE}", prefix(Kind.SKELETON, family)
        if skeleton not in new:
            text += f"delete table {table}\n" if skeleton in old else ""
        elif new[skeleton] == old.get(skeleton):
            text += _changes(family, old, new)
        else:
            elements = loadable(family, new)
            text += f"add table {table}\ndelete table {table}\n"
            text += f"{new[skeleton]}{new.get(prefix(Kind.RULES, family), '')}"
            text += interim_firewall(family, elements)
            text += _AFFINITY if any(kind_of(key) == Kind.CHAIN for key in new) else ""
            text += ruleset_text({**elements, **_derived(elements)})
    return text


def _changes(family: Family, old: Ruleset, new: Ruleset) -> str:
    """Return the commands that turn objects in one table into others.

    They come in the order of transaction.py: an object before those that refer to it, and gone
    after them.
    """
    table = f"{HEADER[family]} {TABLE}"
    change = diff({**old, **_derived(old)}, {**new, **_derived(new)})
    gone = {**change.removed, **{k: before for k, (before, _) in change.changed.items()}}
    come = {**change.added, **{k: after for k, (_, after) in change.changed.items()}}
    # 1. Elements, unless their set goes. 2. Chains: their rules first.
    lines = []
    for key, value in sorted(gone.items()):
        kind = kind_of(key)
        of_set = kind in (Kind.MEMBER, Kind.STALE_AFFINITY) and split_element(key)[0] in new
        if kind in SETS or of_set:
            lines.append(_deleted(key, value, table))
    for key in sorted(change.removed):
        if kind_of(key) == Kind.CHAIN:
            lines += [f"{verb} chain {table} {name_of(key)}" for verb in ("flush", "delete")]
    # 3. Maps, sets and chains of ServicePorts, and the node's rules.
    for key in sorted(come):
        name = name_of(key) if kind_of(key) in (*_SETS, Kind.CHAIN) else ""
        if kind_of(key) == Kind.CHAIN:
            lines += [_AFFINITY.rstrip(), f"add chain {table} {name}  # {come[key].decode()}"]
        elif name:
            form = _SETS[Kind(kind_of(key))]
            lines.append("add " + form.format(table=table, name=name, A=HEADER[family]))
    rules = come.get(prefix(Kind.RULES, family), "")
    # 4. Maps and sets that nothing refers to any more. 5. Elements.
    nouns = {Kind.AFFINITY: "map", Kind.MEMBERS: "set"}
    ends = [
        f"delete {nouns[Kind(kind_of(key))]} {table} {name_of(key)}"
        for key in sorted(change.removed)
        if kind_of(key) in nouns
    ]
    elements = {k: v for k, v in come.items() if kind_of(k) in SETS or kind_of(k) == Kind.MEMBER}
    before, after = ("".join(f"{line}\n" for line in each) for each in (lines, ends))
    return f"{before}{rules}{after}{ruleset_text(elements)}"


def _derived(objects: Mapping[bytes, Any]) -> dict[bytes, bytes]:
    """Return the elements that follow from these objects."""
    pairs: Iterable[tuple[bytes, Any]] = objects.items()
    return {element: b"" for _, element in derived(pairs)}


def _deleted(key: bytes, value: bytes, table: str) -> str:
    """Return the command that deletes an element; its key is enough, but for an interval."""
    kind = kind_of(key)
    if kind in SETS:
        element, name = " . ".join(printed_fields(key)), SETS[kind].name
        if SETS[kind].form is Form.INTERVALS:
            element += f"-{unpack_address(value)}"
        return f"delete element {table} {name} {{ {element} }}"
    of_set, own = split_element(key)
    fields = unpack_endpoint(own) if kind == Kind.MEMBER else (unpack_address(own),)
    return f"delete element {table} {name_of(of_set)} {{ {' . '.join(map(str, fields))} }}"
