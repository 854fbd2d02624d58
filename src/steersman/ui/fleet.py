"""The nodes of a cluster and the last state of each, kept current for pages.

One task for each node reads its stream of states; it reconnects with growing, jittered delays. The
last state of a node that cannot be reached is kept, with the reason. Nothing is kept on disk, and
nothing of a node but its last state, so memory is bounded by the number of nodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from steersman.model.findings import Finding
from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.model.world import Origin, World
from steersman.operate.agreement import Agreement
from steersman.operate.answer import QuestionError
from steersman.operate.client import understood
from steersman.operate.node_trouble import Disagreement, SeenNode
from steersman.operate.world_reader import decode_world
from steersman.source.framing import LineTooLongError
from steersman.source.pace import Backoff, Timing
from steersman.source.wire import LineSplitter
from steersman.ui.nodes import Finder, NodeError, Way

_SILENCE = 25.0
"""Seconds without a byte after which a node counts as lost; it sends something every 10 s."""
_PATIENCE = 30.0
"""The same while an answer is awaited."""
_RUN_PATIENCE = 90.0
"""The same for a command, which may say nothing until its end."""
_APART = 0.25
"""Seconds between two announcements of changes."""
_CONNECTING = 64
"""Nodes that are connected to at the same time."""
_MAX_STATE = 1 << 20
_MAX_ANSWER = 512 << 20
"""Bytes; the World of 10,000 Services is about 30 MB."""
_NAMED = 50
"""Services that are named for each group of nodes that disagrees."""
_MAX_SHARED = 20_000

_STATE = msgspec.json.Decoder(NodeState)
_DIGESTS = msgspec.json.Decoder(dict[str, str | int])


class _Followed:
    """One node: how it is asked, what was last seen of it, and the task that reads its stream."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.last = SeenNode("", "")
        """Without its name and address."""
        self.task: asyncio.Task[None] | None = None

    @property
    def key(self) -> str:
        return self.way.name or self.way.address

    @property
    def name(self) -> str:
        if self.way.name or self.last.state is None:
            return self.key
        return self.last.state.node

    @property
    def seen(self) -> SeenNode:
        return replace(self.last, name=self.name, address=self.way.address)


