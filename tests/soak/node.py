"""One node for a soak: its world, its faults, its clients, and the measures at the end."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.apiserver.remote import control
from tests.support.builders import kube
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.mounts import Mounts, ebpf_mounts
from tests.support.lab.sockets import CGROUPS
from tests.support.lab.switches import Stalls

ROOT = Path(__file__).parents[2]
HERE, NODE, OUTSIDE, CLIENT = "here", "192.0.2.1", "203.0.113.9", "10.244.1.100"
LOCAL = tuple(f"10.244.1.{number}" for number in range(10, 22))
REMOTE = tuple(f"10.244.2.{number}" for number in range(10, 16))
STEADY = range(6)
OTHERS = range(100, 300)
"""Numbers of the Services that come and go."""
API_PORT = 6443
READY, METRICS = "http://127.0.0.1:10256/readyz", "http://127.0.0.1:10249/metrics"
LONGEST: Final = 180.0
"""Seconds for anything that is waited for."""
_SYN_SENT = 5  # seconds; 120 by default
RULES = {
    "nftables": ("nft", "delete", "table", "ip", "kube-proxy"),
    "iptables": ("iptables", "-t", "nat", "-F", "KUBE-SERVICES"),
    "userspace": ("iptables", "-t", "nat", "-F", "KUBE-PORTALS-CONTAINER"),
}
"""What another program would do to the rules of a mode; programs of ebpf are out of its reach."""
_OF_THE_PROCESS = re.compile(
    r"^#.*|\[\d+:\d+\]"  # comments and counters of iptables-save
    r"|steersman-\w+-\d+|group \d+|pid=.*since=\d+"
    r"|(?<=port )[3-6]\d{4}|(?<=ports )[3-6]\d{4}|(?<=:)[3-6]\d{4}"  # ports of the proxy
    r"|.* timeout 3h .*",  # clients that have affinity
    re.MULTILINE,
)


class SoakError(AssertionError):
    """The soak found a defect."""


class Size(NamedTuple):
    """What a process takes, and what it has in the kernel."""

    resident: float
    """MB."""
    descriptors: int
    threads: int
    kernel: Counter[str]
    """Lines that tools print of it, and how many objects the process counts."""


class Daemon:
    """steersman on the node, in a mount namespace and a cgroup of the soak."""

    def __init__(self, lab: Lab, mode: str, log: Path) -> None:
        self._lab, self._mode, self._log = lab, mode, log
        self._cgroup, script = ebpf_mounts(lab)
        self._mounts = Mounts(script)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *words: str) -> list[str]:
        """Return the command line of one of our commands on the node."""
        into = f'echo 0 > {self._cgroup}/cgroup.threads && exec "$@"'
        ours = self._mounts.argv(sys.executable, "-m", "steersman", *words)
        return self._lab.exec_argv(["sh", "-c", into, "sh", *ours])

    def start(self) -> None:
        words = ["run", f"--master=http://127.0.0.1:{API_PORT}", f"--proxy-mode={self._mode}"]
        words += [f"--hostname-override={HERE}", "--cluster-cidr=10.244.0.0/16"]
        words += ["--conntrack-max-per-core=0", "--eject-failing-endpoints"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self.command(*words), stdout=log, stderr=log, cwd=ROOT)

    def stop(self, number: int = signal.SIGTERM) -> None:
        assert self.process
        self.process.send_signal(number)
        self.process.wait(LONGEST)

    def run(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, cwd=ROOT, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def pins(self) -> list[str]:
        """Return the files in the node's bpffs."""
        root = self._mounts.path("/sys/fs/bpf")
        return [str(path.relative_to(root)) for path in root.rglob("*")]

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.stop(signal.SIGKILL)
        self._mounts.close()
        del CGROUPS[self._lab.node.path]


