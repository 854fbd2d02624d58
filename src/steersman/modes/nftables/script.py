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
    Kind,
    family_number,
    family_of,
    kind_of,
    name_of,
    prefix,
)
from steersman.modes.nftables.skeleton import HEADER, table_name
from steersman.modes.nftables.text import (
    NOUNS,
    interim_firewall,
    key_text,
    loadable,
    ruleset_text,
    set_name,
)
from steersman.modes.nftables.transaction import transaction
from steersman.netfilter.nft import wire as nft

_APART = (Kind.SKELETON, Kind.RULES, Kind.RELAY)
"""What no transaction carries."""
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
        table, skeleton = table_name(family), prefix(Kind.SKELETON, family)
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
    """Return the commands that turn objects in one table into others, as a transaction does."""
    rules = prefix(Kind.RULES, family)
    text: str = new.get(rules, "") if new.get(rules) != old.get(rules) else ""
    have, want = (
        {key: each[key] for key in sorted(each) if kind_of(key) not in _APART}
        for each in ({**old, **_derived(old)}, {**new, **_derived(new)})
    )
    for operation in transaction(diff(have, want), destroy=True):
        for key in operation.keys:
            text += _command(operation.request.kind ^ nft.SUBSYSTEM, key, have, want)
    return text


def _command(verb: int, key: bytes, have: Ruleset, want: Ruleset) -> str:
    """Return the command for one object of an operation; "" for the rules of its chain."""
    family = family_of(key)
    table = table_name(family)
    match verb:
        case nft.DESTROYSETELEM:
            element = key_text(key, have[key])
            return f"delete element {table} {set_name(key)} {{ {element} }}\n"
        case nft.NEWSETELEM:
            return ruleset_text({key: want[key]})
        case nft.NEWCHAIN:
            return _AFFINITY + ruleset_text({key: want[key]})
        case nft.NEWSET:
            form = _SETS[Kind(kind_of(key))]
            return f"add {form.format(table=table, name=name_of(key), A=HEADER[family])}\n"
        case nft.DELRULE if key not in want:
            return f"flush chain {table} {name_of(key)}\n"
        case nft.DELCHAIN | nft.DELSET:
            return f"delete {NOUNS[Kind(kind_of(key))]} {table} {name_of(key)}\n"
        case _:
            return ""


def _derived(objects: Mapping[bytes, Any]) -> dict[bytes, bytes]:
    """Return the elements that follow from these objects; lazy chains go in by netlink."""
    pairs: Iterable[tuple[bytes, Any]] = objects.items()
    return {element: b"" for _, element in derived(pairs) if kind_of(element) in SETS}
