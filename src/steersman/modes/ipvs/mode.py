"""The ipvs mode: rendering, reading and writing put together behind modes/base.py."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Generator, Hashable, Iterable
from contextlib import ExitStack
from functools import cached_property

import msgspec

from steersman.failover.watch import FailureWatch
from steersman.host.address_device import AddressDevice
from steersman.host.exec import Exec
from steersman.host.facts import has_interface
from steersman.host.netlink import NETLINK_GENERIC, NETLINK_NETFILTER, NETLINK_ROUTE, Netlink
from steersman.host.sysctl import SysctlError, apply, ipvs_settings
from steersman.model.connections import ConnectionSearch
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset, Script
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.base import Mode, Requirements, Support, probed
from steersman.modes.capabilities import Carrier
from steersman.modes.ipvs.backends import Ipsets, VirtualServers, busy
from steersman.modes.ipvs.counters import ServerCounters
from steersman.modes.ipvs.kernel import IpvsKernel
from steersman.modes.ipvs.objects import (
    ADDRESS_SETS,
    CHAINS,
    DEVICE,
    DeviceKey,
    Server,
    ServerKey,
    SetKey,
)
from steersman.modes.ipvs.probe import check_ipset, check_matches, check_scheduler, find_family
from steersman.modes.ipvs.render import render_node, render_service
from steersman.modes.ipvs.scripts import scripts
from steersman.modes.ipvs.tracer import IpvsTracer
from steersman.modes.ipvs.wire import timeouts
from steersman.modes.ipvs.words import IpvsWords
from steersman.modes.specs import ModeOptions
from steersman.modes.tracer import Tracer
from steersman.netfilter.iptables.tool import Iptables, choose_tool
from steersman.netfilter.nft.tables import known_chains_left

log = logging.getLogger(__name__)
_NUMBER = re.compile(r"\d+")
_ADDRESS_SET_KEYS = frozenset(map(SetKey, ADDRESS_SETS))


class IpvsMode(Mode):
    """Programs virtual servers over netlink, sets with ipset, and a few rules with iptables."""

    name = "ipvs"
    carrier: IpvsConnections
    traits = Traits(
        filters_without_endpoints=True,
        rejects_unknown_ports=True,
        assigns_vips=True,
        reads_addresses=True,
        one_health_check_port=True,
    )

    def __init__(self, execute: Exec, options: ModeOptions | None = None) -> None:
        """Create the mode; no socket is opened before `probe`.

        Args:
            execute: runs ipset and iptables.
            options: operator settings; None for the defaults of a node in this mode.
        """
        self._execute = execute
        options = options or ModeOptions(asked_for=self.name)
        self._options = options.ipvs
        self._variant = options.iptables_variant
        self._loads = options.asked_for == self.name  # else the node does without ip_vs
        self._families: tuple[Family, ...] = tuple(Family)
        self._random_fully = True
        self._kernel: IpvsKernel | None = None
        """None before a successful `probe`."""
        self._sockets = ExitStack()
        self._prepared = False
        self._counters = ServerCounters()
        self.carrier = IpvsConnections(self._probed)

    # Start and end

    def probe(self) -> Support:
        """Check for ip_vs, its scheduler, ipset, iptables and its matches; open the sockets."""
        self.close()
        options, loads = self._options, self._loads
        with ExitStack() as sockets:
            netlink = sockets.enter_context(Netlink(NETLINK_GENERIC))
            family, missing = find_family(self._execute, netlink, loads=loads)
            missing = missing or check_ipset(self._execute)
            missing = missing or check_scheduler(netlink, family, options.scheduler)
            if missing:
                return Support(usable=False, missing=(missing,))
            choice = choose_tool(self._execute, self._variant, leftovers=not loads)
            if choice.tool is None:
                return Support(usable=False, missing=choice.missing)
            iptables = Iptables(self._execute, choice.tool)
            if loads and (missing := check_matches(self._execute, iptables)):
                return Support(usable=False, missing=(missing,))
            idle = (options.tcp_timeout, options.tcp_fin_timeout, options.udp_timeout)
            if any(idle):
                netlink.request(timeouts(family, *idle))

            self._families = choice.families
            self._random_fully = choice.tool.random_fully
            self._kernel = IpvsKernel(
                servers=VirtualServers(netlink, family),
                device=AddressDevice(sockets.enter_context(Netlink(NETLINK_ROUTE)), DEVICE),
                sets=Ipsets(self._execute.run_tool),
                iptables=iptables,
                netfilter=sockets.enter_context(Netlink(NETLINK_NETFILTER)),
                families=choice.families,
                excluded=options.exclude_cidrs,
            )
            self._sockets = sockets.pop_all()
        return Support(usable=True, missing=choice.missing)

    def close(self) -> None:
        """Close the sockets; the kernel keeps its virtual servers."""
        self._kernel = None
        self._sockets.close()

    def requirements(self) -> Requirements:
        """Return the sysctls that IPVS needs (behaviour 1.6); packets are delivered locally."""
        major, minor = _NUMBER.findall(os.uname().release)[:2]
        settings = ipvs_settings((int(major), int(minor)), self._options.strict_arp)
        return Requirements(
            delivery="local", own_jumps=("KUBE-IPVS-",), bridge_netfilter=True, settings=settings
        )

    def _set_sysctls(self) -> None:
        """Set the sysctls that IPVS needs (behaviour 1.6); only the first call does anything."""
        if self._prepared:
            return
        settings = self.requirements().settings
        try:
            for warning in apply(settings):
                log.warning("%s", warning)
        except SysctlError as error:
            raise BusyError(f"{error.strerror}; ipvs needs it") from error
        self._prepared = True

    # Rendering

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render sets, chains and jumps."""
        families = tuple(family for family in settings.families if family in self._families)
        settings = msgspec.structs.replace(settings, families=families)
        return render_node(settings, random_fully=self._random_fully)

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render one ServicePort's virtual servers and set entries."""
        if plan.key.family not in self._families:
            return {}
        options = self._options
        return render_service(plan, settings, options.scheduler, options.scheduler_flags)

    def _scripts(self, have: Ruleset, change: Diff) -> tuple[Script, ...]:
        """Write a Diff as input of ipset, iptables-restore, ip and ipvsadm."""
        tool = self._kernel.iptables.tool if self._kernel else None
        return scripts(have, change, tool.command if tool else "iptables")

    # The kernel

    def _probed(self) -> IpvsKernel:
        """Return the kernel's objects; `cleanup` and `plan` read without a `probe` of their own."""
        return probed(self.probe, lambda: self._kernel)

    def read(self) -> Ruleset:
        """Return our objects in the kernel, and delete real servers that are drained by now."""
        try:
            return self._read(end_drained=True)
        except ApplyError as error:
            raise BusyError(f"drained real servers cannot be deleted: {error}") from error

    def _read(self, *, end_drained: bool) -> Ruleset:
        kernel = self._probed()
        with busy("the kernel's objects cannot be read"):
            return kernel.read(end_drained=end_drained)

    @cached_property
    def words(self) -> IpvsWords:
        """What prints virtual servers as ipvsadm does."""
        return IpvsWords(self.worker, lambda: self._read(end_drained=False), self._scripts)

    def fingerprint(self) -> Hashable | None:
        """Return digests of the kernel's lists; None if a drained real server is to be deleted.

        Also None if they cannot be read: then `read` fails with the reason.
        """
        kernel = self._probed()
        try:
            return kernel.fingerprint()
        except (OSError, BusyError):
            return None

    def apply(self, change: Diff) -> None:
        """Carry out a Diff."""
        kernel = self._probed()
        if change.added:
            self._set_sysctls()
        with busy("the kernel cannot be programmed"):
            kernel.write(change)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for our device, else for our chains."""
        if has_interface(DEVICE):
            return f"the interface {DEVICE} is left"
        return known_chains_left(CHAINS, families)

    # Connections

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        """Return connections, packets and bytes so far."""
        return self._counters.stats(plans)

    def totals(self) -> NodeTotals:
        """Return connections, packets and bytes of all virtual servers."""
        return self._counters.totals()

    def find_connections(self, search: ConnectionSearch) -> Generator[None, None, None]:
        """Add the connections of virtual servers."""
        with busy("the connections of IPVS cannot be read"):
            yield from self._probed().servers.find_connections(search)

    # Failing endpoints

    def watch_failures(self) -> FailureWatch:
        """Watch packets of connections, of which conntrack does not know the translation."""
        from steersman.netfilter.failure_log import FailureLog  # noqa: PLC0415 - rarely used

        return FailureLog(self.worker, translated=False)

    # Tracing

    def tracer(self) -> Tracer:
        """Return what follows a packet through the rules, and reads the counters of IPVS."""
        return IpvsTracer(self._execute)


class IpvsConnections(Carrier):
    """The connections of virtual servers."""

    def __init__(self, kernel: Callable[[], IpvsKernel]) -> None:
        self._kernel = kernel

    def connections(self) -> int:
        """Count the established TCP and SCTP connections of virtual servers.

        Raises:
            BusyError: the kernel does not answer.
        """
        kernel = self._kernel()
        with busy("the connections of IPVS cannot be counted"):
            return kernel.servers.connections()

    def without_new_connections(self, have: Ruleset) -> Ruleset:
        """Return the objects that carry connections; virtual servers get no new ones."""
        return {
            key: msgspec.structs.replace(value, targets=(), weights=())
            if isinstance(value, Server)
            else value
            for key, value in have.items()
            if isinstance(key, ServerKey | DeviceKey) or key in _ADDRESS_SET_KEYS
        }


def create(execute: Exec, options: ModeOptions) -> IpvsMode:
    """Build the mode for registry.py."""
    return IpvsMode(execute, options)
