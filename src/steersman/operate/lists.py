"""Answer `steersman services`, `endpoints` and `nodeports`: read, count, list."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import msgspec

from steersman.config import Parsed
from steersman.host.exec import SubprocessExec
from steersman.model.addresses import canonical_ip
from steersman.model.plan import ServicePlan
from steersman.model.stats import TimedStats
from steersman.model.world import World
from steersman.modes.registry import create
from steersman.modes.specs import ModeOptions, spec_of
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client, understood
from steersman.operate.list_rows import Filter, Lists
from steersman.operate.load import load_world
from steersman.operate.served import Describe, Sample

_APART = 1.0  # seconds between two counts, for rates
_MAX_PORT = 65535


class Counter:
    """Counts the connections of the running process, again and again; the last two give rates."""

    def __init__(self, client: Client | None = None) -> None:
        """Ask the running process of this network namespace, or another one in tests."""
        self._client = client or Client()
        self._last: Sample | None = None

    async def samples(self, world: World, *, rates: bool) -> Sequence[Sample]:
        """Return the last counts of the connections of a World; none unless it is a process.

        Args:
            world: the World.
            rates: count a second time if this is the first call.

        Raises:
            QuestionError: the process cannot count them now.
        """
        if world.origin.kind != "process":
            return ()
        counts = await asyncio.to_thread(self._client.get, "/stats")
        with understood():
            at, stats = msgspec.msgpack.decode(counts, type=TimedStats)
        if stats is None:
            return ()
        now = Sample(at, stats)
        if self._last is None and rates:
            self._last = now
            await asyncio.sleep(_APART)
            return await self.samples(world, rates=True)
        # With --watch, each answer shows the rate since the one before.
        samples = (now,) if self._last is None else (self._last, now)
        self._last = now
        return samples


async def read_lists(parsed: Parsed, counter: Counter) -> tuple[World, Lists]:
    """Return the World that a command line is about, and its lists.

    Raises:
        QuestionError: it cannot be read.
    """
    world = await load_world(parsed)
    values = parsed.values
    rates = bool(values.get("rates") or values.get("watch"))
    detailed = values.get("output", "text") != "text"
    samples = await counter.samples(world, rates=rates)
    note = ""
    if rates and not samples:
        note = "connections are counted by a running process only"
        if world.origin.kind == "process":
            note = f"the {world.mode} mode does not count connections"
    describe = describer(world) if detailed else None
    return world, Lists(world, time.time(), samples, describe, note)


def describer(world: World) -> Describe:
    """Return a function that names the kernel objects of a plan in the words of the mode."""
    variants = {each.name: each.options for each in spec_of(world.mode).variants}
    options = msgspec.structs.replace(ModeOptions(), **variants.get(world.variant, {}))
    mode = create(world.mode, SubprocessExec(), options)
    words, settings = mode.words, world.plan.settings

    def describe(plan: ServicePlan) -> Sequence[str]:
        wanted = words.wanted(mode.render_service(plan, settings), {})
        lines = (line for key, value in wanted.items() for line in words.words(key, value))
        return tuple(dict.fromkeys(line.place for line in lines))

    return describe


def filter_of(parsed: Parsed) -> Filter:
    """Return the filter that the arguments and flags of a command line give.

    Raises:
        QuestionError: one of them is malformed.
    """
    values: Mapping[str, object] = parsed.values
    namespace, name = str(values.get("namespace") or ""), str(values.get("name") or "")
    if parsed.arguments:
        # `shop/web` is a Service, `shop` (or `shop/`) a whole namespace; with -n, a Service.
        first, slash, second = parsed.arguments[0].partition("/")
        if namespace and not slash:
            first, second = namespace, first
        if (namespace not in ("", first)) or (second and name not in ("", second)):
            raise QuestionError(f"{parsed.arguments[0]!r} contradicts --namespace or --name")
        namespace, name = first, second or name
    address, given = "", str(values.get("address") or "")
    if given:
        address = canonical_ip(given) or ""
        if not address:
            raise QuestionError(f"--address {given}: this is not an IP address")
    port, text = 0, str(values.get("port") or "")
    if text:
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_PORT):
            raise QuestionError(f"--port {text}: give a number from 1 to {_MAX_PORT}")
        port = int(text)
    pod = str(values.get("pod") or "")
    return Filter(namespace, name, address, port, canonical_ip(pod) or pod)
