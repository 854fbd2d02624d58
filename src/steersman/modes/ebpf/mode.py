"""The ebpf mode: programs of devices and sockets, and the maps that they read."""

from __future__ import annotations

import errno
from collections.abc import Collection, Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from steersman.host.exec import Exec
from steersman.host.worker import finish
from steersman.model.connections import ConnectionSearch
from steersman.model.conntrack import Stale
from steersman.model.errors import TRANSIENT_ERRNOS, ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.base import ByOthers, Mode, Requirements, Support
from steersman.modes.capabilities import Carrier, ConnectionTable
from steersman.modes.ebpf import left_at, loader, render
from steersman.modes.ebpf.bpf import FullError
from steersman.modes.ebpf.counts import StaleConnections, Tracking
from steersman.modes.ebpf.datapath import Datapath, EbpfOptions
from steersman.modes.ebpf.layout import CONFIG_GUARD_NODE_PORTS, NODE_VALUE, Kind, kind_of
from steersman.modes.ebpf.nat_hooks import TABLE, NatHookGuard
from steersman.modes.ebpf.pins import LockedError
from steersman.modes.ebpf.probe import probe
from steersman.modes.ebpf.sockets import destroy
from steersman.modes.ebpf.watcher import DeviceWatcher
from steersman.modes.specs import ModeOptions

if TYPE_CHECKING:
    from steersman.modes.ebpf.failures import EbpfFailures
    from steersman.modes.ebpf.trace import EbpfTracer
    from steersman.modes.ebpf.words import EbpfWords

# Errors that say nothing about the written objects. EPERM may: some processes are allowed to
# write maps, but not to load programs.
_BUSY = TRANSIENT_ERRNOS | {errno.EBUSY, errno.EMFILE, errno.ENFILE}


