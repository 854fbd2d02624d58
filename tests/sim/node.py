"""A node: its kernel, interfaces, configuration file and processes, and a supervisor for them.

The doors by which the program leaves its process are replaced here, all of them: netlink sockets,
listening sockets, modes, the configuration file's watch, the memory's tuning.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from steersman.compile import planner
from steersman.config import ConfigError, parse_command_line
from steersman.host import linux, netlink
from steersman.model.errors import BusyError
from steersman.model.failover import Ejection
from steersman.model.names import ObjectName, PlanKey
from steersman.netfilter.nft import owned
from steersman.run.observe.failover import Failover
from steersman.run.pages import node_state
from steersman.run.pages.node_state import NodeStates
from steersman.run.process import assemble, instance
from steersman.run.process.canary import Target
from steersman.run.process.daemon import Daemon
from steersman.run.process.instance import Instance
from steersman.run.process.klog import ProcessLog
from steersman.run.process.machine import Machine
from steersman.run.process.startup import StartError
from steersman.run.serve import control, http, servers
from steersman.run.serve.connections import POOL
from steersman.run.serve.control import ControlSocket
from steersman.source.store import Store
from tests.sim.clocks import CLOCK
from tests.sim.kernel import Kernel, mode_factory
from tests.sim.lock import ROOT, Locks
from tests.sim.netlink import NetlinkTables
from tests.sim.universe import Process, Universe

NAME = "node-a"
SERVERS = (("10.0.0.1", 6443), ("10.0.0.2", 6443))
HEALTH, METRICS = ("0.0.0.0", 10256), ("127.0.0.1", 10249)
LOCAL = ("@local", 0)
"""Where the local socket is found."""
_AT_START = (StartError, ConfigError, BusyError, OSError)
"""With what a process may end that cannot start now."""
_PLAN_SERVICE: Callable[..., Any] = vars(planner)["plan_service"]
_ASSEMBLE: Callable[..., Any] = vars(assemble)["assemble"]
_EJECT: Callable[..., None] = vars(Store)["eject"]
PLAN_SECONDS = 60e-6
"""What planning a Service costs, about what was measured."""
_RESTART = (1.0, 10.0)
"""Seconds until a supervisor starts a process again."""


def _counted(kernel: Kernel, plan_service: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Plan a Service, and take note of it."""
    kernel.counts["planned"] += 1
    kernel.universe.charge(PLAN_SECONDS)
    planned = plan_service(*args, **options)
    if options.pop("ejections", ()):
        whole, _ = plan_service(*args, **options)
        for key, plan in planned[0].items():
            if whole[key].reachable and not plan.reachable:
                kernel.fail(f"{key} has no endpoints left, as all are ejected")
    return planned


class Log(logging.Handler):
    """Takes every line that the program logs."""

    def __init__(self, universe: Universe) -> None:
        super().__init__()
        self.universe = universe
        self.lines: Counter[str] = Counter()
        self.crashes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        loop = asyncio._get_running_loop()
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" [{type(record.exc_info[1]).__name__}: {record.exc_info[1]}]"
        self.lines[record.levelname] += 1
        self.universe.note(f"{getattr(loop, 'name', '-')}: {record.levelname[0]} {text[:300]}")
        serious = record.levelno >= logging.CRITICAL or "a defect of steersman" in text
        if serious or record.name == "asyncio":
            self.crashes.append(text)


