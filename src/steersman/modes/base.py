"""The interface of a mode: the seam between plans and the kernel."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Mapping,
)
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from steersman.failover.watch import FailureWatch
from steersman.host.sysctl import Setting
from steersman.host.worker import Changes, KernelWorker
from steersman.model.connections import ConnectionSearch
from steersman.model.conntrack import Stale
from steersman.model.drift import Writer
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset, Script, format_diff
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.model.tracing import TraceStep, TrackedConnection, WatchedFlow
from steersman.modes.words import KernelWords
from steersman.netfilter.conntrack.flows import find_connections

# -- Tracing ---------------------------------------------------------------------------------------
#
# The interface of a Tracer: follow one packet through the kernel.
#
#     tracer = mode.tracer()           None if the mode cannot trace
#     await tracer.start(flow)         from now on the first packet of the flow is followed
#     flow = await tracer.first_packet()
#     steps = await tracer.steps()
#     connection = await tracer.connection(flow)
#     await tracer.aclose()
#
# Whatever a Tracer puts into the kernel disappears with its process, also after kill -9, and
# nothing of it exists while nobody traces.


class Tracer(ABC):
    """Follows the first packet of a flow in the network namespace of the calling thread.

    The first packet is the one that opens the connection (TCP SYN, SCTP INIT) or the first
    datagram. Any method may raise BusyError, with a sentence, if the kernel does not allow it.
    """

    @abstractmethod
    async def start(self, flow: WatchedFlow) -> None:
        """Follow the first packet of a flow from now on; call it once.

        Raises:
            BusyError: this machine cannot do it; the message says why, and a remedy.
        """

    @abstractmethod
    async def first_packet(self) -> WatchedFlow:
        """Wait for the first packet; return its flow with the client's address and port."""

    @abstractmethod
    async def steps(self) -> tuple[TraceStep, ...]:
        """Return what the kernel has done so far with the packet, and with the first answer."""

    async def connection(self, flow: WatchedFlow) -> TrackedConnection | None:
        """Return the connection of a flow with all its addresses; None if the kernel has none."""
        del flow
        return None

    @abstractmethod
    async def aclose(self) -> None:
        """Remove everything from the kernel."""


# -- The mode --------------------------------------------------------------------------------------

T = TypeVar("T")


class Support(msgspec.Struct, frozen=True):
    """Whether a mode can run on this machine."""

    usable: bool
    missing: tuple[str, ...] = ()
    """Sentences: a missing part, and how to get it. A usable mode may have some, too."""


class Requirements(msgspec.Struct, frozen=True):
    """What a mode in service needs of its node, beside what `probe` looks for."""

    delivery: Literal["forwarded", "local", "translated"] = "forwarded"
    """Which packets of a connection netfilter's hooks see. `forwarded`: the client's, and after
    prerouting with the endpoint as destination. `local`: the client's, delivered to this node
    itself, which sends others to the endpoint. `translated`: only those to the endpoint."""
    own_tables: frozenset[str] = frozenset()
    """Names of tables of nf_tables that are the mode's own."""
    own_jumps: str = ""
    """Beginning of the names of its chains in tables of others; "" for none."""
    bridge_netfilter: bool = False
    """Whether netfilter must see what passes between two ports of a bridge: otherwise the answers
    of a pod on the client's bridge come back untranslated."""
    settings: tuple[Setting, ...] = ()
    """Kernel settings without which some traffic fails."""
    lock: str = ""
    """The file that writers of its rules lock; "" for none."""
    most_rules: int = 0
    """Rules that packets pass one by one: above this number, new connections get slow. 0 if their
    number does not matter."""
    instead: str = ""
    """What to do then."""


def probed(probe: Callable[[], Support], found: Callable[[], T | None]) -> T:
    """Return what a mode's probe has found; probe only if it has found nothing yet.

    `cleanup` and `plan` use a mode without a `probe` of their own.

    Raises:
        BusyError: the mode cannot run here now.
    """
    access = found()
    if access is None:
        support = probe()
        access = found()
        if access is None:
            raise BusyError(" ".join(support.missing))
    return access


