"""A rollout of everything: each endpoint of each Service is replaced, and the kernel has to follow.

Another process writes the slices, as an API server sends them, each with the time at which it is
written. Of each endpoint there are four versions: the new one not ready, ready, the old one
terminating, gone. A sync is as late as the oldest version that it brings into force.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time

from benchmarks import world
from benchmarks.figures import Figure, figure
from benchmarks.nftables import MODE, NftNode, events_of
from steersman.run.process.memory import collect_rarely, freeze_live_objects

_NEW = 2_000_000
"""Number of the first new pod."""
_NOT_READY = {"ready": False, "serving": False, "terminating": False}
_TERMINATING = {"ready": False, "serving": True, "terminating": True}
_VERSIONS = 4
_LINE = 1 << 16
"""Bytes that a line may have."""


def version(number: int, step: int) -> bytes:
    """Return the slice of a Service after a step: four of them replace one endpoint."""
    at, stage = divmod(step, _VERSIONS)
    old = world.pods(number)
    new = [world.pod_ip(_NEW + number * world.ENDPOINTS + each) for each in range(len(old))]
    pods = [*new[: at + 1], *old[at + (stage == _VERSIONS - 1) :]]
    conditions = {}
    if stage == 0:
        conditions[new[at]] = _NOT_READY
    elif stage == _VERSIONS - 2:
        conditions[old[at]] = _TERMINATING
    return world.endpoint_slice(number, pods, conditions)


def write(services: int, seconds: float) -> None:
    """Write all versions of all slices, evenly over some seconds: a line each, after its time."""
    steps = world.ENDPOINTS * _VERSIONS
    order = random.Random(1).sample(range(services), services)
    begun, total = time.monotonic(), services * steps
    for count in range(total):
        step, place = divmod(count, services)
        line = version(order[place], step)
        wait = begun + seconds * count / total - time.monotonic()
        if wait > 0:
            sys.stdout.buffer.flush()
            time.sleep(wait)
        sys.stdout.buffer.write(b"%.6f %s\n" % (time.monotonic(), line))
    sys.stdout.buffer.flush()


class RolloutNode(NftNode):
    """A node that follows a rollout."""

    def __init__(self, services: int) -> None:
        super().__init__()
        self.services = services
        self.late: list[float] = []
        """Milliseconds that each sync was late, sorted in the end."""
        self._oldest = 0.0
        self._news = asyncio.Event()
        self.feed(events_of(range(services)))
        freeze_live_objects()

    def follow(self, seconds: float) -> float:
        """Follow a rollout to its end; return the CPU time that this took, in cores."""
        self.netns.enter()
        begun, cpu = time.perf_counter(), time.process_time()
        self._runner.run(self._follow(seconds))
        used = (time.process_time() - cpu) / (time.perf_counter() - begun)
        self.late.sort()
        wanted = {world.pod_ip(_NEW + number) for number in range(self.services * world.ENDPOINTS)}
        plans = self._sync.state.plan.services.values()
        assert wanted == {endpoint.ip for plan in plans for endpoint in plan.reachable}
        return used

    async def _follow(self, seconds: float) -> None:
        writer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.rollout", str(self.services), str(seconds)),
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE,
        )
        assert writer.stdout
        reading = asyncio.create_task(self._read(writer.stdout))
        while not reading.done() or self._news.is_set():
            await self._news.wait()
            self._news.clear()
            oldest, self._oldest = self._oldest, 0.0
            if oldest:
                report = await self._sync.run()
                assert report
                self.late.append((time.monotonic() - oldest) * 1e3)
        await reading
        assert await writer.wait() == 0

    async def _read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            written, _, raw = line.partition(b" ")
            self.event("EndpointSlice", raw)
            self._oldest = self._oldest or float(written)
            self._news.set()
        self._news.set()


def run(quick: bool) -> list[Figure]:
    """Replace 30,000 endpoints of 10,000 Services in 60 s (3,000 in 6 s when quick)."""
    collect_rarely()
    services, seconds = (1_000, 6.0) if quick else (10_000, 60.0)
    node = RolloutNode(services)
    cores = node.follow(seconds)
    node.close()
    late = node.late
    return [
        figure("rollout of all endpoints, late p50", MODE, services, (late[len(late) // 2], "ms")),
        figure("  p99", MODE, services, (late[int(len(late) * 0.99)], "ms")),
        figure("  at most", MODE, services, (late[-1], "ms")),
        figure("  CPU", MODE, services, (cores, "cores")),
    ]


if __name__ == "__main__":
    write(int(sys.argv[1]), float(sys.argv[2]))
