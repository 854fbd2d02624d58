"""The objects of the userspace modes beside listeners: portals, their keys, parts of a Diff. Pure.

A portal leads clients of a destination to its listener, or drops or rejects them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from steersman.model.names import Family
from steersman.model.plan import LocalDetector, Value, Verdict
from steersman.model.ruleset import Diff
from steersman.proxy.listeners import LISTENER, PORTAL, FrontendKey, ListenerPlan, only_from

BASE: Literal["base"] = "base"
STRAY: Literal["stray"] = "stray"
ADDRESS: Literal["address"] = "address"


class StrayKey(NamedTuple):
    """An object of ours that this process did not make: an earlier one left it."""

    kind: str
    """STRAY for a rule, ADDRESS for an address of an interface."""
    family: Family
    where: str
    """Table of a rule, interface of an address."""
    text: str


class BaseKey(NamedTuple):
    """The chains and jumps of a family."""

    kind: str
    family: Family


Key: TypeAlias = FrontendKey | StrayKey | BaseKey


class Portal(Value, frozen=True):
    """What the kernel does with packets to a destination before a listener receives them."""

    name: str
    """Printed name of the ServicePort."""
    verdict: Verdict
    """FORWARD leads to the listener, or for a node port lets pass."""
    host: str = ""
    """Address of this node that the listener is bound to; "" if it is the destination itself."""
    internal_only: LocalDetector | None = None
    """If given, only pods that it detects and this node pass; other clients are dropped."""
    source_ranges: tuple[str, ...] = ()

    def __str__(self) -> str:
        to = f" to {self.host}" if self.host else ""
        internal = "; only from pods and this node" if self.internal_only is not None else ""
        return f"{self.name}: {self.verdict}{to}{internal}{only_from(self.source_ranges)}"


def listeners_of(change: Diff) -> dict[FrontendKey, ListenerPlan]:
    """Return the listeners that a Diff adds or changes."""
    return {key: value for key, value in _new(change) if isinstance(value, ListenerPlan)}


def portals_of(change: Diff) -> dict[FrontendKey, Portal]:
    """Return the portals that a Diff adds or changes."""
    return {key: value for key, value in _new(change) if isinstance(value, Portal)}


def _new(change: Diff) -> list[tuple[FrontendKey, ListenerPlan | Portal | str]]:
    return [*change.added.items(), *((key, new) for key, (_, new) in change.changed.items())]


def part_of(change: Diff, family: Family) -> Diff:
    """Return the part of a Diff that concerns one family."""
    added, removed, changed = (
        {key: value for key, value in part.items() if key.family is family}
        for part in (change.added, change.removed, change.changed)
    )
    return Diff(added, removed, changed)


def removed_listeners(change: Diff) -> set[FrontendKey]:
    """Return the listeners that a Diff removes and does not replace."""
    gone = {key for key in change.removed if key[0] == LISTENER}
    return gone - listeners_of(change).keys()


def left_without_endpoints(change: Diff) -> set[FrontendKey]:
    """Return the listeners that a Diff removes because no endpoint is left."""
    portals = portals_of(change).items()
    refusing = {key for key, portal in portals if portal.verdict is not Verdict.FORWARD}
    gone = {key for key in change.removed if key[0] == LISTENER}
    return {key for key in gone if key.of(PORTAL) in refusing}
