"""Kinds of kernel objects as data: what each is called, whose it is, how it is printed. Pure.

A mode has a table of its kinds. From that follows all that commands say of kernel objects, and
which of them concern a Service: words.py has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

from steersman.model.names import Family
from steersman.netfilter.iptables.names import RuleKey

PassedBy: TypeAlias = Literal["", "all", "node ports"]
"""Which traffic of its family passes an object of the node."""


class Words(NamedTuple):
    """One line of a kernel object."""

    place: str
    """Where it is: `table nat, chain KUBE-SERVICES`."""
    text: str
    """The line as the tool prints it."""
    purpose: str = ""
    """What it does for traffic, in a few words."""


def plain(key: Any, value: Any) -> Iterable[Words]:
    """Print an object without a tool."""
    parts = key if isinstance(key, tuple) else (key,)
    place = " ".join(str(part) for part in parts if part != "")
    return [Words(place, line) for line in str(value).splitlines() or [""]]


def iptables_rules(key: RuleKey, value: str) -> Iterable[Words]:
    """Print a chain, or a part of it, as iptables-save does."""
    family, table, chain, _ = key
    tool = "iptables" if family == Family.IPV4 else "ip6tables"
    place = f"{tool} -t {table}, chain {chain}"
    if not value:
        return [Words(place, f":{chain} - [0:0]", "has no rule")]
    return [Words(place, line) for line in value.split("\n")]


def nobody(_key: Any, _value: Any) -> Iterable[Hashable]:
    """Return the names of no Service: an object belongs to the node."""
    return ()


class Kind(NamedTuple):
    """A kind of kernel objects."""

    name: str
    """In the plural, for counts."""
    rank: int = 0
    """Its place in a list: packets pass objects of lower rank first."""
    purpose: str = ""
    """The purpose of its lines that have none of their own."""
    words: Callable[[Any, Any], Iterable[Words]] = plain
    """Print an object: a key and its value."""
    names: Callable[[Any, Any], Iterable[Hashable]] = nobody
    """Return by what an object tells its Service, a name or a destination; see `names_of`."""
    passed_by: PassedBy = ""
