"""The interface of portals: how clients of a Service address reach a listener of the proxy.

IptablesPortals, NftPortals   rules lead Service addresses to a listener at a node address
DirectPortals                 Service addresses are added to an interface, and sockets bind them
LocalPortals                  sockets bind only the addresses that this machine has
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeAlias

from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.base import Support
from steersman.modes.userspace.render import Portal, StrayKey
from steersman.proxy.engine import Proxy
from steersman.proxy.listeners import FrontendKey, ListenerPlan

OnLoop: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the event loop, and waits for its end."""


class Portals(ABC):
    """How clients of a destination reach its listener."""

    tracks_connections = False
    """Whether conntrack has an entry for each connection from a client to a listener."""
    variant = ""
    """See `Mode.variant`."""
    own_tables: frozenset[str] = frozenset()
    """Names of tables of nf_tables that the portals are in."""

    @abstractmethod
    def probe(self) -> Support:
        """Check whether clients can be led this way here."""

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the fixed part."""
        del settings
        return {}

    @abstractmethod
    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render the listeners and portals of one ServicePort."""

    @abstractmethod
    def read(self, listeners: Mapping[FrontendKey, ListenerPlan]) -> Ruleset:
        """Return the listeners, and the portals in force."""

    @abstractmethod
    def apply(self, change: Diff, proxy: Proxy, on_loop: OnLoop) -> None:
        """Change listeners and portals, in an order that refuses no client meanwhile.

        Listeners live on the event loop. Only the mode's thread has them changed, and waits for
        the end of each change: so it may read them without a lock.

        Raises:
            ApplyError, BusyError: see `Mode.apply`.
        """

    def in_kernel(self, key: FrontendKey, portal: Portal | None, port: int) -> list[StrayKey]:
        """Return the keys that `read` gives to the parts of a portal that it does not know.

        Args:
            key: the destination.
            portal: its portal; None for a destination with a listener only.
            port: the port of its listener.
        """
        del key, portal, port
        return []

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Name objects that are left; see `Mode`."""
        del families
        return ""

    def close(self, listeners: Iterable[FrontendKey]) -> None:  # noqa: B027 - a default
        """Remove objects that must not outlive these listeners."""