class Fleet:
    """Follows the nodes that a Finder tells of, while `run` runs."""

    def __init__(
        self,
        finder: Finder,
        timing: Timing | None = None,
        wall: Callable[[], float] = time.time,
        *,
        grace: float = 15.0,
        compare: float = 5.0,
    ) -> None:
        """Create a fleet; nothing is connected before `run`.

        Args:
            finder: tells which nodes there are.
            timing: clock, sleep and delays of reconnecting.
            wall: seconds since 1970.
            grace: seconds in which a node may lag behind the others.
            compare: seconds between two looks at whether the nodes agree.
        """
        self._finder = finder
        self._timing = timing or Timing(longest=20.0)
        self._wall = wall
        self._followed: dict[str, _Followed] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._slots = asyncio.Semaphore(_CONNECTING)
        self._announced = 0
        self._waked = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._last = float("-inf")
        self._shared: dict[Finding, Finding] = {}
        self._agreement = Agreement(grace)
        self._compare_seconds = compare
        self.found = asyncio.Event()
        """The Finder has told once which nodes there are."""
        self.version = 0
        """Grows with each change of a state."""
        self.problem = ""
        """Why the nodes cannot be found; "" if they can."""
        self.disagreements: tuple[Disagreement, ...] = ()
        """Nodes that serve something else than most nodes, and which Services these are."""

    async def run(self) -> None:
        """Follow the nodes until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._compare(), name="compare nodes")
                # A task of the group, so that all are cancelled at once: the Finder closes the
                # connections at its end, and no other task may send a request after that.
                tasks.create_task(self._finder.follow(self._use), name="find nodes")
        finally:
            self._tasks = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    @property
    def nodes(self) -> Mapping[str, NodeState]:
        """The last state of each node that has been reached, by name."""
        followed = self._followed.values()
        return {each.name: each.last.state for each in followed if each.last.state is not None}

    @property
    def seen(self) -> Sequence[SeenNode]:
        """All nodes, as last seen, also those that cannot be reached."""
        return tuple(each.seen for each in self._followed.values())

    @property
    def default_node(self) -> str:
        """The node that pages ask if none is chosen: one that is reached and well, if possible.

        "" if no node has answered yet.
        """
        ranked = [
            (bool(each.problem), not each.state.healthy, each.name)
            for each in self.seen
            if each.state is not None
        ]
        return min(ranked)[2] if ranked else ""

    async def changed(self, since: int) -> int:
        """Wait until `version` is above a number; return it. Waiters wake at most 4 times a second.

        Args:
            since: the version that the caller has seen.
        """
        while self._announced <= since:
            await self._waked.wait()
        return self._announced

    # Questions to one node

    async def get(self, node: str, path: str) -> bytes:
        """Return a page of a node; "" is the first node.

        Raises:
            NodeError: there is no such node, or it cannot be asked.
        """
        body = bytearray()
        async with self._way(node).open(path, idle=_PATIENCE) as response:
            async for chunk in response.chunks():
                body += chunk
                if len(body) > _MAX_ANSWER:
                    raise NodeError(f"the answer of node {node} to {path} is too long")
        return bytes(body)

    async def post(self, node: str, path: str, document: object) -> AsyncIterator[Any]:
        """POST a document to a node; yield the lines of the answer, decoded from JSON.

        Raises:
            NodeError: as `get`.
            QuestionError: a line is not JSON.
        """
        splitter = LineSplitter(_MAX_ANSWER)
        async with self._way(node).open(path, idle=_RUN_PATIENCE, body=document) as response:
            async for chunk in response.chunks():
                with understood(f"node {node}"):
                    lines = [msgspec.json.decode(line) for line in splitter.feed(chunk)]
                for line in lines:
                    yield line
        if splitter.rest.strip():
            with understood(f"node {node}"):
                line = msgspec.json.decode(splitter.rest)
            yield line

    async def world(self, node: str, services: Sequence[ObjectName] = ()) -> World:
        """Return the World of a node, or the part of it about some Services.

        Raises:
            NodeError: as `get`.
            QuestionError: the node runs another version.
        """
        query = "&".join(f"service={quote(str(each), safe='/')}" for each in services)
        data = await self.get(node, f"/world?{query}" if query else "/world")
        with understood(f"node {node}"):
            world = await asyncio.to_thread(decode_world, data, Origin("process", ""))
        name = world.config.node_name or node
        return replace(world, origin=Origin("process", f"node {name} ({world.mode} mode)"))

    def _way(self, node: str) -> Way:
        for each in self._followed.values():
            if node in ("", each.name, each.key):
                return each.way
        if not self._followed:
            raise NodeError(self.problem or "no node is known yet")
        known = ", ".join(sorted(each.name for each in self._followed.values())[:5])
        raise NodeError(f"there is no node {node} (there are: {known})")

    # Following

    def _use(self, ways: Sequence[Way], problem: str) -> None:
        """Follow these nodes, and no others."""
        assert self._tasks is not None
        by_key = {way.name or way.address: way for way in ways}
        for key in self._followed.keys() - by_key.keys():
            gone = self._followed.pop(key)
            self._agreement.forget(gone.name)
            if gone.task is not None:
                gone.task.cancel()
        for key, way in by_key.items():
            each = self._followed.get(key)
            if each is not None and each.way == way:
                continue
            # Another pod on the same node: its predecessor's state is shown until it answers.
            if each is None:
                each = self._followed[key] = _Followed(way)
            elif each.task is not None:
                each.task.cancel()
            each.way = way
            each.task = self._tasks.create_task(self._follow(each), name=f"follow {key}")
        self.problem = problem
        self.found.set()
        self._change()

    async def _follow(self, each: _Followed) -> None:
        """Read the stream of a node for ever."""
        backoff = Backoff(self._timing)
        while True:
            began = each.last.heard
            try:
                await self._read(each)
                problem = "the node ended the stream"
            except NodeError as error:
                problem = str(error)
            except (LineTooLongError, msgspec.DecodeError) as error:
                problem = f"unexpected answer: {error}"
            if each.last.heard > began:
                # It was there: a restart or a cut connection is shown only if it lasts.
                backoff.reset()
            elif each.last.problem != problem:
                since = each.last.since if each.last.problem else self._wall()
                each.last = replace(each.last, problem=problem, since=since)
                self._change()
            await self._timing.sleep(backoff.next())

    async def _read(self, each: _Followed) -> None:
        """Read the stream of a node until it ends."""
        splitter = LineSplitter(_MAX_STATE)
        async with AsyncExitStack() as stack:
            async with self._slots:
                opened = each.way.open("/node?watch=1", idle=_SILENCE)
                response = await stack.enter_async_context(opened)
            async for chunk in response.chunks():
                # Of several states that came together, only the last one matters.
                lines = splitter.feed(chunk)
                now, before = self._wall(), each.last
                each.last = replace(before, heard=now)
                if not lines:
                    continue
                state = _STATE.decode(lines[-1])
                # The same Finding on every node is kept once.
                if len(self._shared) > _MAX_SHARED:
                    self._shared.clear()
                shared = (self._shared.setdefault(found, found) for found in state.findings)
                state = replace(state, findings=tuple(shared))
                each.last = SeenNode("", "", state, received=now, heard=now)
                if state.digest:
                    self._agreement.observe(each.name, state.digest, self._timing.now())
                # An idle node sends its state every few seconds, too: only its time differs.
                same = before.state and replace(before.state, now=state.now) == state
                if before.problem or not same:
                    self._change()

    def _change(self) -> None:
        """Count a change, and announce it soon."""
        self.version += 1
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._last + _APART), self._announce)

    def _announce(self) -> None:
        self._timer = None
        self._last = asyncio.get_running_loop().time()
        self._announced = self.version
        self._waked.set()
        self._waked = asyncio.Event()

    # Do they agree?

    async def _compare(self) -> None:
        """Ask nodes whose digests differ for those of each Service, again and again."""
        while True:
            await self._timing.sleep(self._compare_seconds)
            camps = self._agreement.camps(self._timing.now())
            found: list[Disagreement] = []
            try:
                usual = await self._digests(camps[0].reference) if camps else {}
            except QuestionError:
                continue  # what was found before is still the best answer
            for camp in camps:
                try:
                    theirs = await self._digests(camp.nodes[0])
                except QuestionError as error:
                    found.append(replace(camp, problem=str(error)))
                    continue
                if names := self._agreement.differing(camp, theirs, usual):
                    found.append(replace(camp, services=names[:_NAMED], number=len(names)))
            if tuple(found) != self.disagreements:
                self.disagreements = tuple(found)
                self._change()

    async def _digests(self, node: str) -> dict[str, str | int]:
        data = await self.get(node, "/digests")
        with understood(f"node {node}"):
            return await asyncio.to_thread(_DIGESTS.decode, data)


@asynccontextmanager
async def followed(
    finder: Finder, seconds: float = 5.0
) -> AsyncIterator[tuple[Fleet, asyncio.Task[None]]]:
    """Follow the nodes in a task, from when each has answered or failed, or after some seconds."""
    fleet = Fleet(finder)
    following = asyncio.create_task(fleet.run())
    version = 0
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not fleet.found.is_set() or any(
                    each.state is None and not each.problem for each in fleet.seen
                ):
                    version = await fleet.changed(version)
        yield fleet, following
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


async def seen_once(finder: Finder, seconds: float = 5.0) -> Fleet:
    """Return a fleet after each node has answered or failed, or after some seconds."""
    async with followed(finder, seconds) as (fleet, _):
        pass
    return fleet


async def seen_again(finder: Finder, every: float) -> AsyncIterator[Fleet]:
    """Yield a fleet whose streams stay open, first as `seen_once`, then after each interval."""
    async with followed(finder) as (fleet, following):
        while not following.done():
            yield fleet
            await asyncio.wait((following,), timeout=every)
        following.result()