class Node:
    """The machine and what runs on it."""

    def __init__(self, universe: Universe, folder: Path, mode: str) -> None:
        self.universe = universe
        self.processes: list[Process] = []
        self.netlink = NetlinkTables(universe)
        self.kernel = Kernel(universe, self.netlink.conntrack.flows)
        self.kernel.knows_a_part = self._knows_a_part
        self.locks = Locks(universe)
        self.log = Log(universe)
        self.mode = mode
        self.period = universe.dice.choice((30, 30, 60, 300))
        """Seconds between two comparisons: the retry interval, too."""
        self.ejects = universe.dice.random() < 0.5
        """Whether endpoints that fail are ejected."""
        self.oracle_looks = False
        """Whether it is the oracle that puts ejections into a Store."""
        self.document = self._document()
        self.file = folder / "config.json"
        self.dial_problem = ""
        """What the canary of a switch meets; "" if its connections succeed."""
        self._daemons: dict[Process, Daemon] = {}
        self._last: Daemon | None = None
        self.starts = 0
        self.unexpected_ends: list[str] = []
        self.supervised = True
        self.on_start: Callable[[], None] = lambda: None
        self._expected = False
        self._replaced: set[Process] = set()
        """Processes that a newcomer was to take over from."""
        self._file_watchers: list[asyncio.Future[None]] = []
        self._replace_doors()
        self.write_config()

    def _replace_doors(self) -> None:
        endpoints = self.kernel.endpoints

        def eject(store: Store, service: ObjectName, ejections: tuple[Ejection, ...]) -> None:
            if not self.oracle_looks:
                endpoints.judge(service, store.snapshot.ejected.get(service, ()), ejections)
            _EJECT(store, service, ejections)

        doors: tuple[tuple[object, str, object], ...] = (
            (netlink, "open_socket", self.netlink.open),
            (linux, "has_ipv6", lambda *_: True),
            (servers, "NodeStates", partial(NodeStates, cpu=lambda: 0.0)),
            (node_state, "resident_bytes", lambda: 0),
            (http, "listening_socket", self.universe.network.listen),
            (planner, "plan_service", partial(_counted, self.kernel, _PLAN_SERVICE)),
            (assemble, "assemble", self._assemble),
            (assemble, "Failover", partial(Failover, try_backend=endpoints.try_backend)),
            (Store, "eject", eject),
            (owned, "OwnedTables", self.locks.open_tables),
            (instance, "_bind", self.locks.bind),
            (instance, "_connect", self.locks.connect),
            (instance, "peer", lambda _: ROOT),
            (ControlSocket, "_bind", self._bind_local_socket),
            (control, "peer", lambda client: client.peer.credentials),
        )
        for module, name, door in doors:
            assert hasattr(module, name), name
            setattr(module, name, door)
        root = logging.getLogger()
        root.handlers[:] = [self.log]
        root.setLevel(logging.INFO - 2)
        self.machine = Machine(
            create_mode=mode_factory(self.kernel),
            may_have_left=lambda *_: True,
            set_conntrack=lambda *_: None,
            allow_localhost_node_ports=lambda config, *_: config,
            set_oom_score=lambda _value: "",
            conntrack_usage=lambda: (len(self.netlink.conntrack.flows), 65536),
            file_changes=self._file_changes,
            raise_descriptor_limit=lambda: 65536,
            memory_at_start=lambda: None,
            memory_when_loaded=lambda: None,
        )

    async def _bind_local_socket(self) -> Any:
        while True:
            try:
                return self.universe.network.listen(*LOCAL)
            except OSError:
                await asyncio.sleep(2.0)

    # Configuration

    def _document(self) -> dict[str, Any]:
        periods = {"syncPeriod": f"{self.period}s", "minSyncPeriod": "1s"}
        urls = [f"http://{host}:{port}" for host, port in SERVERS]
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": self.mode,
            "hostnameOverride": NAME,
            "clusterCIDR": "10.244.0.0/16,fd00:10:244::/48",
            "nodePortAddresses": ["primary"],
            "iptables": {**periods, "localhostNodePorts": False},
            "nftables": dict(periods),
            "ipvs": periods,
            "conntrack": {"maxPerCore": 0},
            "healthzBindAddress": "0.0.0.0:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "steersman": {"apiServers": urls, "ejectFailingEndpoints": self.ejects},
        }

    def write_config(self, text: str | None = None) -> None:
        """Write the configuration file, and notify its watchers."""
        self.file.write_text(json.dumps(self.document) if text is None else text)
        waiting, self._file_watchers = self._file_watchers, []
        for each in waiting:
            loop: Any = each.get_loop()
            if not each.done() and not loop.is_closed():
                self.universe.inside(loop, lambda e=each: e.set_result(None))  # type: ignore[misc]

    async def _file_changes(self, _path: Path) -> AsyncIterator[None]:
        yield
        while True:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._file_watchers.append(waiter)
            await waiter
            yield

    # Processes

    @property
    def process(self) -> Process | None:
        """The process that was started last and runs."""
        return self.processes[-1] if self.processes else None

    @property
    def daemon(self) -> Daemon | None:
        """The daemon of that process, or the last one; None before it is assembled."""
        return self._daemons.get(self.process) if self.process else self._last

    def _knows_a_part(self, owner: PlanKey) -> bool:
        """Whether a ledger of a process that runs has adopted objects for a ServicePort."""
        ledgers = (daemon.sync._ledger for daemon in self._daemons.values())
        return any(owner in ledger._adopters for ledger in ledgers)

    async def _assemble(self, *args: Any) -> Daemon:
        """Assemble a daemon, and take note of it."""
        daemon: Daemon = await _ASSEMBLE(*args)
        loop = asyncio.get_running_loop()
        (process,) = (each for each in self.processes if each.loop is loop)
        self._last = self._daemons[process] = daemon
        daemon.switcher.dial = self._dial
        return daemon

    async def _dial(self, _: Target) -> str:
        """Connect as the canary of a switch does."""
        await asyncio.sleep(self.universe.dice.uniform(1e-4, 3e-3))
        return self.dial_problem

    def start(self, *, take_over: bool = False) -> Process:
        """Start a process as a supervisor would; it may take over from one that runs."""
        self.starts += 1
        number = self.starts
        self._replaced |= set(self.processes) if take_over else set()
        self.on_start()
        POOL._servers.clear()
        self._last = None

        async def main() -> None:
            parsed = parse_command_line([f"--config={self.file}"])
            logs = ProcessLog(root=logging.Logger("unused"))
            lock = Instance(self.mode, NAME, take_over=take_over)
            lock._me = structs.replace(lock._me, pid=number)  # the same in each replay
            machine = structs.replace(self.machine, instance=lock)
            await assemble.run_daemon(parsed, logs, machine)

        process = Process(self.universe, main)
        self.processes.append(process)
        process.on_end = lambda: self._ended(process, self._daemons.pop(process, None))
        return process

    def _ended(self, process: Process, daemon: Daemon | None) -> None:
        self.processes.remove(process)
        self.netlink.forget(process.loop)
        self.locks.forget(process.loop)
        serving = daemon is not None and daemon.serving.is_set()
        at_start = isinstance(process.ended, _AT_START) and not serving
        in_order = process.ended == "" and (self._expected or process in self._replaced)
        if process.ended != "killed" and not at_start and not in_order:
            self.unexpected_ends.append(repr(process.ended))
        self._expected = self._expected and not in_order
        if self.supervised and not self.processes:
            self.universe.after(self.universe.dice.uniform(*_RESTART), self._restart)

    def _restart(self) -> None:
        if self.supervised and not self.processes:
            self.start()

    def kill(self) -> None:
        """Kill -9 the process."""
        if self.process:
            self.process.kill()

    def terminate(self) -> None:
        """Ask the process to end; it has two seconds."""
        process = self.process
        if process is None:
            return
        self._expected = True
        process.signal(signal.SIGTERM)

        def look() -> None:
            if process.running:
                self.kernel.fail(f"{process.name} did not end within 2 s of SIGTERM")
                process.kill()

        self.universe.after(2.0, look)

    @property
    def now(self) -> float:
        return CLOCK.now
