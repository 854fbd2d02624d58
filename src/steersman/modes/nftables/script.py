"""A Diff as commands of nft, which `nft -c -f -` accepts. Pure.

nft 1.0.6 cannot write the rules of session affinity: they are comments here, as for `dump`. A
table that is replaced is written as for the first of its two steps (text.py, `loadable`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steersman.model.names import Family
from steersman.model.ruleset import Diff, Ruleset, diff, patch
from steersman.modes.nftables.derived import derived
from steersman.modes.nftables.layout import (
    SETS,
    TABLE,
    Form,
    Kind,
    family_number,
    kind_of,
    name_of,
    prefix,
    printed_fields,
    split_element,
    unpack_address,
)
from steersman.modes.nftables.skeleton import HEADER
from steersman.modes.nftables.text import (
    interim_firewall,
    loadable,
    member_text,
    ruleset_text,
)

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
    element = member_text(key) if kind == Kind.MEMBER else unpack_address(split_element(key)[1])
    return f"delete element {table} {name_of(key)} {{ {element} }}"