class Clients:
    """Connects to the steady Services in every way, one after the other, and notes failures."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._stop = threading.Event()
        self.opened = 0
        self.failed: list[tuple[float, str]] = []
        """When a connection that failed began, and which."""
        self.excused = 0
        """Those that failed while this machine stood still."""
        self._stalls = Stalls()
        self.pause = 0.02
        self._thread = threading.Thread(target=self._run)

    @staticmethod
    def ways() -> Iterator[tuple[str, str, int]]:
        for number in STEADY:
            vip = f"10.96.0.{10 + number}"
            yield CLIENT, vip, 80
            yield NODE, vip, 80
            yield LOCAL[number], vip, 80
            yield OUTSIDE, NODE, 30080 + number
            yield OUTSIDE, f"198.51.100.{10 + number}", 80

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._stalls.close()

    def _run(self) -> None:
        for way in cycle(self.ways()):
            if self._stop.wait(self.pause):
                return
            began = time.monotonic()
            if wrong := self.ask(way):
                if self._stalls.since(began):
                    self.excused += 1
                else:
                    self.failed.append((began, wrong))
            self.opened += 1

    def ask(self, way: tuple[str, str, int]) -> str:
        """Open a connection; return its problem, or ""."""
        outcome = self._lab.probe(*way, timeout=10)
        return "" if outcome.kind == "answered" else f"{way}: {outcome}"


class Node:
    """The node of one mode."""

    def __init__(self, mode: str, folder: Path, seed: int) -> None:
        self.mode, self.log = mode, folder / "log"
        self._dice = random.Random(seed)
        self._there: set[int] = set()
        pods = (Pod(CLIENT), *map(Pod, LOCAL), *(Pod(each, local=False) for each in REMOTE))
        self.lab = Lab(Layout({"eth0": (f"{NODE}/24",)}, (OUTSIDE,), pods))
        self._server: subprocess.Popen[str] | None = None
        self.happened: Counter[str] = Counter()
        self.changes = 0
        self.broken: list[tuple[float, float]] = []
        """Times in which connections may fail: from a fault until every way works again."""
        self.history: list[tuple[float, str]] = []
        """When each fault began (monotonic)."""

    def __enter__(self) -> Node:
        self.lab.__enter__()
        try:
            self.lab.sysctl("netfilter/nf_conntrack_tcp_timeout_syn_sent", str(_SYN_SENT))
            for address in (*LOCAL, *REMOTE):
                self.lab.serve(address, 8080, "TCP")
            argv = [sys.executable, "-m", "tests.support.apiserver.server", f"--port={API_PORT}"]
            self._server = subprocess.Popen(
                self.lab.exec_argv(argv), cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            assert self._server.stdout
            self._server.stdout.readline()
            self.daemon = Daemon(self.lab, self.mode, self.log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "daemon"):
            self.daemon.close()
        if self._server:
            self._server.kill()
            self._server.wait()
            assert self._server.stdout
            self._server.stdout.close()
        self.lab.close()

    # The world

    def api(self, operation: str, **arguments: Any) -> Any:
        url = f"http://127.0.0.1:{API_PORT}"
        return self.lab.node.call(lambda: control(url, operation, **arguments))

    def fill(self) -> None:
        """Make the fixed world of the beginning and the end."""
        self.api("add", object=kube.node(HERE, NODE))
        for number in sorted(self._there):
            self._remove(number)
        for number in STEADY:
            self._steady_service(number, plain=True)
            self._endpoints(number, ())
        for number in OTHERS[:50]:
            self._add(number, REMOTE[:2])

    def change(self) -> None:
        """Change one thing at random."""
        number, kind = self._dice.choice(STEADY), self._dice.randrange(5)
        if kind == 0:
            self._steady_service(number)
        elif kind <= 2:
            others = self._dice.sample(LOCAL[len(STEADY) :] + REMOTE, self._dice.randrange(6))
            self._endpoints(number, others)
        elif (other := self._dice.choice(OTHERS)) in self._there:
            self._remove(other)
        else:
            self._add(other, self._dice.sample(REMOTE, self._dice.randrange(4)))
        self.changes += 1

    def _steady_service(self, number: int, *, plain: bool = False) -> None:
        pick = (lambda words: words[0]) if plain else self._dice.choice
        spec: dict[str, Any] = {
            "type": "NodePort",
            "externalIPs": [f"198.51.100.{10 + number}"],
            "externalTrafficPolicy": pick(("Cluster", "Local")),
            "internalTrafficPolicy": pick(("Cluster", "Local")),
            # Service 0 keeps it: nftables leaves its hooks for affinity in place once they exist.
            "sessionAffinity": pick(("None", "ClientIP")) if number else "ClientIP",
        }
        ports = [{"port": 80, "targetPort": 8080, "nodePort": 30080 + number}]
        vip = f"10.96.0.{10 + number}"
        self.api("add", object=kube.service(f"s{number}", vip, ports=ports, **spec))

    def _endpoints(self, number: int, others: Sequence[str]) -> None:
        """The first endpoint is always ready, and on this node."""
        ends = [{"addresses": [LOCAL[number]], "nodeName": HERE, "conditions": {"ready": True}}]
        for address in others:
            where = HERE if address in LOCAL else "there"
            ready = {"ready": self._dice.random() < 0.7}
            ends.append({"addresses": [address], "nodeName": where, "conditions": ready})
        self.api("add", object=kube.endpoint_slice(f"s{number}-1", f"s{number}", *ends))

    def _add(self, number: int, addresses: Sequence[str]) -> None:
        self._there.add(number)
        vip = f"10.96.1.{number - OTHERS[0]}"
        self.api("add", object=kube.service(f"s{number}", vip, ports=[{"port": 80}]))
        self.api("add", object=kube.endpoint_slice(f"s{number}-1", f"s{number}", *addresses))

    def _remove(self, number: int) -> None:
        self._there.discard(number)
        self.api("delete", kind="Service", name=f"s{number}", namespace="shop")
        self.api("delete", kind="EndpointSlice", name=f"s{number}-1", namespace="shop")

    # Faults

    def faults(self) -> dict[str, tuple[bool, Callable[[], object]]]:
        """Return what may break by name, and whether connections may fail from it."""
        carries = self.mode == "userspace"  # then connections end with the process
        found: dict[str, tuple[bool, Callable[[], object]]] = {
            "daemon killed": (carries, lambda: self._again(signal.SIGKILL)),
            "daemon restarted": (carries, lambda: self._again(signal.SIGTERM)),
            "watches cut": (False, lambda: self.api("drop")),
            "history forgotten": (False, lambda: self.api("expire")),
            "API server restored": (False, lambda: self.api("restart")),
            "API server fails": (False, lambda: self.api("fault", what="status", times=5)),
            "endpoint dies": (True, self._kill_endpoint),
            "conntrack flushed": (True, lambda: self.lab.run("conntrack", "-F")),
            "pod devices come and go": (False, self._devices),
        }
        if self.mode in RULES:
            found["rules flushed"] = (True, lambda: self.lab.run(*RULES[self.mode]))
        return found

    def break_something(self, clients: Clients) -> None:
        """Let one fault happen, and wait until every way works."""
        name, (breaks, happen) = self._dice.choice(sorted(self.faults().items()))
        self.happened[name] += 1
        began = time.monotonic()
        self.history.append((round(began, 1), name))
        happen()
        self.wait_ready()
        self.until(lambda: not any(map(clients.ask, clients.ways())), f"all ways after: {name}")
        if breaks:
            # Connections that began without translation keep their entry, and its port, so long.
            self.broken.append((began - 10.0, time.monotonic() + _SYN_SENT))

    def _again(self, number: int) -> None:
        self.daemon.stop(number)
        self.daemon.start()

    def _kill_endpoint(self) -> None:
        """An endpoint that only some Services have stops, and is served again later."""
        address = self._dice.choice(LOCAL[len(STEADY) :])
        self.lab.servers.silence(address)
        time.sleep(3)
        self.lab.serve(address, 8080, "TCP")

    def _devices(self) -> None:
        for number in range(10):
            self.lab.run("ip", "link", "add", f"v{number}", "type", "veth", "peer", f"w{number}")
        for number in range(10):
            self.lab.run("ip", "link", "del", f"v{number}")

    # Waiting and reading

    def get(self, url: str) -> bytes:
        def read() -> bytes:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(url, timeout=10) as answer:
                data: bytes = answer.read()
                return data

        return self.lab.node.call(read)

    def until(self, true: Callable[[], bool], condition: str) -> None:
        end = time.monotonic() + LONGEST
        while not true():
            assert self.daemon.process
            if time.monotonic() > end or self.daemon.process.poll() is not None:
                raise SoakError(f"{condition}: not within {LONGEST:g} s; see {self.log}")
            time.sleep(0.1)

    def wait_ready(self) -> None:
        def ready() -> bool:
            try:
                return bool(self.get(READY))
            except (urllib.error.URLError, OSError):
                return False

        self.until(ready, "the process is ready")

    def settle(self) -> None:
        """Wait until the kernel has exactly the rules of the world that the API server has."""
        self.api("clear_faults")
        wanted = len(self.api("objects", kind="Service"))
        self.until(lambda: self._served() == wanted, f"{wanted} Services are served")
        self.until(self._is_as_written, "nothing differs in the kernel")

    def _is_as_written(self) -> bool:
        """Whether the process finds its rules; it may complain of a fight with who flushed them."""
        code, text = self.daemon.run("drift", "-o", "json")
        return code < 2 and json.loads(text)["state"].get("differs") is None

    def _served(self) -> int:
        code, text = self.daemon.run("services", "-o", "json")
        if code == 2:
            return -1
        return len({row["service"] for row in json.loads(text)["ports"]})

    def size(self) -> Size:
        """Measure the process and what it has in the kernel."""
        assert self.daemon.process
        pid = self.daemon.process.pid
        status = Path(f"/proc/{pid}/status").read_text()
        values = dict(re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE))
        page = self.get(METRICS).decode()
        objects = re.findall(r"^(steersman_kernel_objects\S* \S+)", page, re.MULTILINE)
        kernel = Counter(
            [
                *(f"metric: {line}" for line in objects),
                *self._lines("nft", "-s", "list", "ruleset"),
                *self._lines("iptables-save"),
                *self._lines("ipset", "list", "-n"),
                *(f"pin: {path}" for path in self.daemon.pins()),
            ]
        )
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return Size(int(values["VmRSS"]) / 1024, descriptors, int(values["Threads"]), kernel)

    def _lines(self, *argv: str) -> list[str]:
        """Return what a tool prints, without what differs from one process to the next."""
        text = _OF_THE_PROCESS.sub("", self.lab.run(*argv))
        return [line.strip() for line in text.splitlines() if line.strip()]

    def lost(self, failed: Sequence[tuple[float, str]]) -> list[str]:
        """Return the connections that failed while nothing was broken, and when (monotonic)."""
        return [
            f"{at:.1f} s: {text}"
            for at, text in failed
            if not any(first <= at <= last for first, last in self.broken)
        ]


@contextmanager
def running(mode: str, folder: Path, seed: int) -> Iterator[Node]:
    """A node whose process serves the fixed world."""
    with Node(mode, folder, seed) as node:
        node.fill()
        node.daemon.start()
        node.wait_ready()
        yield node
