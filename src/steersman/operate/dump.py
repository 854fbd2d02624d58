"""Compare what the kernel has for a Service with the plan, line by line (`steersman dump`)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from difflib import SequenceMatcher
from typing import Any, Literal

import msgspec

from steersman.config import ProxyConfig, to_mode_options
from steersman.host.exec import Exec, SubprocessExec
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Ruleset
from steersman.model.world import World
from steersman.modes.base import Mode, leftovers_of, release
from steersman.modes.kinds import Words
from steersman.modes.registry import create
from steersman.modes.specs import spec_of
from steersman.modes.words import KernelWords
from steersman.operate.answer import Answer, Block, Line, QuestionError
from steersman.operate.load import render_services, world_again
from steersman.operate.names import Names

State = Literal["planned", "missing", "unexpected", "context"]
_LOOKS = 3  # at a Service that changes, or rules that do, while the kernel is read
_MARKS: Mapping[State, str] = {"missing": "- ", "unexpected": "+ "}


class KernelLine(msgspec.Struct, frozen=True, rename="camel"):
    """One line of a kernel object."""

    place: str
    """Where it is, such as `iptables -t nat, chain KUBE-SERVICES`."""
    text: str
    """As the tool prints it."""
    purpose: str
    """What it is for; "" if that is not known."""
    state: State
    """As planned; missing from the kernel; unexpected there; or context, which no plan describes:
    what the others lead to."""


class KernelDump(Answer, frozen=True, kw_only=True, rename="camel"):
    """All that the kernel has for a Service."""

    service: str
    mode: str
    lines: tuple[KernelLine, ...]
    changes: int = 0
    """How often the rules changed while they were read; then lines that no plan asks for may have
    been missed. Other modes read all at one moment."""

    @property
    def missing(self) -> int:
        """The number of lines that the kernel lacks."""
        return sum(line.state == "missing" for line in self.lines)

    @property
    def unexpected(self) -> int:
        """The number of lines that no plan asks for."""
        return sum(line.state == "unexpected" for line in self.lines)

    @property
    def exit_code(self) -> int:
        """1 if the kernel differs from the plan."""
        return int(bool(self.missing or self.unexpected))

    def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002 - there are no columns
        """Yield the lines below their places, each purpose once above the lines that share it."""
        place = purpose = ""
        for line in self.lines:
            if line.place != place:
                yield Line(line.place, "title")
                purpose = ""
            if line.purpose and line.purpose != purpose:
                yield Line(f"# {line.purpose}", "dim", 4)
            place, purpose = line.place, line.purpose
            yield Line(
                f"  {_MARKS.get(line.state, '  ')}{line.text}",
                "bad" if line.state in _MARKS else "",
            )
        if self.changes:
            text = f"the rules changed {self.changes} times while they were read: "
            yield Line(f"{text}a line that no plan asks for may have been missed", "dim")
        # The verdict comes last: on a terminal it is what stays in sight.
        if self.exit_code:
            text = f"differs from the plan: lines missing (-): {self.missing}, "
            yield Line(f"{text}unexpected (+): {self.unexpected}", "bad")
        else:
            planned = sum(line.state == "planned" for line in self.lines)
            yield Line(f"as planned: {planned} lines of the {self.mode} mode", "good")


def find_service(world: World, text: str, namespace: str = "") -> ObjectName:
    """Return the Service that an operator's word means.

    Raises:
        QuestionError: it means nothing known, several things, or no Service.
    """
    found = Names(world, namespace).resolve_service(text)
    assert found.name is not None
    return found.name


async def dump_service(
    world: World,
    name: ObjectName,
    config: ProxyConfig,
    execute: Exec | None = None,
    renew: Callable[[World], Awaitable[World]] = world_again,
) -> KernelDump:
    """Read what the kernel of this machine has for a Service.

    Args:
        world: has the plan to compare with; its mode says where to look.
        name: the Service.
        config: options of the mode that the World does not say.
        execute: runs the tools; None for this network namespace.
        renew: returns the World as it is now.

    Raises:
        QuestionError: the Service is not served, or the kernel cannot be read.
    """
    mode = mode_of(world, config, execute or SubprocessExec())
    async with reading_kernel(mode):
        seen = set[KernelLine]()
        for _ in range(_LOOKS):
            lines = await compare(world, name, mode)
            marked = {line for line in lines if line.state in _MARKS}
            if not marked:
                break
            # Only a difference from a plan that has stayed the same is one. If the rules changed
            # while they were read, it has to be there again.
            before, world = world, await renew(world)
            if _plans_of(before, name) != _plans_of(world, name):
                seen = set()
            elif not mode.changes_during_read or marked == seen:
                break
            else:
                seen = marked
    return KernelDump(
        source=world.origin.text,
        service=str(name),
        mode=mode.name,
        lines=tuple(lines),
        changes=mode.changes_during_read,
    )


@asynccontextmanager
async def reading_kernel(mode: Mode) -> AsyncIterator[None]:
    """Read the kernel by a mode inside.

    Raises:
        QuestionError: that is not possible.
    """
    try:
        support = await mode.worker.do(mode.probe)
        if not support.usable:
            raise QuestionError(f"the kernel cannot be read: {' '.join(support.missing)}")
        yield
    except FileNotFoundError as error:
        raise QuestionError(f"the {mode.name} mode does not run here: {error}") from error
    except (ApplyError, BusyError, OSError) as error:
        hint = "" if os.geteuid() == 0 else "; this needs root"
        raise QuestionError(f"the kernel cannot be read: {error}{hint}") from error
    finally:
        await release(mode)  # sockets of this command; what the process serves is not touched


def _plans_of(world: World, name: ObjectName) -> tuple[NodeSettings, dict[PlanKey, ServicePlan]]:
    """Return all that the kernel objects of a Service are made of."""
    plans = world.plan.services.items()
    return world.plan.settings, {k: p for k, p in plans if k.name.object_name == name}


def mode_of(world: World, config: ProxyConfig, execute: Exec) -> Mode:
    """Build the mode of a World, in the variant that is in force; it only reads."""
    options, spec = to_mode_options(config), spec_of(world.mode)
    options = msgspec.structs.replace(options, asked_for="", looks=True)  # loads no kernel module
    families = world.plan.settings.families
    variants = spec.cleanup_variants or spec.variants
    for variant in variants:
        some = msgspec.structs.replace(options, **variant.options)
        mode = create(world.mode, execute, some)
        # If the World does not tell the variant, take the first that the kernel has objects of.
        if variant.name and (
            variant.name == world.variant or (not world.variant and leftovers_of(mode, families))
        ):
            return mode
    return create(world.mode, execute, options)


async def compare(world: World, name: ObjectName, mode: Mode) -> list[KernelLine]:
    """Return the lines of a Service, of the node as far as its traffic passes them, and context.

    Raises:
        QuestionError: the Service is not served.
        BusyError, OSError: the kernel cannot be read.
    """
    settings, plans = _plans_of(world, name)
    if not plans:
        service = world.service(name)
        if service is None:
            raise QuestionError(f"Service {name} is not known")
        raise QuestionError(f"Service {name} is not served here: {world.why_unserved(service)}")
    words, fixed = mode.words, mode.render_node(settings)  # before the mode reads its texts back
    kernel = await words.read()

    # Wanted: the objects of the Service, and those of the node that its traffic passes.
    own = list(plans.values())
    node = words.wanted(fixed, kernel)
    wanted = dict(words.wanted(render_services(mode, world.plan, plans), kernel))
    wanted |= {key: value for key, value in node.items() if words.is_on_path(key, own)}

    # Others: what the kernel has beside them that concerns the Service, unless another one's.
    others = {key for key in words.of_services(kernel, own) if key not in wanted}
    others |= {key for key in kernel if key not in wanted and words.is_on_path(key, own)}
    others -= node.keys()
    # To render all other Services takes a second with 10,000 of them, and is rarely needed.
    if others:
        rest = world.plan.services.keys() - plans.keys()
        others -= words.wanted(render_services(mode, world.plan, rest), kernel).keys()

    keys = sorted([*wanted, *sorted(others, key=str)], key=words.rank)
    lines = [
        line
        for key in keys
        for line in marked_lines(words, key, kernel, wanted)
        if line.state != "planned"
        or words.is_relevant(Words(line.place, line.text, line.purpose), own)
    ]
    shown = [Words(line.place, line.text) for line in lines if line.state != "missing"]
    beyond = words.beyond(shown, own, settings)
    return lines + [KernelLine(*each, state="context") for each in beyond]


def marked_lines(
    words: KernelWords, key: Any, kernel: Ruleset, wanted: Ruleset
) -> Iterator[KernelLine]:
    """Yield the lines of one object, those of the kernel beside the wanted ones."""
    have = list(words.words(key, kernel[key])) if key in kernel else []
    want = list(words.words(key, wanted[key])) if key in wanted else []
    # The order counts, too: a rule further down may never be reached.
    matcher = SequenceMatcher(None, have, want, autojunk=False)
    for tag, start, end, want_start, want_end in matcher.get_opcodes():
        if tag == "equal":
            yield from (KernelLine(*line, state="planned") for line in have[start:end])
        else:
            yield from (KernelLine(*line, state="missing") for line in want[want_start:want_end])
            yield from (KernelLine(*line, state="unexpected") for line in have[start:end])
