"""Portals without rules: listeners bind the destinations themselves.

LocalPortals serve the addresses that this machine has. DirectPortals add the addresses of Services
to an interface first. A destination that is to be refused gets an address and no socket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping

from steersman.host.facts import has_interface
from steersman.model.addresses import family_of
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.base import Support
from steersman.modes.userspace.portals import OnLoop, Portals
from steersman.modes.userspace.render import (
    ADDRESS,
    Portal,
    StrayKey,
    left_without_endpoints,
    listeners_of,
    portals_of,
    removed_listeners,
    render_direct,
)
from steersman.proxy.engine import Proxy
from steersman.proxy.listeners import FrontendKey, ListenerPlan

_ONLY_OWN = (
    "Only node ports, and Service addresses that this machine has, are served: neither rules nor "
    "addresses may be added; run it as root, without --userspace-portals=none, for all."
)


class Addresses(ABC):
    """The addresses of an interface."""

    interface: str
    dedicated: bool
    """Whether the interface is ours: then its addresses may stay when the process ends."""

    @abstractmethod
    def probe(self) -> Support:
        """Check whether addresses can be added."""

    @abstractmethod
    def present(self) -> frozenset[str]:
        """Return the canonical addresses of the interface.

        Raises:
            BusyError: they cannot be read now.
        """

    def ours(self, present: frozenset[str]) -> frozenset[str]:
        """Return which of the interface's addresses a process of ours has added."""
        return present

    @abstractmethod
    def add(self, addresses: Collection[str]) -> None:
        """Add addresses that can be bound at once. Idempotent.

        Raises:
            ApplyError: one is refused; those before it may have been added.
        """

    @abstractmethod
    def remove(self, addresses: Collection[str]) -> None:
        """Remove addresses. Idempotent."""


class LocalPortals(Portals):
    """Serve node ports, and Service addresses that this machine has; change nothing on it."""

    variant = "none"

    def __init__(self) -> None:
        self._refusing: dict[FrontendKey, Portal] = {}
        """Destinations without a socket, so that the kernel refuses their clients."""

    def probe(self) -> Support:
        """Name the destinations that are not served."""
        return Support(usable=True, missing=(_ONLY_OWN,))

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render the listeners at addresses that this machine has."""
        own = settings.family(plan.key.family).local_addresses
        return render_direct(plan, settings, frozenset(own))

    def read(self, listeners: Mapping[FrontendKey, ListenerPlan]) -> Ruleset:
        """Return the listeners and the destinations that are refused."""
        return {**listeners, **self._refusing}

    def apply(self, change: Diff, proxy: Proxy, on_loop: OnLoop) -> None:
        """Start listeners and stop others."""
        started = on_loop(proxy.start(listeners_of(change)))
        gone, without_endpoints = removed_listeners(change), left_without_endpoints(change)
        on_loop(proxy.finish(started, gone, without_endpoints))
        for key in change.removed:
            self._refusing.pop(key, None)
        self._refusing.update(portals_of(change))

    def close(self, listeners: Iterable[FrontendKey]) -> None:
        """Forget the destinations that are refused."""
        del listeners
        self._refusing.clear()


class DirectPortals(LocalPortals):
    """Serve all Service addresses: add them to an interface of this machine."""

    variant = ""

    def __init__(self, addresses: Addresses) -> None:
        """Use the addresses of an interface."""
        super().__init__()
        self._addresses = addresses

    def probe(self) -> Support:
        """Check whether addresses can be added."""
        return self._addresses.probe()

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render the listeners at any address."""
        return render_direct(plan, settings)

    def read(self, listeners: Mapping[FrontendKey, ListenerPlan]) -> Ruleset:
        """Return the listeners, "" for one whose address is gone, and addresses that are left."""
        objects = {**listeners, **self._refusing}
        # A listener whose address another program removed gets no clients, so it is incomplete.
        present = self._addresses.present()
        found: dict[FrontendKey | StrayKey, object] = {
            key: value if key.node_port or key.address in present else ""
            for key, value in objects.items()
        }
        for address in sorted(self._addresses.ours(present) - _service_addresses(objects)):
            stray = StrayKey(ADDRESS, family_of(address), self._addresses.interface, address)
            found[stray] = ""
        return found

    def in_kernel(self, key: FrontendKey, portal: Portal | None, port: int) -> list[StrayKey]:
        """Return the key of the destination's address on the interface."""
        del portal, port
        if key.node_port:
            return []
        return [StrayKey(ADDRESS, key.family, self._addresses.interface, key.address)]

    def apply(self, change: Diff, proxy: Proxy, on_loop: OnLoop) -> None:
        """Add addresses, change listeners, remove addresses that nothing needs any more."""
        # Addresses come first, because sockets bind them, and go last.
        before = _service_addresses([*proxy.listeners, *self._refusing])
        fresh = _service_addresses({**listeners_of(change), **portals_of(change)})
        try:
            if fresh:
                self._addresses.add(sorted(fresh))
            super().apply(change, proxy, on_loop)
        except (ApplyError, BusyError):
            # On an interface of our own another process may need them; `read` finds the strays.
            if not self._addresses.dedicated:
                self._remove_unneeded(fresh, proxy.listeners)
            raise
        strays = {key.text for key in change.removed if isinstance(key, StrayKey)}
        self._remove_unneeded(before | strays, proxy.listeners)

    def _remove_unneeded(self, addresses: Iterable[str], listeners: Iterable[FrontendKey]) -> None:
        needed = _service_addresses([*listeners, *self._refusing])
        if unneeded := sorted(set(addresses) - needed):
            self._addresses.remove(unneeded)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for an interface of our own."""
        del families
        name = self._addresses.interface
        left = self._addresses.dedicated and has_interface(name)
        return f"the interface {name} is left" if left else ""

    def close(self, listeners: Iterable[FrontendKey]) -> None:
        """Remove the addresses, unless the successor may use them on an interface of our own."""
        addresses = _service_addresses([*listeners, *self._refusing])
        self._refusing.clear()
        if not self._addresses.dedicated:
            self._remove_unneeded(addresses, ())


def _service_addresses(keys: Iterable[FrontendKey]) -> set[str]:
    """Return the Service addresses of listeners and portals."""
    return {key.address for key in keys if not key.node_port}
