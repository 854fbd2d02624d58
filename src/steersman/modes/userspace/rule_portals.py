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
from steersman.modes.userspace.portals import OnLoop, Portals
from steersman.modes.userspace.render import (
    BASE,
    STRAY,
    BaseKey,
    Key,
    Portal,
    StrayKey,
    left_without_endpoints,
    listeners_of,
    part_of,
    portals_of,
    removed_listeners,
)
from steersman.netfilter.conntrack.stale import delete_now
from steersman.proxy.engine import Proxy
from steersman.proxy.listeners import LISTENER, PORTAL, FrontendKey, ListenerPlan

T = TypeVar("T", bound=Hashable)
log = logging.getLogger(__name__)


class RulePortals(Portals, Generic[T]):
    """Rules that lead Service addresses to listeners on an address of this node.

    A portal consists of parts: rules of iptables, or objects of nftables. They do not say which
    portal they belong to; this process remembers it. So after a start every part is a stray, until
    the first sync has written the portals again.
    """

    tracks_connections = True
    families: tuple[Family, ...] = ()
    """Families whose rules can be written; () before `probe`."""

    def __init__(self) -> None:
        self._written: dict[FrontendKey, tuple[Portal, Collection[T]]] = {}
        """The portals that this process wrote, and the parts of each."""

    def probed_families(self) -> tuple[Family, ...]:
        """Return the families whose rules can be written, as `probe` finds them."""
        return self.families

    @abstractmethod
    def read_family(self, family: Family) -> tuple[bool | None, Set[T]]:
        """Return whether all chains are there (None if only some are), and the parts of portals."""

    @abstractmethod
    def parts_of(self, key: FrontendKey, portal: Portal, port: int) -> Collection[T]:
        """Return the parts of a portal whose listener is bound to a port (0 for no listener)."""

    @abstractmethod
    def to_stray(self, family: Family, part: T) -> StrayKey:
        """Return the key of a part whose portal is not known."""

    @abstractmethod
    def from_stray(self, key: StrayKey) -> T:
        """Return the part of such a key."""

    @abstractmethod
    def write_all(self, family: Family, parts: Iterable[T]) -> None:
        """Create the chains, or empty them, and write all portals, in one transaction."""

    @abstractmethod
    def write_change(self, family: Family, removed: Iterable[T], added: Iterable[T]) -> bool:
        """Write changes in one transaction; return False if other parts are in the kernel."""

    @abstractmethod
    def remove_all(self, family: Family) -> None:
        """Remove the chains with all portals."""

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the chains that portals are in."""
        families = self.families or settings.families
        ruleset = render.render_node(settings)
        return {key: value for key, value in ruleset.items() if key.family in families}

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render the listeners and portals of one ServicePort."""
        families = self.families or settings.families
        return render.render_redirect(plan, settings) if plan.key.family in families else {}

    def in_kernel(self, key: FrontendKey, portal: Portal | None, port: int) -> list[StrayKey]:
        """Return the keys of a portal's parts, as of a process that did not write them."""
        parts = () if portal is None else self.parts_of(key, portal, port)
        return [self.to_stray(key.family, part) for part in parts]

    def read(self, listeners: Mapping[FrontendKey, ListenerPlan]) -> Ruleset:
        """Return the listeners, the portals whose parts are all there, and other parts."""
        found: dict[Key, ListenerPlan | Portal | str] = dict(listeners.items())
        for family in self.probed_families():
            complete, have = self.read_family(family)
            if complete is not False:
                found[BaseKey(BASE, family) if complete else _part_of_base(family)] = ""
            known = set[T]()
            for key in self._of(family):
                portal, parts = self._written[key]
                if complete and have >= set(parts):
                    found[key] = portal
                    known.update(parts)
                else:  # no client came to it; its remaining parts are strays
                    del self._written[key]
            strays = [self.to_stray(family, part) for part in have - known]
            found.update(dict.fromkeys(sorted(strays), ""))
        return found

    def _of(self, family: Family) -> list[FrontendKey]:
        """Return the destinations of a family whose portals were written."""
        return [key for key in self._written if key.family is family]

    def _parts(self, keys: Iterable[FrontendKey]) -> Iterator[T]:
        """Return the parts of written portals."""
        return chain.from_iterable(self._written[key][1] for key in keys)

    def apply(self, change: Diff, proxy: Proxy, on_loop: OnLoop) -> None:
        """Start listeners, lead the rules to them, stop the others."""
        for family in Family:  # each has rules of its own, which can fail on their own
            if part := part_of(change, family):
                self._apply_family(family, part, proxy, on_loop)

    def _apply_family(self, family: Family, change: Diff, proxy: Proxy, on_loop: OnLoop) -> None:
        started = on_loop(proxy.start(listeners_of(change)))
        try:
            # Lead the rules to the listeners. A portal is written again if its listener is
            # changed, because its port may be another one now.
            portals = portals_of(change)
            for listener in started.wanted:
                key = listener.of(PORTAL)
                if key in self._written and key not in change.removed:
                    portals.setdefault(key, self._written[key][0])
            gone = {key for key in change.removed if key[0] != LISTENER and key not in portals}
            new = {
                key: self.parts_of(key, portal, proxy.port(key.of(LISTENER)))
                for key, portal in portals.items()
            }
            if family in self.probed_families():
                base = any(isinstance(key, BaseKey) for key in change.added)
                self._write_family(family, gone, new, base=base)
                for key in gone:
                    self._written.pop(key, None)
                self._written |= {key: (portals[key], parts) for key, parts in new.items()}
        except Exception:
            on_loop(proxy.go_back(started))
            raise
        removed, without_endpoints = removed_listeners(change), left_without_endpoints(change)
        on_loop(proxy.finish(started, removed, without_endpoints))
        # UDP clients that never pause follow their conntrack entry, and not a new portal.
        opened = {key.of(PORTAL) for key in started.opened} | portals_of(change).keys()
        in_force = {key: self._written[key][0] for key in opened if key in self._written}
        ports = {key: proxy.port(key.of(LISTENER)) for key in opened}
        stale = stale_flows(family, in_force, ports)
        if stale:
            try:
                delete_now(stale)
            except OSError as error:
                log.warning(
                    "UDP clients of new portals may still reach their former destination: %s", error
                )

    def _write_family(
        self,
        family: Family,
        gone: Set[Key],
        new: Mapping[FrontendKey, Collection[T]],
        *,
        base: bool,
    ) -> None:
        """Write rules.

        Args:
            family: the family of everything here.
            gone: portals, strays and the base to remove.
            new: the parts of portals, which may be written already.
            base: create the chains and jumps, and write all portals.
        """
        if not base and gone & {BaseKey(BASE, family), _part_of_base(family)}:
            self.remove_all(family)
            return
        if not base:
            changed = {
                key: parts
                for key, parts in new.items()
                if key not in self._written or self._written[key][1] != parts
            }
            strays = [self.from_stray(key) for key in gone if isinstance(key, StrayKey)]
            old = [key for key in self._written if key in gone or key in changed]
            removed = chain(strays, self._parts(old))
            if self.write_change(family, removed, chain.from_iterable(changed.values())):
                return
        kept = [key for key in self._of(family) if key not in gone and key not in new]
        self.write_all(family, chain(self._parts(kept), *new.values()))


def _part_of_base(family: Family) -> StrayKey:
    """Return the key of chains and jumps that are not all there; no chain has such a name."""
    return StrayKey(STRAY, family, "", "a part of the chains and jumps")


def stale_flows(
    family: Family, portals: Mapping[FrontendKey, Portal], ports: Mapping[FrontendKey, int]
) -> Stale:
    """Describe the UDP entries of conntrack that bypass portals: their clients never see them.

    Args:
        family: the family.
        portals: the portals in force, by destination.
        ports: the port of each portal's listener.
    """
    # An entry is stale if its replies do not come from the portal's listener.
    udp = bytes((Protocol.UDP.number,))
    ways = {
        udp + pack_socket(key.address, key.port): frozenset({pack_socket(portal.host, ports[key])})
        for key, portal in portals.items()
        if portal.host and key.protocol is Protocol.UDP
    }
    return Stale(family, ways, {})
