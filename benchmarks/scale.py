"""Cold start and one change against the number of Services: each mode, and upstream's shape.

Ours is timed from the JSON of an API server to the kernel. Of upstream's shape only the command is
(`iptables-restore`, `nft -f`); what makes its input is not. No upstream mode is like the ebpf mode,
and upstream has dropped its userspace mode.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import time
from collections.abc import Callable

from benchmarks import world
from benchmarks.figures import Figure, chosen, chosen_sizes, figure
from benchmarks.ipvs_world import IpvsFlat
from benchmarks.nft_world import NftFlat, endpoints, service
from benchmarks.node import Flat, Node

MODES = ("iptables-nft", "iptables-legacy", "nftables", "ebpf", "userspace")
_ALONE = ("ebpf", "userspace")
EMULATED = "ipvs"
"""It needs a kernel of its own, in a machine without KVM: only ratios say something."""
SIZES = (100, 1_000, 5_000)
_SMALL = 1_000
COLD, CHANGE = "cold start, from JSON", "one endpoint replaced, from JSON"


def run(quick: bool) -> list[Figure]:
    """Measure every mode at every size (only 50 Services when quick); MODES and SIZES choose."""
    sizes, changes = chosen_sizes((50,) if quick else SIZES), 3 if quick else 9
    modes = chosen("MODES", MODES, (EMULATED,))
    return [each for mode in modes for size in sizes for each in measured(mode, size, changes)]


def measured(mode: str, services: int, changes: int) -> list[Figure]:
    """Fill a node and then change it, beside a node with upstream's shape, in turns."""
    runs = 3 if services <= _SMALL else 1  # upstream's shape takes up to a minute
    starts: list[tuple[float, ...]] = []
    for left in reversed(range(runs)):
        pair = _Pair(mode, services)
        starts.append(pair.seconds)
        took = [] if left else [pair.replace(count) for count in range(1, changes + 1)]
        pair.close()
    return [_median(COLD, mode, services, starts), _median(CHANGE, mode, services, took)]


def _median(name: str, mode: str, services: int, took: list[tuple[float, ...]]) -> Figure:
    """Return the medians of ours and of upstream's, which some modes have not."""
    factor, unit = (1.0, "s") if name == COLD else (1e3, "ms")
    ours, *theirs = (statistics.median(each) * factor for each in zip(*took, strict=True))
    return figure(name, mode, services, (ours, unit), *theirs)


def _timed(do: Callable[[], object]) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


class _Pair:
    """A node in a mode, and one with upstream's shape."""

    def __init__(self, mode: str, services: int) -> None:
        self._services = services
        self._node = Node(mode.removeprefix("iptables-"), 0)
        # An address, to which portals lead.
        self._node.netns.enter()
        subprocess.run(["ip", "addr", "add", "192.0.2.1/32", "dev", "lo"], check=True)
        self._node.look()
        self._upstream: _Upstream | None = None
        self.seconds: tuple[float, ...] = (_timed(self._fill),)
        """That it took to fill them."""
        if mode not in _ALONE:
            self._upstream = _Upstream(mode, services)
            self.seconds += (self._upstream.seconds,)

    def _fill(self) -> None:
        for number in range(self._services):
            self._node.add(number)
        self._node.sync()

    def replace(self, count: int) -> tuple[float, ...]:
        """Replace an endpoint of a Service; return the seconds of each node."""
        number = count * 37 % self._services
        pods = world.pods(number, count)

        def ours() -> None:
            self._node.event("EndpointSlice", world.endpoint_slice(number, pods))
            self._node.sync()

        if self._upstream is None or not self._upstream.changes:
            return (_timed(ours),)
        upstream = self._upstream
        return _timed(ours), _timed(lambda: upstream.replace(number, pods))

    def close(self) -> None:
        self._node.close()
        if self._upstream:
            self._upstream.close()


class _Upstream:
    """A node with upstream's shape, written at once."""

    changes = True
    """Whether `replace` is like a change by upstream."""

    def __init__(self, mode: str, services: int) -> None:
        self._numbers = range(services)
        self._node: NftFlat | Flat | IpvsFlat
        if mode == "nftables":
            lines = [service(number, world.pods(number)) for number in self._numbers]
            self._node = flat = NftFlat(0)
            self.seconds = _timed(lambda: flat.load(itertools.chain.from_iterable(lines)))
        elif mode == EMULATED:
            self._node = ipvs = IpvsFlat()
            self.changes = False
            self.seconds = _timed(lambda: ipvs.fill(services))
        else:
            own = [line for n in self._numbers for line in world.service_rules(n, world.pods(n))]
            text = world.restore_text(self._numbers, own, world.JUMPS)
            self._node = tables = Flat(mode.removeprefix("iptables-"))
            self.seconds = _timed(lambda: tables.restore(text))

    def replace(self, number: int, pods: list[str]) -> None:
        if isinstance(self._node, NftFlat):
            self._node.load(endpoints(number, pods))
        elif isinstance(self._node, Flat):
            own = world.service_rules(number, pods)
            self._node.restore(world.restore_text(self._numbers, own))

    def close(self) -> None:
        self._node.close()
