"""The userspace mode on any system: a proxy, and portals that lead clients to its listeners.

mode.py and windows.py choose the portals. They run in the mode's thread; the listeners are on the
event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from steersman.failover.watch import FailureWatch
from steersman.host.worker import Changes
from steersman.model.connections import ConnectionSearch
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.base import Mode, Requirements, Support
from steersman.modes.specs import ModeOptions
from steersman.modes.tracer import Tracer
from steersman.modes.userspace.portals import Portals
from steersman.modes.userspace.render import left_without_endpoints, listeners_of
from steersman.proxy.engine import Proxy
from steersman.proxy.failures import DialWatch
from steersman.proxy.handoff import SocketHandoff
from steersman.proxy.listeners import FrontendKey
from steersman.proxy.ports import PortAllocator

if TYPE_CHECKING:
    from steersman.modes.userspace.words import UserspaceWords


class UserspaceMode(Mode):
    """Proxies TCP and UDP in this process."""

    handover: SocketHandoff | None

    def __init__(
        self,
        name: str,
        candidates: Sequence[Portals],
        options: ModeOptions | None = None,
        handoff: str = "",
        make_tracer: Callable[[], Tracer] | None = None,
    ) -> None:
        """Make the mode; nothing is run or opened before it is used.

        Args:
            name: the mode's name.
            candidates: portals of the same style; the first that works is used.
            options: the operator's settings.
            handoff: name under which processes hand over their listening sockets; "" if they do
                not.
            make_tracer: makes what follows packets; None if this system cannot.
        """
        options = options or ModeOptions()
        self.tracer = make_tracer
        self.name = name
        self.portals = candidates[0]
        self.variant = self.portals.variant
        """`none` if this mode changes nothing on the machine."""
        self.traits = Traits(
            reads_addresses=True,
            terminates_connections=True,
            forwards_sctp=False,
            localhost_node_ports=True,
            relays_localhost=True,
            tracks_connections=self.portals.tracks_connections,
        )
        self.proxy = Proxy(PortAllocator(options.proxy_ports), options.udp_idle)
        self._candidates = candidates
        self._stopped: Iterable[FrontendKey] = ()
        self.handover = SocketHandoff(handoff, self.proxy) if handoff else None

    def probe(self) -> Support:
        """Find the first portals that work."""
        missing: tuple[str, ...] = ()
        for portals in self._candidates:
            support = portals.probe()
            if support.usable:  # its `missing` may still name limits, such as a family
                self.portals, self.variant = portals, portals.variant
                return support
            missing += support.missing
        return Support(usable=False, missing=missing)

    def requirements(self) -> Requirements:
        """Return that clients' packets end in this process."""
        tables = self.portals.own_tables
        return Requirements(delivery="local", own_tables=tables, own_jumps=("KUBE-PORTALS-",))

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the fixed part of the portals."""
        return self.portals.render_node(settings)

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render the listeners and portals of one ServicePort."""
        return self.portals.render_service(plan, settings)

    def read(self) -> Ruleset:
        """Return the listeners and the portals in force."""
        return self.portals.read(self.proxy.listeners)

    def changes(self) -> Changes | None:
        """Hear of a successor that has gone: rules and listeners may be different."""
        return self.handover.changes() if self.handover is not None else None

    def apply(self, change: Diff) -> None:
        """Change listeners and portals; while a successor starts, only existing listeners."""
        wanted, on_loop = listeners_of(change), self.worker.on_loop
        # While a successor starts or serves, rules and new listeners are its business.
        if self.handover is not None and not self.handover.alone:
            on_loop(self.handover.follow(wanted, left_without_endpoints(change)))
        # The first listener claims the predecessor's sockets. A mode that only removes
        # leftovers has no listener, and must not take anything over.
        if self.handover is not None and wanted:
            self.handover.take_over()
        self.portals.apply(change, self.proxy, on_loop)
        if self.handover is not None and wanted:
            on_loop(self.handover.started())

    @cached_property
    def words(self) -> UserspaceWords:
        """What prints sockets, rules and addresses; they may be those of another process."""
        from steersman.modes.userspace.words import UserspaceWords  # noqa: PLC0415 - rarely used

        return UserspaceWords(self.portals, self.worker)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Name objects of the portals in use that are left."""
        return self.portals.find_leftovers(families)

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        """Return the proxy's counters of all ServicePorts that it serves."""
        del plans
        return self.proxy.traffic.stats()

    def totals(self) -> NodeTotals:
        """Return the sums over all endpoints."""
        return self.proxy.totals()

    def find_connections(self, search: ConnectionSearch) -> Generator[None, None, None]:
        """Add the connections that end in this process."""
        self.worker.on_loop(self.proxy.find_connections(search))
        yield

    def watch_failures(self) -> FailureWatch:
        """Watch the dials of all listeners."""
        return DialWatch(self.proxy.shared.dials)

    async def drain(self, seconds: float) -> int:
        """Stop listening and let connections end; return how many were reset then."""
        if self.handover is not None:
            self.handover.close()
        self._stopped = self.proxy.listeners  # draining forgets them
        return await self.proxy.drain(seconds)

    def close(self) -> None:
        """Remove what must not outlive the listeners."""
        self.portals.close(self._stopped)
