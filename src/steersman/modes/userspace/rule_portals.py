"""Portals made of packet filter rules: what iptables and nft have in common.

A change of one family goes through these steps, so that clients always find a listener:

    start listeners -> lead the rules to them -> stop old listeners -> delete conntrack entries
                            | refused
                            +-> use the old listeners again; old rules still lead to them
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Set
from itertools import chain
from typing import Generic, TypeVar

from steersman.model.conntrack import Stale, pack_socket
from steersman.model.names import Family, Protocol
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.userspace import render
from steersman.modes.userspace.core import Portals
from steersman.modes.userspace.listeners import Listeners
from steersman.modes.userspace.render import (
    BaseKey,
    Key,
    Portal,
    StrayKey,
    part_of,
    portals_of,
)
from steersman.netfilter.conntrack.stale import delete_now
from steersman.proxy.listeners import LISTENER, PORTAL, FrontendKey, ListenerPlan

T = TypeVar("T", bound=Hashable)
log = logging.getLogger(__name__)


class WrittenPortals(Generic[T]):
    """The portals that this process wrote, and the parts of each: rules or nft objects."""

    def __init__(self) -> None:
        self._written: dict[FrontendKey, tuple[Portal, Collection[T]]] = {}

    def add(self, key: FrontendKey, portal: Portal, parts: Collection[T]) -> None:
        """Note a portal that was written."""
        self._written[key] = (portal, parts)

    def remove(self, keys: Iterable[FrontendKey]) -> None:
        """Forget portals; unknown ones are ignored."""
        for key in keys:
            self._written.pop(key, None)

    def portal(self, key: FrontendKey) -> Portal | None:
        """Return the portal of a destination."""
        return self._written[key][0] if key in self._written else None

    def parts(self, key: FrontendKey) -> Collection[T]:
        """Return the parts of a destination's portal; () if it has none."""
        return self._written[key][1] if key in self._written else ()

    def all_parts(self, keys: Iterable[FrontendKey]) -> Iterator[T]:
        """Return the parts of several portals."""
        return chain.from_iterable(self.parts(key) for key in keys)

    def of(self, family: Family) -> list[FrontendKey]:
        """Return the destinations of a family."""
        return [key for key in self._written if key.family is family]

    def among(self, keys: Set[Key]) -> list[FrontendKey]:
        """Return the destinations among these keys that have a portal, in order."""
        return sorted(k for k in keys if isinstance(k, FrontendKey) and k in self._written)

    def compare(self, family: Family, have: Set[T]) -> tuple[dict[FrontendKey, Portal], Set[T]]:
        """Return the portals whose parts are all there, and the strays; forget the others."""
        # Rules do not say which portal they belong to; this process remembers it. So after a
        # start every rule is a stray, until the first sync has written the portals again.
        found, known = {}, set[T]()
        for key in self.of(family):
            portal, parts = self._written[key]
            if have >= set(parts):
                found[key] = portal
                known.update(parts)
            else:  # its remaining parts are strays
                del self._written[key]
        return found, have - known


class RulePortals(Portals, Generic[T]):
    """Rules that lead Service addresses to listeners on an address of this node."""

    tracks_connections = True
    families: tuple[Family, ...] = ()
    """Families whose rules can be written; () before `probe`."""

    def __init__(self) -> None:
        self.written: WrittenPortals[T] = WrittenPortals()

    @abstractmethod
    def read_rules(self) -> Mapping[Key, Portal | str]:
        """Return the portals in force, and strays. See `Mode.read`."""

    @abstractmethod
    def parts_of(self, key: FrontendKey, portal: Portal, port: int) -> Collection[T]:
        """Return the parts of a portal whose listener is bound to a port (0 for no listener)."""

    @abstractmethod
    def stray(self, family: Family, part: T) -> StrayKey:
        """Return the key of a part whose portal is not known."""

    def in_kernel(self, key: FrontendKey, portal: Portal | None, port: int) -> list[StrayKey]:
        """Return the keys of a portal's parts, as of a process that did not write them."""
        parts = () if portal is None else self.parts_of(key, portal, port)
        return [self.stray(key.family, part) for part in parts]

    @abstractmethod
    def write_rules(
        self,
        family: Family,
        gone: Set[Key],
        new: Mapping[FrontendKey, Collection[T]],
        *,
        base: bool,
    ) -> None:
        """Write rules, in one transaction; do nothing for a family that is not in `families`.

        Args:
            family: the family of everything here.
            gone: portals, strays and the base to remove.
            new: the parts of portals, which may be written already.
            base: create the chains and jumps, and write all portals.
        """

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the chains that portals are in."""
        families = self.families or settings.families
        ruleset = render.render_node(settings)
        return {key: value for key, value in ruleset.items() if key.family in families}

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render the listeners and portals of one ServicePort."""
        families = self.families or settings.families
        return render.render_redirect(plan, settings) if plan.key.family in families else {}

    def read(self, listeners: Mapping[FrontendKey, ListenerPlan]) -> Ruleset:
        """Return the listeners, the portals in force and strays."""
        return {**listeners, **self.read_rules()}

    def apply(self, change: Diff, listeners: Listeners) -> None:
        """Start listeners, lead the rules to them, stop the others."""
        for family in Family:  # each has rules of its own, which can fail on their own
            if part := part_of(change, family):
                self._apply_family(family, part, listeners)

    def _apply_family(self, family: Family, change: Diff, listeners: Listeners) -> None:
        started = listeners.start(change)
        try:
            # Lead the rules to the listeners. A portal is written again if its listener is
            # changed, because its port may be another one now.
            portals = portals_of(change)
            for key in started.wanted:
                portal = self.written.portal(key.of(PORTAL))
                if portal is not None and key.of(PORTAL) not in change.removed:
                    portals.setdefault(key.of(PORTAL), portal)
            gone = {key for key in change.removed if key[0] != LISTENER and key not in portals}
            new = {
                key: self.parts_of(key, portal, listeners.port(key.of(LISTENER)))
                for key, portal in portals.items()
            }
            base = any(isinstance(key, BaseKey) for key in change.added)
            self.write_rules(family, gone, new, base=base)
            if family in self.families:
                self.written.remove(key for key in gone if isinstance(key, FrontendKey))
                for key, parts in new.items():
                    self.written.add(key, portals[key], parts)
        except Exception:
            listeners.go_back(started)
            raise
        listeners.finish(started, change)
        # UDP clients that never pause follow their conntrack entry, and not a new portal.
        opened = {key.of(PORTAL) for key in started.opened} | portals_of(change).keys()
        in_force = {key: self.written.portal(key) for key in opened}
        ports = {key: listeners.port(key.of(LISTENER)) for key in opened}
        stale = stale_flows(family, in_force, ports)
        if stale:
            try:
                delete_now(stale)
            except OSError as error:
                log.warning(
                    "UDP clients of new portals may still reach their former destination: %s", error
                )


def stale_flows(
    family: Family, portals: Mapping[FrontendKey, Portal | None], ports: Mapping[FrontendKey, int]
) -> Stale:
    """Describe the UDP entries of conntrack that bypass portals: their clients never see them.

    Args:
        family: the family.
        portals: the portals in force, by destination; None for none.
        ports: the port of each portal's listener.
    """
    # An entry is stale if its replies do not come from the portal's listener.
    udp = bytes((Protocol.UDP.number,))
    ways = {
        udp + pack_socket(key.address, key.port): frozenset({pack_socket(portal.host, ports[key])})
        for key, portal in portals.items()
        if portal is not None and portal.host and key.protocol is Protocol.UDP
    }
    return Stale(family, ways, {})