class ConnectionTable(ABC, Generic[T]):
    """Connections that a mode keeps by itself; T is what `find_stale` finds, false if nothing.

    Both methods run in the mode's worker, and raise ApplyError or BusyError if the table cannot be
    read now.
    """

    @abstractmethod
    def find_stale(self, stale: Stale) -> Generator[None, None, T | None]:
        """Find connections that are stale, in steps."""

    @abstractmethod
    def delete_stale(self, found: T, stale: Stale) -> int:
        """Cut those of them that are stale still; return their number."""


class ByOthers(NamedTuple):
    """A fingerprint that only other programs change: our own writes keep it valid."""

    state: Hashable


class Handover(Protocol):
    """Hands sockets, which end with their process, over to the next process of the same mode."""

    async def wait(self) -> None:
        """Return when the next process has received them."""
        ...


class Mode(ABC):
    """One way of programming the kernel.

    The rendering half is pure; `read` and `apply` are the only access to the kernel. A mode
    implements the abstract methods and overrides the others for what it can do beyond them.
    Any method that touches the kernel may raise ApplyError, BusyError or OSError, and is called
    through the mode's worker: `await mode.worker.do(mode.apply, change)`.
    """

    name: str
    traits: Traits
    needs_sysctls = False
    """Whether `prepare` does something; it takes more privileges than running the mode."""
    connection_table: ConnectionTable[Any] | None = None
    """The mode's own table of connections, beside conntrack."""
    writes_in_parts = False
    """Whether Services that `apply_parts` has written serve before the last part is written."""
    handover: Handover | None = None
    """Hands sockets to the next process, which starts to serve while this one does."""
    changes_during_read = 0
    """How often the rules changed during the last `read`, if it puts up with that (for commands):
    it may have missed an object, and the others are of different moments."""

    @cached_property
    def worker(self) -> KernelWorker:
        """The thread in which all methods run that touch the kernel."""
        return KernelWorker()

    @property
    def variant(self) -> str:
        """Tool or flavour in use, such as `nft` or `legacy`; "" if the mode has only one."""
        return ""

    # Start and end

    @abstractmethod
    def probe(self) -> Support:
        """Check whether this mode can run here."""

    def requirements(self) -> Requirements:
        """Return what the mode needs of the node while it serves; call it after `probe`."""
        return Requirements()

    def prepare(self) -> None:  # noqa: B027 - a default, not an abstract method
        """Set the sysctls that the mode needs, after a successful `probe`.

        Raises:
            BusyError: one cannot be set.
        """

    def close(self) -> None:  # noqa: B027
        """Close what the other methods have opened; kernel objects stay in force."""

    async def aclose(self, drain: float = 0.0) -> int:
        """Release all resources of this process, the thread included.

        Call it when no other call is under way.

        Args:
            drain: seconds that connections carried by this process get to end.

        Returns:
            The number of connections cut at the end.
        """
        del drain
        await self.worker.do(self.close)
        await self.worker.close()
        return 0

    # Rendering: pure

    @abstractmethod
    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the fixed part: everything that belongs to the node."""

    @abstractmethod
    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render one ServicePort's part; keys never collide with another plan's."""

    def describe(self, change: Diff) -> str:
        """Print a Diff for people, in the words of the mode's tool if it has one."""
        return format_diff(change)

    def words(self) -> KernelWords:
        """Return what prints the kernel objects of this mode, after a successful `probe`."""
        return KernelWords(self.worker, self.read)

    def scripts(self, have: Ruleset, change: Diff) -> tuple[Script, ...]:
        """Write a Diff as the input of programs, in the order in which they are to run.

        For people who want to check or read it; `apply` does not use it. () if there is no program
        for the objects of this mode.

        Args:
            have: the objects in the kernel.
            change: not empty.
        """
        del have, change
        return ()

    # The kernel

    @abstractmethod
    def read(self) -> Ruleset:
        """Return our objects in the kernel, in the spelling that rendering produces.

        Raises:
            BusyError: they cannot be read now.
        """

    read_beside: Callable[[], Ruleset] | None = None
    """Return the same in any thread, without holding up `apply`, if the mode can. Objects that are
    written meanwhile may be as before or as after, and others may be missing."""

    @abstractmethod
    def apply(self, change: Diff) -> None:
        """Carry out a Diff, all or nothing as far as the kernel can; the only writer.

        Raises:
            ApplyError: the kernel refused it; nothing (or, between two kernel transactions, only
                a harmless part) is in force.
            BusyError: it was not tried; the same Diff can be applied again.
        """

    def apply_parts(self, parts: Iterable[Diff]) -> None:
        """Fill an empty kernel with Diffs that only add, in this order; raises as `apply`.

        Each part is all or nothing, and whole Services; the first has what belongs to the node.
        """
        for part in parts:
            self.apply(part)

    def fingerprint(self) -> Hashable | None:
        """Return a cheap token that differs whenever `read` could differ; None if there is none.

        Every check for drift asks for it, and calls `read` only if it changed. ByOthers means
        that our own writes do not change it, so that it stays valid after a write.
        """
        return None

    def changes(self) -> Changes | None:
        """Hear of changes of our objects by other programs; None if the mode cannot.

        The descriptor stays open until `close`.
        """
        return None

    async def wait_for_external_change(self) -> None:
        """Return when another program may have changed our objects; by default never."""
        if (changes := await self.worker.do(self.changes)) is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self.worker.wait_for(changes)

    def changed_by_others(self, key: Any) -> bool:
        """Return whether only another program can make an object differ from what was written.

        False for sockets of this process, and for what the data path itself writes.
        """
        del key
        return True

    def take_writers(self) -> tuple[Writer, ...]:
        """Return the programs that may have changed our objects since the last call.

        They are known only if the kernel names them, and while `wait_for_external_change` waits.
        """
        return ()

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Say which of our objects the kernel has, without the mode's tools; "" if none.

        Blocks; call it in a thread. It works if `probe` fails, and creates nothing.
        """
        del families
        return ""

    # Counters

    def stats(
        self, plans: Collection[ServicePlan]
    ) -> Generator[None, None, ConnectionStats | None]:
        """Return the connections so far of these plans, which are (or just were) in force.

        One pass over the kernel's counters, in steps of a few milliseconds. None if the mode does
        not count connections.

        Raises:
            BusyError: they cannot be read now.
        """
        del plans
        return None
        yield

    def node_totals(self) -> NodeTotals:
        """Return counts of the whole node; the cost does not depend on the number of Services.

        Raises:
            BusyError: they cannot be read now.
        """
        return NodeTotals()

    def packets(self) -> Mapping[str, int]:
        """Return packets by named counter (nfacct), as far as there are any; call in a thread."""
        return {}

    # Connections

    def connections(self) -> int:
        """Count connections that need the mode's kernel objects to continue.

        Raises:
            BusyError: the number is not known now.
        """
        return 0

    def find_connections(self, search: ConnectionSearch) -> Generator[None, None, None]:
        """Add the connections that a search wants, in steps; by default those of conntrack.

        Raises:
            BusyError, OSError: they cannot be read now.
        """
        return find_connections(search)

    def without_new_connections(self, have: Ruleset) -> Ruleset:
        """Return the part of a Ruleset that carries connections, changed to take no new ones."""
        del have
        return {}

    def with_free_node_ports(self, have: Ruleset) -> Ruleset:
        """Return a Ruleset changed so that another mode's sockets can bind node ports."""
        return have

    def hold_nat_hooks(self) -> None:  # noqa: B027
        """Keep NATed connections of another mode alive while its rules are removed."""

    def hold_ports(self) -> None:  # noqa: B027
        """Keep netfilter from choosing the ports of connections that this mode masquerades.

        Call it when the mode takes no new connections any more; it lasts until `aclose`.
        """

    def watch_failures(self) -> FailureWatch:
        """Return what sees connections to endpoints fail, started.

        Raises:
            BusyError: it cannot be seen here; the message says why.
        """
        raise BusyError(f"the {self.name} mode cannot see connections fail")

    # Tracing

    def tracer(self) -> Tracer | None:
        """Return what follows a packet through this mode; None if the mode cannot trace.

        It works in a process that has only built the mode, beside the one that serves.
        """
        return None