class EbpfMode(Mode):
    """Writes BPF maps; the programs that read them stay when the process ends."""

    name = "ebpf"
    nat_hooks: NatHookGuard
    carrier: Connections
    traits = Traits(
        reads_addresses=True,
        filters_without_endpoints=True,
        rejects_unknown_ports=True,
        drops_unassigned_addresses=True,
        localhost_node_ports=True,
    )

    def __init__(self, execute: Exec, options: EbpfOptions | None = None) -> None:
        """Open nothing before it is used.

        Args:
            execute: runs nft, for connections of other modes, and other tools for `tracer`.
            options: places and features.
        """
        self._execute = execute
        self._options = options or EbpfOptions()
        self.datapath = Datapath(self._options)
        self.nat_hooks = NatHookGuard(execute)
        self._programs = render.Programs(
            b"", self._options.guard_node_ports, self._options.fast_path
        )
        self._watcher = DeviceWatcher(self.datapath, self.nat_hooks)
        self.connection_table = self.carrier = Connections(self.datapath, self._watcher)

    def probe(self) -> Support:
        """Check the kernel, its configuration and the installed files."""
        options = self._options
        return probe(options.file, options.cgroup, pins=options.pins.parent)

    def requirements(self) -> Requirements:
        """Return that netfilter sees packets after the programs, with the endpoint's address."""
        return Requirements(delivery="translated", own_tables=frozenset({TABLE}))

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the node's objects."""
        if not self._programs.digest and self._options.file.exists():
            digest = loader.digest(self._options.file)
            self._programs = msgspec.structs.replace(self._programs, digest=digest)
        return render.render_node(settings, self._programs)

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:  # noqa: ARG002 - the Mode protocol
        """Render one ServicePort."""
        return render.render_service(plan)

    @cached_property
    def words(self) -> EbpfWords:
        """What prints entries of the pinned maps."""
        from steersman.modes.ebpf.words import EbpfWords  # noqa: PLC0415 - rarely used

        return EbpfWords(self.worker, self._options.pins, self.datapath.is_attached)

    def read(self) -> Ruleset:
        """Read the maps, and whether the programs are attached."""
        with explained():
            return self.datapath.read()

    def fingerprint(self) -> Hashable:
        """Return how often programs were missing; others write none of our maps."""
        with explained():
            return ByOthers(self.datapath.fingerprint())

    def apply(self, change: Diff) -> None:
        """Write the maps, then attach the programs; to remove everything, detach them first."""
        with explained():
            self.datapath.apply(change)
        if Kind.CONFIG.value in change.removed:
            self.nat_hooks.remove(even_if_used=True)
        if not self._watcher.running:
            self.worker.keep(self._watcher.run())

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        """Return connections by frontend and endpoint."""
        with explained():
            stats = yield from self.datapath.while_open(lambda tracking: tracking.stats(plans))
        return stats or ConnectionStats({}, {})

    def totals(self) -> NodeTotals:
        """Return the programs' event counters, and the fill level of the map of flows."""
        with explained():
            tracking = self.datapath.tracking
            return tracking.totals() if tracking else NodeTotals()

    def free_node_ports(self, have: Ruleset) -> Ruleset:
        """Let processes of the node bind node ports, a proxy of ours among them."""
        if not (config := have.get(Kind.CONFIG.value)):
            return have
        *addresses, flags, interface, prefix = NODE_VALUE.unpack(config)
        flags &= ~CONFIG_GUARD_NODE_PORTS
        return {**have, Kind.CONFIG.value: NODE_VALUE.pack(*addresses, flags, interface, prefix)}

    def find_connections(self, search: ConnectionSearch) -> Generator[None, None, None]:
        """Add the connections whose packets are rewritten, and those of balanced sockets."""
        with explained():
            yield from self.datapath.while_open(lambda each: each.find_connections(search))

    def watch_failures(self) -> EbpfFailures:
        """Return what sees connections fail, at sockets and as packets."""
        from steersman.modes.ebpf.failures import EbpfFailures  # noqa: PLC0415 - rarely used

        return EbpfFailures(self.worker, self.datapath.pins.maps)

    def tracer(self) -> EbpfTracer:
        """Return what watches a packet beside the programs, whichever process has loaded these."""
        from steersman.modes.ebpf.trace import EbpfTracer  # noqa: PLC0415 - rarely used

        return EbpfTracer(self.worker, self._options, self._execute)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for the directory of our pins."""
        del families
        return left_at(self._options.pins)

    def close(self) -> None:
        """Close the maps and programs, which keep working."""
        self.datapath.close()


class Connections(ConnectionTable[StaleConnections], Carrier):
    """The connections that the programs keep.

    Those whose packets are rewritten end with the programs; those of balanced sockets go on alone.
    """

    def __init__(self, datapath: Datapath, watcher: DeviceWatcher) -> None:
        self._datapath = datapath
        self._watcher = watcher
        self._searched: Tracking | None = None

    def find_stale(self, stale: Stale) -> Generator[None, None, StaleConnections | None]:
        """Look for connections to endpoints that are gone."""
        self._searched = self._datapath.tracking
        with explained():
            return (yield from self._datapath.while_open(lambda each: each.find_stale(stale)))

    def delete_stale(self, found: StaleConnections, stale: Stale) -> int:
        """Cut them; unconnected sockets get another endpoint."""
        tracking = self._datapath.tracking
        if tracking is None or tracking is not self._searched:
            raise BusyError("ebpf: the programs were replaced in the meantime")
        with explained():
            cut, sockets = tracking.delete_stale(found, stale)
            return cut + destroy(sockets)

    def connections(self) -> int:
        """Count those whose packets are rewritten."""
        with explained():
            return finish(self._datapath.while_open(Tracking.count_open)) or 0

    def without_new_connections(self, have: Ruleset) -> Ruleset:
        """Keep what carries the present connections: programs, without frontends."""
        kinds = (Kind.CONFIG, Kind.PROGRAMS)
        return {key: value for key, value in have.items() if kind_of(key) in kinds}

    def hold_ports(self) -> None:
        """Give each masqueraded connection an entry of conntrack."""
        self._watcher.hold_ports()


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors of the maps and the kernel into ApplyError or BusyError."""
    try:
        yield
    except LockedError as error:
        raise BusyError(f"ebpf: {error}") from error
    except FullError as error:
        raise ApplyError(f"ebpf: a map is full: {error}") from error
    except OSError as error:
        if error.errno in _BUSY:
            raise BusyError(f"ebpf: {error}") from error
        raise ApplyError(f"ebpf: {error}") from error


def create(execute: Exec, options: ModeOptions) -> EbpfMode:
    """Build the mode for registry.py."""
    wanted = EbpfOptions(
        cgroup=Path(options.cgroup_root) if options.cgroup_root else None,
        guard_node_ports=options.guard_node_ports,
        fast_path=options.fast_path,
        xdp_devices=options.xdp_devices,
    )
    return EbpfMode(execute, wanted)
