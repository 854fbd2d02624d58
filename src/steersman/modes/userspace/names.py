"""The objects of the userspace modes: listeners, portals, and how they are keyed. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from steersman.model.names import Family
from steersman.model.plan import (
    LocalDetector,
    Value,
    Verdict,
)
from steersman.model.ruleset import Diff
from steersman.proxy.listeners import LISTENER, PORTAL, FrontendKey, ListenerPlan, only_from

BASE: Literal["base"] = "base"
STRAY: Literal["stray"] = "stray"
ADDRESS: Literal["address"] = "address"
_FORWARD = Verdict.FORWARD


class StrayKey(NamedTuple):
    """Something of ours that this process does not know: left by an earlier one."""

    what: str
    """STRAY for a rule, ADDRESS for an address of an interface."""
    family: Family
    where: str
    """Table of a rule, interface of an address."""
    text: str


class BaseKey(NamedTuple):
    """The chains and jumps of a family."""

    what: str
    family: Family


Key: TypeAlias = FrontendKey | StrayKey | BaseKey


class Portal(Value, frozen=True):
    """What the kernel does with packets to a destination before a listener sees them."""

    name: str
    """Printed name of the ServicePort."""
    verdict: Verdict
    """FORWARD leads to the listener, or for a node port lets pass."""
    host: str = ""
    """Address of this node at which the listener is; "" where it has the destination itself."""
    insiders: LocalDetector | None = None
    """Given: only pods that it tells and this node itself pass, others are dropped."""
    source_ranges: tuple[str, ...] = ()

    def __str__(self) -> str:
        to = f" to {self.host}" if self.host else ""
        inside = "; only from pods and this node" if self.insiders is not None else ""
        return f"{self.name}: {self.verdict}{to}{inside}{only_from(self.source_ranges)}"


def listeners_of(change: Diff) -> dict[FrontendKey, ListenerPlan]:
    """The listeners that a Diff adds or changes."""
    return {key: value for key, value in _new(change) if isinstance(value, ListenerPlan)}


def portals_of(change: Diff) -> dict[FrontendKey, Portal]:
    """The portals that a Diff adds or changes."""
    return {key: value for key, value in _new(change) if isinstance(value, Portal)}


def part_of(change: Diff, family: Family) -> Diff:
    """What a Diff does in one family."""
    added, removed, changed = (
        {key: value for key, value in part.items() if key.family is family}
        for part in (change.added, change.removed, change.changed)
    )
    return Diff(added, removed, changed)


def left_without_endpoints(change: Diff) -> set[FrontendKey]:
    """Listeners that a Diff removes because nobody is left to pass connections on to."""
    refusing = {key for key, portal in portals_of(change).items() if portal.verdict is not _FORWARD}
    gone = {key for key in change.removed if key[0] == LISTENER}
    return {key for key in gone if key.of(PORTAL) in refusing}


def removed_listeners(change: Diff) -> set[FrontendKey]:
    """Return the listeners that a Diff removes."""
    return {key for key in change.removed if key[0] == LISTENER}


def _new(change: Diff) -> list[tuple[FrontendKey, ListenerPlan | Portal | str]]:
    return [*change.added.items(), *((key, new) for key, (_, new) in change.changed.items())]
