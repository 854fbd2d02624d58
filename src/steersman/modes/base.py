"""What a mode is: the seam between plans and the kernel."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from steersman.model.addresses import join_host_port
from steersman.model.conntrack import Confirm, Stale
from steersman.model.names import ServicePortName
from steersman.model.plan import Frontend, NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset

NODE_PORT = "nodePort:"
"""What the label of a node port begins with; it is the same in both families."""


class Support(msgspec.Struct, frozen=True):
    """Whether a mode can run on this machine."""

    usable: bool
    missing: tuple[str, ...] = ()
    """What is missing and how to get it, a sentence each."""


class Moved(NamedTuple):
    """What was passed on so far, to the endpoint and back."""

    packets_in: int
    packets_out: int
    bytes_in: int
    bytes_out: int


class Made(msgspec.Struct, frozen=True):
    """Connections made so far. A count never falls while what it is of is in the plans.

    What has counted nothing may be left out: a node meets few of a cluster's endpoints.
    """

    frontends: Mapping[tuple[ServicePortName, str], int]
    """By ServicePort and destination (see `frontend_label`)."""
    endpoints: Mapping[tuple[ServicePortName, str], int]
    """By ServicePort and endpoint, as it is printed."""
    moved_by_frontend: Mapping[tuple[ServicePortName, str], Moved] = {}
    """Packets and bytes of the same frontends, if the mode counts them."""
    moved_by_endpoint: Mapping[tuple[ServicePortName, str], Moved] = {}


class NodeTotals(msgspec.Struct, frozen=True):
    """What a mode counts for the whole node."""

    connections: int | None = None
    """Connections to endpoints of all Services; None if the mode does not count them."""
    moved: Moved | None = None
    """Packets and bytes of these connections; None if the mode does not count them."""
    events: Mapping[str, int] = {}
    """How often something happened to packets and sockets, such as drops by reason."""
    tables: Mapping[str, tuple[int, int]] = {}
    """Entries and capacity of connection tables, when they were last walked."""


class ByOthers(NamedTuple):
    """A fingerprint that only others change: our own writes leave it as it is."""

    state: Hashable


def frontend_label(frontend: Frontend) -> str:
    """Return the name of a frontend in metrics: address and port, or `nodePort:30080`."""
    if not frontend.address:
        return f"{NODE_PORT}{frontend.port}"
    return join_host_port(frontend.address, frontend.port)


class Mode(Protocol):
    """One way of programming the kernel.

    The rendering half is pure; `read` and `apply` are the only doors to the kernel.
    """

    name: str
    traits: Traits

    async def probe(self) -> Support:
        """Say whether this mode can run here, and if not, what is missing."""
        ...

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the fixed part: everything that belongs to the node."""
        ...

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render one ServicePort's part; keys never collide with another plan's."""
        ...

    async def read(self) -> Ruleset:
        """Return what the kernel has of ours, in the spelling that rendering produces.

        Raises:
            BusyError: it cannot be read now.
        """
        ...

    async def fingerprint(self) -> Hashable | None:
        """Return a token that differs whenever `read` could differ; None where there is none.

        ByOthers if our own writes do not change it: then it stays good after a write.

        Cheap: it is asked for at every check for drift, `read` only when it has changed.
        """
        ...

    async def apply(self, change: Diff) -> None:
        """Carry out a Diff, all or nothing as far as the kernel can; the only writer.

        Raises:
            ApplyError: the kernel refused it; nothing (or, between two kernel transactions, only
                a harmless part) is in force.
            BusyError: it was not tried; the same Diff can be applied again.
        """
        ...


@runtime_checkable
class Watchful(Protocol):
    """A mode that hears at once when others touch its objects."""

    async def lost(self) -> None:
        """Return when somebody else may have changed or removed objects of ours."""
        ...


@runtime_checkable
class Describing(Protocol):
    """A mode that says in its tool's own words what a Diff does."""

    def describe(self, change: Diff) -> str:
        """Print a Diff, a command a line; "" for an empty one."""
        ...


@runtime_checkable
class Preparing(Mode, Protocol):
    """A mode that needs switches of the kernel set, for which NET_ADMIN may not be enough."""

    def prepare(self) -> None:
        """Set them; `probe` has found that the mode can run.

        Raises:
            BusyError: one cannot be set.
        """
        ...


@runtime_checkable
class Counting(Protocol):
    """A mode whose kernel objects count connections."""

    async def made(self, plans: Collection[ServicePlan]) -> Made:
        """Return the connections made so far for these plans, which are (or just were) in force.

        One pass over what the kernel has counted, off the event loop; it delays no sync.

        Raises:
            BusyError: they cannot be read now.
        """
        ...


@runtime_checkable
class Totalling(Protocol):
    """A mode with counts of the whole node, whose cost does not depend on the Services."""

    async def node_totals(self) -> NodeTotals:
        """Return them.

        Raises:
            BusyError: they cannot be read now.
        """
        ...


@runtime_checkable
class PacketCounting(Protocol):
    """A mode whose rules count packets in counters with names (nfacct)."""

    def packets(self) -> Mapping[str, int]:
        """Return packets by counter, as far as there are counters; call it in a thread."""
        ...


@runtime_checkable
class Lingering(Mode, Protocol):
    """A mode whose kernel objects carry connections, which end when the objects go."""

    def kept(self, have: Ruleset) -> Ruleset:
        """Return what of a Ruleset carries connections, changed so that it takes no new ones."""
        ...

    async def connections(self) -> int:
        """How many connections there are now.

        Raises:
            BusyError: that is not known now.
        """
        ...


@runtime_checkable
class Inheriting(Protocol):
    """A mode that does not need what keeps connections of other modes going."""

    async def inherit(self) -> None:
        """Keep such connections going: the rules of another mode are about to be removed."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A mode that keeps connections in tables of its own, beside or instead of conntrack."""

    async def forget(self, stale: Stale, confirm: Confirm) -> int:
        """Cut the connections that are stale by both; return how many there were.

        Raises:
            ApplyError, BusyError: they cannot be looked at now.
        """
        ...


@runtime_checkable
class Draining(Protocol):
    """A mode whose process carries connections itself."""

    async def close(self, seconds: float = 0.0) -> int:
        """Stop taking connections, wait for those there are; how many were cut at the end."""
        ...


@runtime_checkable
class Succeeded(Protocol):
    """A mode whose process hands its sockets to the next one while both run."""

    async def succeeded(self) -> None:
        """Return once the next process has them."""
        ...
