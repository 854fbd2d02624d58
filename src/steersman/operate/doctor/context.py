"""What the checks of doctor may use: the World, the question, this machine, and shared facts."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from steersman.compile.explain import EndpointReport
from steersman.compile.trace import Flow
from steersman.host.exec import Exec
from steersman.host.link_state import Link, list_links
from steersman.model.addresses import is_loopback
from steersman.model.names import Family, ObjectName
from steersman.model.plan import FrontendKind, ServicePlan
from steersman.model.world import World
from steersman.modes.base import Mode, Requirements
from steersman.netfilter.nft.tables import list_tables
from steersman.operate.explain_flow import FlowExplainer
from steersman.operate.names import Names
from steersman.operate.trace_lookups import look_up
from steersman.operate.trace_loss import Hop

T = TypeVar("T")


class Question(msgspec.Struct, frozen=True):
    """What the operator asked; without a Service, the whole node."""

    service: ObjectName | None = None
    port: str | None = None
    """Name or number of one port; None for all of them."""
    flow: Flow | None = None
    """A connection, if one was asked for."""
    pod: str = ""
    """The pod to dial from, as the operator named it."""
    netns: str = ""
    """Path of that pod's network namespace."""
    dial: bool = True
    """Whether connections may be made."""


class ApiReply(NamedTuple):
    """An answer of the API server."""

    status: int
    """HTTP status; 403 if the credentials may not ask this."""
    headers: Mapping[str, str]
    """By name in lower case."""
    body: Any
    """Decoded from JSON; None if it is not JSON."""


@dataclass
class Context:
    """The World, the question and this machine, for all checks of one run."""

    world: World
    """Everything known."""
    question: Question = field(default_factory=Question)
    """The operator's; about the whole node if it names nothing."""
    _: KW_ONLY
    execute: Exec
    """Runs programs, on the node of the World."""
    mode: Mode | None = None
    """The mode of the World, to read the kernel with; None if it cannot be built here."""
    list_links: Callable[[], Mapping[str, Link]] = list_links
    """Returns the interfaces of this network namespace by name."""
    look_up: Callable[[str], Hop] = look_up
    """Returns where packets to an address go next."""
    list_tables: Callable[[], list[tuple[str, str]]] = list_tables
    """Returns family and name of the tables of nft."""
    root: Path = Path("/")
    """Of the file system with /proc and /sys."""
    here: bool = True
    """Whether this machine is the node of the World. If not, the checks that look at the machine
    are skipped."""
    linux: bool = sys.platform == "linux"
    """Whether this machine runs Linux. If not, the checks that look at it are skipped."""
    now: Callable[[], float] = time.time
    """Returns the time, in seconds since 1970."""
    ask_api: Callable[[str], Awaitable[ApiReply]] | None = None
    """Sends a GET request to the API server; None if it is not known."""
    renew: Callable[..., Awaitable[World]] | None = None
    """Returns the World as it is now (`world_again`); None if it cannot change."""
    server_pid: int = 0
    """Of the running process, in the pid namespace of this one; 0 if none runs or it cannot be seen
    from here."""
    _shared: dict[object, asyncio.Future[Any]] = field(default_factory=dict, init=False)

    async def once(self, fact: Callable[[Context], Awaitable[T]]) -> T:
        """Return what `fact` returns for this context; it is called once for all checks.

        An exception is shared, too. The fact goes on if a check that waits for it is cancelled.
        """
        if (found := self._shared.get(fact)) is None:
            found = self._shared[fact] = asyncio.ensure_future(fact(self))
            # If a fact fails after every check stopped waiting for it, that does not matter.
            found.add_done_callback(lambda done: done.cancelled() or done.exception())
        result: T = await asyncio.shield(found)
        return result

    async def aclose(self) -> None:
        """End the facts that nobody waits for any more."""
        for task in self._shared.values():
            task.cancel()
        await asyncio.gather(*self._shared.values(), return_exceptions=True)

    @cached_property
    def plans(self) -> tuple[ServicePlan, ...]:
        """The plans that the question is about; all of them if it names no Service."""
        return self.plans_of(self.world)

    def plans_of(self, world: World) -> tuple[ServicePlan, ...]:
        """Return those plans as a World has them."""
        asked, plans = self.question, world.plan.services.items()
        if asked.service is None:
            return tuple(plan for _, plan in plans)
        return tuple(
            plan
            for key, plan in plans
            if key.name.object_name == asked.service
            and asked.port in (None, key.name.port, *(str(f.port) for f in plan.frontends))
        )

    @cached_property
    def _explainer(self) -> FlowExplainer:
        return FlowExplainer(self.world, Names(self.world))

    def report(self, plan: ServicePlan) -> EndpointReport:
        """Return all endpoints of a ServicePort, those that are not used included, and why."""
        return self._explainer.report(plan.key, self._explainer.names.here)

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """The families that the question is about: a node may serve one that no Service has."""
        families = self.world.plan.settings.families
        used = {plan.key.family for plan in self.plans}
        return tuple(family for family in families if not used or family in used)

    @cached_property
    def endpoint_addresses(self) -> Mapping[str, bool]:
        """The addresses of all endpoints in use, and whether they are on this node."""
        plans = self.world.plan.services.values()
        return {end.ip: end.local for plan in plans for end in plan.reachable}

    @cached_property
    def service_addresses(self) -> tuple[str, ...]:
        """The addresses of Services that the question is about, sorted."""
        found = {frontend.address for plan in self.plans for frontend in plan.frontends}
        return tuple(sorted(found - {""}))

    def own_addresses(self, family: Family) -> list[str]:
        """Return the addresses of this node that others may use."""
        own = self.world.plan.settings.family(family).local_addresses
        return [address for address in own if not is_loopback(address)]

    @cached_property
    def node_ports(self) -> frozenset[int]:
        """Numbers of the node ports that the question is about."""
        return frozenset(
            frontend.port
            for plan in self.plans
            for frontend in plan.frontends
            if frontend.kind is FrontendKind.NODE_PORT
        )

    def requirements(self) -> Requirements:
        """Return what the mode needs of the node; the defaults if the mode cannot be built."""
        return self.mode.requirements() if self.mode else Requirements()

    def path(self, name: str) -> Path:
        """Return a file of the node, such as `proc/sys/net/ipv4/ip_forward`."""
        return self.root / name

    def read(self, name: str) -> str:
        """Return the content of a file of the node without white space at its ends; see `path`.

        Raises:
            OSError: it cannot be read.
        """
        return self.path(name).read_text(errors="replace").strip()
