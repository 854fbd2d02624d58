"""The interface of a mode: the seam between plans and the kernel.

Every mode has the eleven methods of `Mode`. What only some can do is an attribute that is None in
the others, a function or an object of capabilities.py. What commands say of kernel objects is not
part of it: words.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Generator, Hashable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from steersman.failover.watch import FailureWatch
from steersman.host.sysctl import Setting
from steersman.host.worker import Changes, KernelWorker
from steersman.model.connections import ConnectionSearch
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.capabilities import Carrier, ConnectionTable, NatHooks
from steersman.modes.tracer import Tracer
from steersman.modes.words import KernelWords

if TYPE_CHECKING:
    from steersman.netfilter.nft.generations import WriterLog
    from steersman.proxy.handoff import SocketHandoff

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
    own_jumps: tuple[str, ...] = ()
    """Beginnings of the names of its chains in tables of others."""
    listed_by: Mapping[tuple[str, Family], str] = {}
    """Programs of iptables by which `read` lists all rules, those of others too, by variant and
    family."""
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


class ByOthers(NamedTuple):
    """A fingerprint that only other programs change: our own writes keep it valid."""

    state: Hashable


class Mode(ABC):
    """One way of programming the kernel.

    The rendering half is pure; `read` and `apply` are the only access to the kernel. Any method
    that touches the kernel may raise ApplyError, BusyError or OSError, and is called through the
    mode's worker: `await mode.worker.do(mode.apply, change)`. So are the capabilities.
    """

    name: str
    traits: Traits
    variant = ""
    """Tool or flavour in use, such as `nft` or `legacy`; "" if the mode has only one."""
    changes_during_read = 0
    """How often the rules changed during the last `read`, if it puts up with that (for commands):
    it may have missed an object, and the others are of different moments."""

    @cached_property
    def worker(self) -> KernelWorker:
        """The thread in which all methods run that touch the kernel."""
        return KernelWorker()

    @cached_property
    def words(self) -> KernelWords:
        """What prints the kernel objects of this mode, after a successful `probe`."""
        return KernelWords(self.worker, self.read)

    # Capabilities

    connection_table: ConnectionTable[Any] | None = None
    """The mode's own table of connections, beside conntrack."""
    carrier: Carrier | None = None
    """The connections that end with the mode's kernel objects."""
    nat_hooks: NatHooks | None = None
    writers: WriterLog | None = None
    """The programs that change our objects, as far as the kernel names them."""
    handover: SocketHandoff | None = None
    """Hands sockets to the next process, which starts to serve while this one does."""
    drain: Callable[[float], Awaitable[int]] | None = None
    """Stop listening, on the event loop, and give connections that this process carries some
    seconds to end; return how many were cut then."""
    fill: Callable[[Iterable[Diff]], None] | None = None
    """Fill an empty kernel with Diffs that only add, in this order; raises as `apply`. Each part is
    all or nothing, and whole Services, which serve before the last part is written; the first has
    what belongs to the node."""
    read_beside: Callable[[], Ruleset] | None = None
    """Return the same as `read` in any thread, without holding up `apply`. Objects that are written
    meanwhile may be as before or as after, and others may be missing."""
    free_node_ports: Callable[[Ruleset], Ruleset] | None = None
    """Return a Ruleset changed so that another mode's sockets can bind node ports."""
    find_leftovers: Callable[[Iterable[Family]], str] | None = None
    """See `leftovers_of`. It works if `probe` fails, and creates nothing."""
    watch_failures: Callable[[], FailureWatch] | None = None
    """Return what sees connections to endpoints fail, started; BusyError says why it cannot."""
    find_connections: Callable[[ConnectionSearch], Generator[None, None, None]] | None = None
    """Add the connections that a search wants, in steps; None if they are those of conntrack."""
    tracer: Callable[[], Tracer] | None = None
    """Return what follows a packet through this mode, also in a process that has only built the
    mode, beside the one that serves."""

    # Start and end

    @abstractmethod
    def probe(self) -> Support:
        """Check whether this mode can run here."""

    def requirements(self) -> Requirements:
        """Return what the mode needs of the node while it serves; call it after `probe`."""
        return Requirements()

    def close(self) -> None:  # noqa: B027 - a default, not an abstract method
        """Close what the other methods have opened; kernel objects stay in force."""

    # Rendering: pure

    @abstractmethod
    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the fixed part: everything that belongs to the node."""

    @abstractmethod
    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render one ServicePort's part; keys never collide with another plan's."""

    # The kernel

    @abstractmethod
    def read(self) -> Ruleset:
        """Return our objects in the kernel, in the spelling that rendering produces.

        Raises:
            BusyError: they cannot be read now.
        """

    @abstractmethod
    def apply(self, change: Diff) -> None:
        """Carry out a Diff, all or nothing as far as the kernel can; the only writer.

        Raises:
            ApplyError: the kernel refused it; nothing (or, between two kernel transactions, only
                a harmless part) is in force.
            BusyError: it was not tried; the same Diff can be applied again.
        """

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

    # Counters

    def stats(
        self, plans: Collection[ServicePlan]
    ) -> Generator[None, None, ConnectionStats | None]:
        """Return the connections so far of these plans, which are (or just were) in force.

        Call it on the event loop. One pass over the kernel's counters, in steps of a few
        milliseconds for the worker. None if the mode does not count connections.

        Raises:
            BusyError: they cannot be read now.
        """
        del plans
        return None
        yield

    def totals(self) -> NodeTotals:
        """Return counts of the whole node; the cost does not depend on the number of Services.

        Raises:
            BusyError: they cannot be read now.
        """
        return NodeTotals()


def leftovers_of(mode: Mode, families: Iterable[Family]) -> str:
    """Say which objects of a mode the kernel has, without the mode's tools; "" if none. Blocks."""
    return mode.find_leftovers(families) if mode.find_leftovers is not None else ""


async def release(mode: Mode, drain: float = 0.0) -> int:
    """Release all that this process has of a mode, the thread included.

    Call it when no other call is under way.

    Args:
        drain: seconds that connections carried by this process get to end.

    Returns:
        The number of connections cut at the end.
    """
    cut = await mode.drain(drain) if mode.drain is not None else 0
    await mode.worker.do(mode.close)
    await mode.worker.close()
    return cut
