"""Checks of the mode: can it run here, has the kernel its rules, who holds the lock, how many."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from typing import Any, NamedTuple

from steersman.host.files import is_locked, lock_holder
from steersman.host.sysctl import SysctlError, read
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.world import World
from steersman.modes.base import Mode
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import kernel_objects, read_kernel, requirements, support
from steersman.operate.doctor.processes import sees_processes
from steersman.operate.doctor.result import (
    CheckResult,
    Found,
    error,
    ok,
    skipped,
    unknown,
    warning,
)
from steersman.operate.load import moved_objects, render_services

_LOOKS, _PAUSE = 8, 0.25
"""Looks at the lock, and the seconds between two: writers hold it for milliseconds."""
_READINGS = 3
"""Readings of the kernel, as long as something differs and the rules change meanwhile."""
_PRINTED = 40
"""Lines of differences in the evidence."""


async def probe(context: Context) -> Found:
    """Check kernel modules, programs and mounts that the mode needs."""
    found = await context.once(support)
    if found is None:
        return unknown(f"the {context.world.mode} mode is not available on this machine")
    if not found.usable:
        return error(
            f"the {context.world.mode} mode cannot run here: {found.missing[0].rstrip('.')}"
            if found.missing
            else f"the {context.world.mode} mode cannot run here",
            *found.missing[1:],
            remedy="install or load the missing part, then restart steersman",
        )
    # A usable mode may lack something that only makes it worse.
    lacks = [warning(sentence.rstrip(".")) for sentence in found.missing]
    return lacks or ok("modules, programs and mounts that the mode needs are there")


class KernelRules(NamedTuple):
    """The objects of the mode in the kernel, beside those that the plan asks for."""

    have: Ruleset
    change: Diff
    """What the kernel lacks or has otherwise, as far as the question is about it."""
    compared: int
    """Number of objects that were compared."""
    changes: int = 0
    """How often the rules changed while they were read."""


async def kernel_rules(context: Context) -> KernelRules:
    """Read the kernel's rules back, and compare those of the question and of the node."""
    mode, world = context.mode, context.world
    assert mode is not None
    await context.once(support)
    rules = await _compared(context, mode, world, await context.once(kernel_objects))
    for _ in range(_READINGS - 1):
        if not rules.change or context.renew is None:
            break
        # On a busy node Services change while all of this is read: that is no fault.
        before, world = world, await context.renew(world)
        plans = before.plan, world.plan
        moved = await asyncio.to_thread(moved_objects, mode, rules.have, *plans)
        rest = _only(rules.change, _keys(rules.change) - _keys(moved))
        if not rest or not mode.changes_during_read:
            return rules._replace(change=rest)
        # What was read may be wrong, too: only what differs again does.
        rules = await _compared(context, mode, world, await read_kernel(mode, world))
        rules = rules._replace(change=_only(rules.change, _keys(rest)))
    return rules


async def _compared(context: Context, mode: Mode, world: World, have: Ruleset) -> KernelRules:
    """Compare what was just read of the kernel with the plan of a World."""
    plans, words = context.plans_of(world), mode.words
    keys = [plan.key for plan in plans]
    services = await asyncio.to_thread(render_services, mode, world.plan, keys)
    wanted = words.wanted({**mode.render_node(world.plan.settings), **services}, have)
    extra = set(words.of_services(have, plans)) - wanted.keys() if context.question.service else ()

    def differs(key: Any, value: Any) -> bool:
        # Of some objects the value does not matter: their key says all.
        same = have[key] == value
        return not same and [*words.words(key, have[key])] != [*words.words(key, value)]

    change = Diff(
        {key: value for key, value in wanted.items() if key not in have},
        {key: have[key] for key in extra},
        {k: (have[k], v) for k, v in wanted.items() if k in have and differs(k, v)},
    )
    return KernelRules(have, change, len(wanted), mode.changes_during_read)


def _keys(change: Diff) -> set[Any]:
    return {key for part in change.parts for key in part}


def _only(change: Diff, keys: Collection[Any]) -> Diff:
    """Return the part of a Diff that is about some objects."""
    return Diff(*({k: v for k, v in part.items() if k in keys} for part in change.parts))


def lines_of(mode: Mode, change: Diff) -> list[str]:
    """Return the lines by which the kernel differs, in the words of the mode's tool."""
    words = mode.words
    before = {**change.removed, **{key: old for key, (old, _) in change.changed.items()}}
    after = {**change.added, **{key: new for key, (_, new) in change.changed.items()}}

    def lines(objects: Ruleset) -> dict[str, None]:
        found = (line for key, value in objects.items() for line in words.words(key, value))
        return {f"{line.place}: {line.text}": None for line in found}

    there, planned = lines(before), lines(after)
    return [
        *(f"missing: {line}" for line in planned if line not in there),
        *(f"not planned: {line}" for line in there if line not in planned),
    ]


