"""Kinds of kernel objects as data: what each is called, whose it is, how it is printed. Pure.

A mode has a table of its kinds. From that follows all that commands say of kernel objects, and
which of them concern a Service: KernelWords has the rules. Nothing here compares: operate/dump.py
does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Ruleset
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
    """Print an object without a tool, as `format_diff` does."""
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


_OBJECTS = Kind("objects")


class KernelWords:
    """Describes the kernel objects of a mode; this class does so for modes without a tool."""

    def __init__(self, read: Callable[[], Awaitable[Ruleset]]) -> None:
        """Describe what `read` returns."""
        self._read = read

    async def read(self) -> Ruleset:
        """Return all objects of the mode, and change nothing.

        Raises:
            BusyError: they cannot be read now.
            FileNotFoundError: the mode does not run here.
            PermissionError: this process may not look.
        """
        return await self._read()

    async def leftovers(self) -> Ruleset:
        """Return the objects that stay if the process ends: sockets do not. Raises as `read`."""
        return await self.read()

    def wanted(self, rendered: Ruleset, kernel: Ruleset) -> Ruleset:
        """Return rendered objects as `read` returns them if they are in force.

        Most modes read what they render. In others an object has a part that the process chose when
        it wrote it, such as a port; it is taken from the kernel.
        """
        del kernel
        return rendered

    # What a mode says of its objects

    def kind_of(self, key: Any) -> Kind:
        """Return the kind of an object."""
        del key
        return _OBJECTS

    def family_of(self, key: Any) -> int:
        """Return the family of an object; 0 if it serves both."""
        del key
        return 0

    def names_of(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> set[Hashable]:
        """Return all by which an object in the kernel tells that it belongs to these plans."""
        del kernel, plans
        return set()

    def is_relevant(self, line: Words, plans: Collection[ServicePlan]) -> bool:
        """Whether a line that is as planned tells anything about the traffic of these plans."""
        del line, plans
        return True

    async def beyond(
        self, lines: Collection[Words], plans: Collection[ServicePlan], settings: NodeSettings
    ) -> list[Words]:
        """Return lines that those of a Service lead to and no plan describes. Raises as `read`."""
        del lines, plans, settings
        return []

    # What follows from that

    def of_services(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> Iterator[Any]:
        """Yield the keys of objects that belong to these plans by name or destination.

        They are all that can be there beside the wanted ones: left over, or made by others.
        """
        names = self.names_of(kernel, plans)
        for key, value in kernel.items():
            if not names.isdisjoint(self.kind_of(key).names(key, value)):
                yield key

    def is_on_path(self, key: Any, plans: Collection[ServicePlan]) -> bool:
        """Whether an object of the node is one that the traffic of these plans passes."""
        passed_by = self.kind_of(key).passed_by
        if not passed_by:
            return False
        family = self.family_of(key)
        passing = [plan for plan in plans if family in (0, plan.key.family)]
        if passed_by == "node ports":
            return any(not frontend.address for plan in passing for frontend in plan.frontends)
        return bool(passing)

    def rank(self, key: Any) -> int:
        """Return the place of an object in a list: packets pass those of lower rank first."""
        return self.kind_of(key).rank

    def words(self, key: Any, value: Any) -> Iterable[Words]:
        """Print one object."""
        kind = self.kind_of(key)
        return [
            line if line.purpose else line._replace(purpose=kind.purpose)
            for line in kind.words(key, value)
        ]
