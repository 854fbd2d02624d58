"""A node to measure on: a network namespace of our own and steersman's parts in it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from benchmarks import world
from benchmarks.ebpf_place import Place
from steersman.compile.planner import Planner
from steersman.host.exec import Result, SubprocessExec
from steersman.host.facts import read_facts
from steersman.model.findings import Finding
from steersman.model.inputs import NodeConfig
from steersman.model.names import Family
from steersman.model.tracing import WatchedFlow
from steersman.modes.base import Mode, release
from steersman.modes.ebpf.mode import EbpfMode
from steersman.modes.iptables.mode import create
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.nftables.mode import NftablesMode
from steersman.modes.specs import ModeOptions
from steersman.modes.userspace.core import UserspaceMode
from steersman.modes.userspace.mode import linux_portals
from steersman.run.sync.sync import Sync
from steersman.source.objects import decode_object
from steersman.source.store import Store
from tests.support.builders.store import replace_objects

_CLONE_NEWNET = 0x40000000
_UDP_IDLE = 60.0  # seconds: clients are measured in turn
_libc = ctypes.CDLL(None, use_errno=True)


class Netns:
    """A nameless network namespace; the main thread moves in and out. Gone when closed."""

    def __init__(self) -> None:
        _check(_libc.unshare(_CLONE_NEWNET))
        self._fd = os.open("/proc/self/ns/net", os.O_RDONLY)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    @property
    def path(self) -> str:
        """The namespace as a file, for ip(8)."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def enter(self) -> None:
        _check(_libc.setns(self._fd, _CLONE_NEWNET))

    def close(self) -> None:
        os.close(self._fd)


class TimedExec(SubprocessExec):
    """Counts the seconds that child processes take."""

    seconds = 0.0

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        begun = time.perf_counter()
        try:
            return await super().run(argv, stdin, timeout=max(timeout, 600.0))
        finally:
            self.seconds += time.perf_counter() - begun

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        begun = time.perf_counter()
        try:
            return super().run_tool(argv, stdin, timeout=max(timeout, 600.0))
        finally:
            self.seconds += time.perf_counter() - begun


class Node:
    """steersman with a Store, fed with JSON events as they come from an API server."""

    def __init__(self, variant: str, services: int, split_threshold: int = 500) -> None:
        self.netns = Netns()
        self.place: Place | None = None
        config = NodeConfig(
            node_name=world.NODE,
            families=(Family.IPV4,),
            cluster_cidrs=(world.CLUSTER_CIDR,),
            split_threshold=split_threshold,
        )
        self.exec = TimedExec()
        self._mode: Mode = self._make(variant)
        self._runner = asyncio.Runner()
        support = self._runner.run(self._mode.worker.do(self._mode.probe))
        if not support.usable:
            raise RuntimeError(" ".join(support.missing))
        self.store = Store(world.NODE, facts=self._runner.run(read_facts()))
        replace_objects(self.store, "Service", ())
        replace_objects(self.store, "EndpointSlice", ())
        for number in range(services):
            self.add(number)
        self._sync = Sync(self.store, Planner(config, self._mode.traits), self._mode)

    def _make(self, variant: str) -> Mode:
        """A mode by name, `userspace-nft`, `ebpf-fast`, or the iptables mode on a variant."""
        if variant.startswith("ebpf"):
            self.place = Place()
            fast = variant == "ebpf-fast"
            return EbpfMode(self.exec, msgspec.structs.replace(self.place.options, fast_path=fast))
        if variant == "nftables":
            return NftablesMode(self.exec)
        if variant == "ipvs":
            return IpvsMode(self.exec)
        if variant.startswith("userspace"):
            portals = linux_portals(self.exec, "nftables" if variant.endswith("-nft") else "")
            return UserspaceMode("userspace", portals, ModeOptions(udp_idle=_UDP_IDLE))
        return create(self.exec, ModeOptions(iptables_variant=variant))

    def event(self, kind: str, raw: bytes) -> None:
        obj = decode_object(kind, raw)
        assert not isinstance(obj, Finding), obj
        self.store.upsert(obj)

    def add(self, number: int) -> None:
        """Feed a Service and its slice."""
        self.event("Service", world.service(number))
        self.event("EndpointSlice", world.endpoint_slice(number, world.pods(number)))

    def sync(self) -> None:
        self.netns.enter()
        self._runner.run(self._synced())

    async def _synced(self) -> None:
        # Returns nothing: the Runner sets a signal handler, whose repr is that of the task and of
        # its result. A report with all plans would take 25 ms.
        report = await self._sync.run()
        assert report is not None
        assert report.result is not None
        assert not report.result.refused, self._sync.state.findings

    @property
    def relays(self) -> bool:
        """Whether this process carries what clients and endpoints send; `serve_until` does it."""
        return isinstance(self._mode, UserspaceMode)

    def serve_until(self, sock: socket.socket) -> None:
        """Relay until a socket has something to read."""
        self.netns.enter()
        loop = self._runner.get_loop()
        loop.add_reader(sock, loop.stop)
        loop.run_forever()
        loop.remove_reader(sock)

    @contextmanager
    def traced(self, flow: WatchedFlow) -> Iterator[None]:
        """Follow a flow as `steersman trace` does; afterwards everything of that is gone."""
        tracer = self._mode.tracer() if self._mode.tracer else None
        assert tracer is not None
        self.netns.enter()
        self._runner.run(tracer.start(flow))
        try:
            yield
        finally:
            self.netns.enter()
            self._runner.run(tracer.aclose())

    def look(self) -> None:
        """Read the node's addresses again: it has got more devices."""
        self.netns.enter()
        self.store.use_facts(self._runner.run(read_facts()))

    def close(self) -> None:
        self.netns.enter()
        self._runner.run(release(self._mode))
        self._runner.close()
        if self.place:
            self.place.close()
        self.netns.close()


class Flat:
    """The yardstick: iptables-restore fed with rules in upstream's shape."""

    def __init__(self, variant: str) -> None:
        self.netns = Netns()
        self._command = f"iptables-{variant}-restore"

    def restore(self, text: str) -> None:
        self.netns.enter()
        argv = [self._command, "-w", "5", "--noflush", "--counters"]
        subprocess.run(argv, input=text.encode(), check=True)

    def fill(self, services: int) -> None:
        """Bring all rules in, chunk by chunk: how they got there is not measured."""
        chunk = 400 if "nft" in self._command else services
        self.restore(world.restore_text((), (), world.JUMPS))
        for first in range(0, services, chunk):
            numbers = range(first, min(first + chunk, services))
            self.restore(appended(numbers))

    def close(self) -> None:
        self.netns.close()


def appended(numbers: Iterable[int]) -> str:
    """A restore that adds Services to those in place."""
    own = [line for n in numbers for line in world.service_rules(n, world.pods(n))]
    lines = [*own, *map(world.dispatch_rule, numbers)]
    lines.sort(key=lambda line: not line.startswith(":"))
    return "\n".join(("*nat", *lines, "COMMIT", ""))


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
