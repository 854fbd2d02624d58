"""The ebpf mode as the rest of the program sees it (modes/base.py)."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Collection, Hashable, Iterable
from pathlib import Path
from typing import TypeVar

from steersman.host.exec import Exec
from steersman.model.conntrack import Confirm, Stale
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.base import ByOthers, Mode, Support
from steersman.modes.ebpf import loader, render
from steersman.modes.ebpf.attach import HeldError
from steersman.modes.ebpf.bpffs import mount
from steersman.modes.ebpf.engine import EbpfOptions, Engine, Inside
from steersman.modes.ebpf.hold import Hold
from steersman.modes.ebpf.keeper import Keeper
from steersman.modes.ebpf.layout import Kind
from steersman.modes.ebpf.probe import probe
from steersman.modes.ebpf.slots import FullError
from steersman.modes.ebpf.sockets import destroy
from steersman.modes.specs import ModeOptions

T = TypeVar("T")

_BUSY = frozenset(
    {
        *(errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOBUFS),
        *(errno.EMFILE, errno.ENFILE),
    }
)
"""What has nothing to do with the objects that are written. EPERM may: of programs only, say, while
maps can be written."""
_INLINE = 64  # objects up to which the system calls are not worth a thread


class EbpfMode(Mode):
    """Programs BPF maps; the programs that read them stay when we go."""

    name = "ebpf"
    has_connection_table = True
    traits = Traits(
        reads_addresses=True,
        filters_without_endpoints=True,
        rejects_unknown_ports=True,
        drops_unassigned_addresses=True,
        localhost_node_ports=True,
    )

    def __init__(
        self, execute: Exec, options: EbpfOptions | None = None, inside: Inside | None = None
    ) -> None:
        """Make the mode; nothing is opened before it is used.

        Args:
            execute: runs nft, to keep connections of other modes.
            options: where it works.
            inside: the network namespace of the node (another than ours, in tests).
        """
        self._options = options or EbpfOptions()
        inside = inside or Inside()
        self.engine = Engine(self._options, inside)
        self._hold = Hold(execute, inside.netfilter)
        self._lock = asyncio.Lock()
        self._programs = render.Programs(b"", self._options.guard_node_ports)
        self._keeper = Keeper(self.engine, self._hold, self._lock)

    async def probe(self) -> Support:
        """Say whether this kernel, and what is installed, can do it."""
        options = self._options
        pins = options.pins.parent
        return await asyncio.to_thread(probe, options.file, options.cgroup, pins=pins)

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render what belongs to the node."""
        if not self._programs.digest and self._options.file.exists():
            digest = loader.digest(self._options.file)
            self._programs = render.Programs(digest, self._options.guard_node_ports)
        return render.render_node(settings, self._programs)

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:  # noqa: ARG002 - the Mode protocol
        """Render one ServicePort."""
        return render.render_service(plan)

    async def read(self) -> Ruleset:
        """Read the maps, and whether the programs are at their places."""
        async with self._lock:
            return await asyncio.to_thread(guarded, self.engine.read)

    async def fingerprint(self) -> Hashable | None:
        """Tell whether the programs are in place; nobody else writes our maps."""
        async with self._lock:
            return ByOthers(await asyncio.to_thread(guarded, self.engine.fingerprint))

    async def apply(self, change: Diff) -> None:
        """Write the maps; attach the programs after that, and detach them before."""
        async with self._lock:
            if Kind.PROGRAMS.value in change.added and not self.engine.pins.exist:
                await asyncio.to_thread(mount, self._options.pins.parent)
            if len(change) <= _INLINE and self.engine.tables is not None and _is_plain(change):
                guarded(lambda: self.engine.apply(change))
            else:
                await asyncio.to_thread(guarded, lambda: self.engine.apply(change))
        if Kind.CONFIG.value in change.removed:
            await self._hold.let_go(even_if_used=True)
        self._keeper.keep_going()

    async def stats(self, plans: Collection[ServicePlan]) -> ConnectionStats:
        """Return connections by frontend and endpoint; syncs go on meanwhile."""
        async with self._lock:
            tracking = self.engine.tracking
            if tracking is None:
                return ConnectionStats({}, {})
            reading = guarded(tracking.reading)

        def read() -> ConnectionStats:
            try:
                return guarded(lambda: reading.stats(plans))
            finally:
                reading.close()

        return await asyncio.shield(asyncio.to_thread(read))  # which ends in any case

    async def node_totals(self) -> NodeTotals:
        """Return the programs' counters of events, and how full the table of flows is."""
        async with self._lock:
            tracking = self.engine.tracking
            return guarded(tracking.totals) if tracking else NodeTotals()

    async def flush_stale(self, stale: Stale, confirm: Confirm) -> int:
        """Cut connections to endpoints that are gone; sockets that only send choose again."""
        async with self._lock:
            tracking = self.engine.tracking
            if tracking is None:
                return 0
            found = await asyncio.to_thread(guarded, lambda: tracking.find(stale))
        if not found:
            return 0
        fresh = await confirm()
        async with self._lock:
            if tracking is not self.engine.tracking:
                raise BusyError("ebpf: the programs were exchanged meanwhile")
            cut, sockets = await asyncio.to_thread(guarded, lambda: tracking.forget(found, fresh))
        return cut + await asyncio.to_thread(guarded, lambda: destroy(sockets))

    def without_new_connections(self, have: Ruleset) -> Ruleset:
        """What carries the connections that there are: programs, without destinations."""
        kinds = (Kind.CONFIG, Kind.PROGRAMS)
        return {key: value for key, value in have.items() if key[:1] in kinds}

    async def connections(self) -> int:
        """How many connections are carried by packets; those that sockets made need nobody."""
        async with self._lock:
            tracking = self.engine.tracking
            return await asyncio.to_thread(guarded, tracking.connections) if tracking else 0

    async def hold_nat_hooks(self) -> None:
        """Keep the connections going that netfilter translates for a mode which is left."""
        await self._hold.take()

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for the directory of our pins."""
        del families
        path = self._options.pins
        try:
            os.stat(path)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{path} cannot be looked at: {error.strerror}"
        return f"{path} is left"

    async def aclose(self, drain: float = 0.0) -> int:
        """Close all descriptors; the attached programs go on working."""
        self._keeper.stop()
        self.engine.close()
        return await super().aclose(drain)


def _is_plain(change: Diff) -> bool:
    """Whether a Diff only writes maps: programs on devices wait for the kernel."""
    parts = (change.added, change.removed, change.changed)
    return not any(kind.value in part for part in parts for kind in (Kind.CONFIG, Kind.PROGRAMS))


def guarded(work: Callable[[], T]) -> T:
    """Do something with the kernel; errors become those of the Mode protocol."""
    try:
        return work()
    except HeldError as error:
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
        xdp_devices=options.xdp_devices,
    )
    return EbpfMode(execute, wanted)