async def rules(context: Context) -> Found:
    """Compare the rules in the kernel with the plan."""
    found = await context.once(support)
    if context.mode is None or found is None or not found.usable:
        return unknown("the rules cannot be read: the mode cannot run here")
    try:
        kernel = await context.once(kernel_rules)
    except FileNotFoundError:  # the mode keeps its objects in files, which are not there
        pid = context.server_pid
        if pid and not await asyncio.to_thread(_shares_mounts, context, pid):
            return unknown(
                "the rules cannot be read: the running process keeps its objects in files of "
                "another mount namespace",
                remedy=f"`nsenter --mount=/proc/{pid}/ns/mnt steersman doctor`, or in its pod",
            )
        kernel = KernelRules({}, Diff({"": ""}), 0)
    whose = f"of {context.question.service}" if context.question.service else "of this node"
    if not kernel.change:
        moving = f"the rules changed {kernel.changes} times while they were read"
        evidence = (moving,) if kernel.changes else ()
        return ok(f"all {kernel.compared} kernel objects {whose} are as planned", *evidence)
    change = kernel.change
    remedy = "start steersman, which writes them again"
    if context.world.process is not None:
        remedy = (
            "a running steersman repairs this at its next comparison; `steersman drift` shows who "
            "changed the rules"
        )
    if not kernel.have:
        return error(f"the kernel has no rules of the {context.world.mode} mode", remedy=remedy)
    counts = (
        (len(change.added), "missing"),
        (len(change.changed), "different"),
        (len(change.removed), "not planned"),
    )
    words = ", ".join(f"{count} {what}" for count, what in counts if count)
    text = f"the kernel's rules {whose} are not as planned: {words}"
    return error(text, *lines_of(context.mode, change)[:_PRINTED], remedy=remedy)


def _shares_mounts(context: Context, pid: int) -> bool:
    """Return whether this process sees the files of another one."""
    try:
        theirs = context.path(f"proc/{pid}/ns/mnt").stat().st_ino
        return theirs == context.path("proc/self/ns/mnt").stat().st_ino
    except OSError:  # it has ended, or may not be looked at
        return True


async def lock(context: Context) -> Found:
    """Check that no program keeps the lock that writers of the rules need."""
    # Programs that `probe` runs wait for this very lock: the path may be known without them.
    path = context.requirements().lock or (await context.once(requirements)).lock
    if not path:
        return skipped("writers of these rules need no lock")
    path = os.environ.get("XTABLES_LOCKFILE", path)
    file, proc = context.path(path.lstrip("/")), context.path("proc")
    seen = sees_processes(proc)
    # Every writer holds the lock for a moment: only one that never lets go is a fault.
    holders = []
    for look in range(_LOOKS):
        if look:
            await asyncio.sleep(_PAUSE)
        if seen:
            holder = lock_holder(file, proc)
        else:
            # The kernel lists the locks of our own pid namespace only.
            holder = " by a process that cannot be seen from here" * is_locked(file)
        if not holder:
            return ok(f"nobody keeps {path}") if seen else _free(context, path)
        holders.append(holder)
    held = [f"held{holder}" for holder in dict.fromkeys(holders)]
    if len(held) == 1:
        text = f"{path} is kept locked{holders[-1]}: no rule can be written"
        return error(text, *held, remedy="end that process, or wait until it ends")
    text = f"{path} was locked at each of {_LOOKS} looks: writing rules takes long"
    remedy = "let fewer programs write rules, or use a mode without a lock"
    return warning(text, *held, remedy=remedy)


def _free(context: Context, path: str) -> CheckResult:
    """Judge a lock that is free, as a container sees it."""
    mounts = {line.split()[4] for line in context.read("proc/self/mountinfo").splitlines()}
    if path in mounts:
        return ok(f"nobody keeps {path}")
    return unknown(f"{path} is not that of the node here: a container has to mount it")


async def number_of_rules(context: Context) -> Found:
    """Check that packets do not pass too many rules one by one."""
    needs = await context.once(requirements)
    if not needs.most_rules:
        return skipped("the number of rules does not slow this mode down")
    kernel = await context.once(kernel_rules)
    # A value is the text of one or several rules; empty chains cost nothing.
    count = sum(str(value).count("\n") + 1 for value in kernel.have.values() if value)
    if count <= needs.most_rules:
        return ok(f"{count} rules")
    return warning(
        f"there are {count} rules, more than {needs.most_rules}: new connections are slow, and "
        "so is every sync",
        remedy=needs.instead,
        suspect=True,
    )


async def settings_of_mode(context: Context) -> Found:
    """Check the sysctls that the mode sets when it starts."""
    results: list[CheckResult] = []
    wanted = (await context.once(requirements)).settings
    for setting in wanted:
        try:
            value = read(setting.path, context.root)
        except SysctlError as failure:
            results.append(unknown(str(failure)))
            continue
        if value != setting.value and not (setting.at_least and value > setting.value):
            text = f"/{setting.path} is {value}, not {setting.value}"
            remedy = f"`echo {setting.value} >/{setting.path}`, and find out who changed it"
            results.append(warning(text, remedy=remedy, suspect=True))
    if not wanted:
        return skipped("this mode sets none")
    return results or ok(f"all {len(wanted)} sysctls of the mode are set")
