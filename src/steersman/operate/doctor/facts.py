"""Slow facts about the node that several checks share (Context.once)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from steersman.compile.trace import classify
from steersman.host.exec import Exec, Result
from steersman.host.link_state import Link
from steersman.model.errors import BusyError
from steersman.model.plan import Endpoint, Frontend, ServicePlan, SourceClass, Verdict
from steersman.model.ruleset import Ruleset
from steersman.model.world import World
from steersman.modes.base import Mode, Requirements, Support
from steersman.netfilter.firewall.read import Firewall, read_firewall
from steersman.operate.doctor.context import Context
from steersman.operate.trace_loss import Hop

_MOST_ENDPOINTS = 64
"""Endpoints of a ServicePort whose ways are looked at."""
_MOST_PATHS = 400
"""Ways that are looked at if the question is about the whole node."""


async def support(context: Context) -> Support | None:
    """Return what `probe` of the mode says; None if the mode cannot be built here."""
    mode = context.mode
    return await mode.worker.do(mode.probe) if mode else None


async def requirements(context: Context) -> Requirements:
    """Return what the mode needs of the node, as it is known after `probe`."""
    await context.once(support)
    return context.requirements()


class SharedListings:
    """An Exec; what lists all rules for the mode also answers the check of firewalls, once.

    With thousands of Services, such a listing takes a second and has megabytes.
    """

    def __init__(self, execute: Exec) -> None:
        self._execute = execute
        self._listed: dict[str, Result] = {}
        self._given: set[str] = set()

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        """Return what the mode was told by the same program, or run it; see `Exec.run`."""
        if (listed := self._listed.pop(argv[0], None)) is not None:
            self._given.add(argv[0])
            return listed
        return await self._execute.run(argv, stdin, timeout=timeout)

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        """Run a program for the mode, and keep what it lists; see `Exec.run_tool`."""
        result = self._execute.run_tool(argv, stdin, timeout=timeout)
        if argv[0].endswith("-save") and not result.returncode and argv[0] not in self._given:
            self._listed[argv[0]] = result
        return result


async def kernel_objects(context: Context) -> Ruleset:
    """Return the mode's objects in the kernel. Raises as `KernelWords.read`."""
    mode = context.mode
    assert mode is not None
    return await read_kernel(mode, context.world)


async def rules_are_listed(context: Context) -> None:
    """Wait until the mode has had iptables-save list all rules, if it does that.

    With thousands of Services it takes a second. It begins again if nf_tables change meanwhile.
    """
    needs = await context.once(requirements)
    if context.mode is not None and needs.own_jumps:
        with suppress(BusyError, OSError):  # a check of the rules says why
            await context.once(kernel_objects)


async def read_kernel(mode: Mode, world: World) -> Ruleset:
    """Return the mode's objects in the kernel as they are now. Raises as `KernelWords.read`."""
    # Some modes recognise texts in the kernel only by having rendered them.
    mode.render_node(world.plan.settings)
    return await mode.words.read()


async def interfaces(context: Context) -> Mapping[str, Link]:
    """Return the interfaces of the node by name."""
    return await asyncio.to_thread(context.list_links)


async def hop(context: Context, address: str) -> Hop:
    """Return where packets of the node to an address go next."""
    return await asyncio.to_thread(context.look_up, address)


# Paths


class Path(NamedTuple):
    """A way that packets of the question take: from a class of clients to an endpoint."""

    plan: ServicePlan
    frontend: Frontend
    source: SourceClass
    endpoint: Endpoint
    masquerade: bool


async def paths(context: Context) -> tuple[Path, ...]:
    """Return the ways of packets that the question is about; one for each endpoint and class."""
    most = None if context.question.service else _MOST_PATHS
    return tuple(islice(_paths(context), most))


def _paths(context: Context) -> Iterable[Path]:
    flow = context.question.flow
    asked = classify(context.world.plan.settings, flow) if flow else None
    for plan in context.plans:
        for frontend in plan.frontends:
            if flow and (
                frontend.port != flow.port or frontend.address not in ("", flow.destination)
            ):
                continue
            for source in SourceClass:
                action = frontend.action(source)
                if action.verdict is not Verdict.FORWARD or asked not in (None, source):
                    continue
                for endpoint in plan.pool(action.pool)[:_MOST_ENDPOINTS]:
                    yield Path(plan, frontend, source, endpoint, action.masquerade)


async def ways(context: Context) -> dict[str, Hop]:
    """Return the ways to the endpoints of the question, by address."""
    found = await context.once(paths)
    addresses = dict.fromkeys(path.endpoint.ip for path in found)
    looked_up = await asyncio.gather(*(hop(context, address) for address in addresses))
    return dict(zip(addresses, looked_up, strict=True))


# Firewalls


async def firewall(context: Context) -> Firewall:
    """Return the rules of all programs, without tables of the mode itself."""
    needs = await context.once(requirements)
    await context.once(rules_are_listed)
    return await read_firewall(
        context.execute,
        context.families,
        needs.own_tables,
        context.root,
        context.list_tables,
        own_jumps=needs.own_jumps,
        listed_by=needs.listed_by,
    )
