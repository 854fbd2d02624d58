"""Check of other proxies on the node: their processes, their ports, and the rules they write."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from steersman.host.listening import listening_sockets
from steersman.model.names import Family
from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Ruleset
from steersman.modes.base import Mode, leftovers_of
from steersman.modes.specs import ModeOptions
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.processes import (
    ELSEWHERE,
    Owner,
    processes,
    proxies_services,
    sees_processes,
    socket_owners,
)
from steersman.operate.doctor.result import Cause, CheckResult, Found, error, ok, unknown, warning
from steersman.run.process.mode_transition import other_modes

_NAMES = frozenset({"kube-proxy", "kube-router", "cilium-agent"})
"""Names of processes that may program Services, in /proc/PID/comm."""
_BUILT_IN = ("k3s", "kubelite")
"""Programs with a kube-proxy inside, by the start of their name; they have its ports."""
_PORTS = {10249: "metrics", 10256: "health checks"}
_REMOVED_AFTER = 180.0
"""Seconds after the start in which our process removes the rules of other modes."""
_STOP = "stop one of them: delete its DaemonSet, or stop its unit"


async def other_proxy(context: Context) -> Found:
    """Check that no other program proxies Services on this node."""
    proc = context.path("proc")
    ours = {context.server_pid, os.getpid()}
    others = [
        each
        for each in await context.once(processes)
        if each.name in _NAMES and each.pid not in ours
    ]
    results: list[CheckResult] = []
    for each in others:
        proxies = await asyncio.to_thread(proxies_services, each, proc)
        if proxies:
            text = f"another proxy runs on this node: {each}; both rewrite the rules of Services"
            results.append(error(text, remedy=_STOP))
        elif proxies is None:
            results.append(unknown(f"whether {each} proxies Services could not be read"))
    ours |= {each.pid for each in others}
    all_seen = await asyncio.to_thread(sees_processes, proc)
    results += await _port_owners(context, ours, all_seen)
    # Objects of other modes, ours or kube-proxy's, that still handle the Service.
    if context.mode is not None:
        modes = other_modes(
            context.world.mode, context.execute, context.world.variant, ModeOptions()
        )
        looks = [_leftovers(context, name, mode) for name, mode in modes]
        results += [found for found in await asyncio.gather(*looks) if found]
    if not all_seen:
        results.append(unknown(f"processes of other proxies cannot be seen: {ELSEWHERE}"))
    return results or ok("no other proxy runs here, and none has left rules")


async def _port_owners(context: Context, ours: set[int], all_seen: bool) -> list[CheckResult]:
    """Return who listens on the ports of a kube-proxy, if it is not our process."""
    proc = context.path("proc")
    listening = await asyncio.to_thread(listening_sockets, proc)
    held = {s: inode for s, inode in listening.items() if s.port in _PORTS}
    owners = await asyncio.to_thread(socket_owners, frozenset(held.values()), proc)
    # A process that cannot be seen may be ours, unless ours was seen.
    runs_unseen = context.world.process is not None and not context.server_pid
    results: dict[Owner | None, CheckResult] = {}
    for sock, inode in held.items():
        owner = owners.get(inode)
        purpose = f"listens on {sock.port}, the port for {_PORTS[sock.port]} of a kube-proxy"
        if owner is None:
            if not all_seen and not runs_unseen:
                text = f"a process that cannot be seen {purpose}: it may be one"
                remedy = f"see on the node who it is: `ss -lntp sport = {sock.port}`"
                results[owner] = warning(text, remedy=remedy, suspect=True)
        elif owner.pid in ours:
            continue
        elif owner.command.split(" ", 1)[0].rpartition("/")[2].startswith(_BUILT_IN):
            text = f"another proxy runs on this node: {owner} {purpose}, which is built into it"
            remedy = "turn it off: --disable-kube-proxy for the servers of k3s"
            results[owner] = error(text, remedy=remedy)
        else:
            remedy = "find out who it is, and stop it if it proxies Services"
            results[owner] = warning(f"{owner} {purpose}: it may be one", remedy=remedy)
    return list(results.values())


async def _leftovers(context: Context, name: str, mode: Mode) -> CheckResult | None:
    """Report objects that another mode left; an error if they lead to other endpoints."""
    left = await mode.worker.do(leftovers_of, mode, tuple(Family))
    if not left:
        return None
    support = await mode.worker.do(mode.probe)
    if not support.usable:
        return unknown(f"rules of the {name} mode may be left: {left}")
    # Some modes recognise texts in the kernel only if they have rendered them before.
    settings = context.world.plan.settings
    mode.render_node(settings)
    words = mode.words
    have = await words.leftovers()
    if not have:
        return None
    remedy = (
        "`steersman cleanup` removes them when no proxy runs; a steersman that starts does, too"
    )
    plans = context.plans if context.question.service else ()
    if stale := _outdated(mode, plans, have, context):
        return error(
            f"rules that the {name} mode left lead {context.question.service} elsewhere: "
            f"{stale} with other endpoints than the present ones",
            left,
            remedy=remedy,
            cause=Cause.RULES - 1,
        )
    process = context.world.process
    if process and process.synced_at and context.now() - process.started > _REMOVED_AFTER:
        return warning(
            f"there are {len(have)} kernel objects of the {name} mode, which this process removes "
            "when it starts: another proxy writes them, such as kube-proxy or that inside of k3s",
            left,
            remedy=_STOP,
            suspect=True,
        )
    return warning(f"the {name} mode left {len(have)} kernel objects", left, remedy=remedy)


def _outdated(mode: Mode, plans: Iterable[ServicePlan], have: Ruleset, context: Context) -> str:
    """Count the objects of these plans that are there and not as they should be; "" for none."""
    settings = context.world.plan.settings
    plans = tuple(plans)
    wanted = mode.words.wanted(
        {k: v for plan in plans for k, v in mode.render_service(plan, settings).items()}, have
    )
    keys = set(mode.words.of_services(have, plans)) if plans else set[object]()
    wrong = [key for key in keys | (wanted.keys() & have.keys()) if wanted.get(key) != have[key]]
    return f"{len(wrong)} object{'s' * (len(wrong) > 1)}" if wrong else ""
