"""The demo's cluster: network namespaces for two nodes, three pods and a client outside.

Nothing of the machine's own network is touched; closing it removes all that was made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple, TypeVar

T = TypeVar("T")

PREFIX = "sm-demo-"
NODE, SECOND_NODE, CLIENT = "192.0.2.1", "192.0.2.2", "192.0.2.100"
PORT = 8080
POD_CIDR = "10.244.0.0/16"
TOOLS = ("ip", "sysctl", "iptables", "iptables-save", "iptables-restore", "nft")


class Stop(Exception):
    """Somebody asked the demo to end."""


class Signals:
    """Turns signals into Stop, but never while a process is being made: it would go astray."""

    WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._holds = 0
        self._stop = ""

    def watch(self) -> None:
        for number in self.WATCHED:
            signal.signal(number, self._take)

    def ignore(self) -> None:
        """From here on nothing interrupts, as befits cleaning up."""
        for number in self.WATCHED:
            signal.signal(number, signal.SIG_IGN)
        self._stop = ""

    def default(self) -> None:
        """Let signals end the process, as without this class."""
        for number in self.WATCHED:
            signal.signal(number, signal.SIG_DFL)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        self._raise()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self._stop = signal.Signals(number).name
        self._raise()

    def _raise(self) -> None:
        if self._stop and not self._holds:
            why = self._stop
            self.ignore()
            raise Stop(why)


signals = Signals()


class Pod(NamedTuple):
    name: str
    address: str
    node: str


PODS = (
    Pod("pod-1", "10.244.1.11", "node-a"),
    Pod("pod-2", "10.244.1.12", "node-a"),
    Pod("pod-3", "10.244.2.13", "node-b"),
)
GATEWAYS = {"node-a": "10.244.1.1", "node-b": "10.244.2.1"}

# What each pod runs: says who it is and whom it sees, to everyone who connects.
SERVER = """
import socket, sys
with socket.create_server(("", int(sys.argv[2])), backlog=512) as server:
    print("serving", flush=True)
    while True:
        connection, (peer, _) = server.accept()
        with connection:
            try:
                connection.sendall(f"{sys.argv[1]} {peer}".encode())
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass
"""


class Cluster:
    """Namespaces and the processes in them."""

    def __init__(self) -> None:
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def build(self) -> None:
        """Make everything; call `close` also when this fails."""
        remove_leftovers()
        for name in ("node-a", "node-b", "client", *(pod.name for pod in PODS)):
            _run("ip", "netns", "add", self.netns(name))
            self._ip(name, "link set lo up")
        self._ip("client", "link add lan type bridge", f"addr add {CLIENT}/24 dev lan")
        self._ip("client", "link set lan up")
        for name, address, other in (("node-a", NODE, "node-b"), ("node-b", SECOND_NODE, "node-a")):
            self._node(name, address, other, SECOND_NODE if name == "node-a" else NODE)
        for pod in PODS:
            self._pod(pod)

    def netns(self, name: str) -> str:
        """Name of the namespace of a node, a pod or the client."""
        return self._prefix + name

    def argv(self, name: str, argv: Sequence[str]) -> list[str]:
        """Command line that runs a program in a namespace."""
        return ["ip", "netns", "exec", self.netns(name), *argv]

    def start(
        self, name: str, key: str, argv: Sequence[str], output: IO[bytes] | int = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        """Start a program in a namespace; it gets no Ctrl-C of its own."""
        with signals.held():
            self._processes[key] = process = subprocess.Popen(
                self.argv(name, argv),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process

    def serve(self, pod: Pod) -> None:
        """Start the program of a pod; return once it listens."""
        server = self.start(pod.name, pod.name, [sys.executable, "-c", SERVER, pod.name, str(PORT)])
        assert server.stdout
        if server.stdout.readline() != b"serving\n":
            raise RuntimeError(f"{pod.name} does not start")

    def stop(self, key: str) -> None:
        """End one of the programs."""
        process = self._processes.pop(key)
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()

    def close(self) -> None:
        """End all programs and remove all namespaces; also what a failed `build` made."""
        for key in list(self._processes):
            self.stop(key)
        remove(self._prefix)

    def inside(self, name: str, work: Callable[[], T]) -> T:
        """Call a function in a thread that lives in a namespace; return what it returns."""
        results: list[T] = []

        def enter() -> None:
            with Path(f"/run/netns/{self.netns(name)}").open("rb") as netns:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(netns.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
                    raise OSError(ctypes.get_errno(), f"cannot enter {netns.name}")
            results.append(work())

        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        thread.join()
        return results[0]

    def _ip(self, name: str, *commands: str) -> None:
        for command in commands:
            _run("ip", "-n", self.netns(name), *command.split())

    def _sysctl(self, name: str, *settings: str) -> None:
        _run(*self.argv(name, ["sysctl", "-qw", *settings]))

    def _node(self, name: str, address: str, other: str, other_address: str) -> None:
        self._veth("client", f"to-{name}", name, "eth0")
        self._ip("client", f"link set to-{name} master lan", f"link set to-{name} up")
        self._ip(name, f"addr add {address}/24 dev eth0", "link set eth0 up")
        self._ip(name, f"route add {GATEWAYS[other]}/24 via {other_address}".replace(".1/", ".0/"))
        # Without a route a node cannot connect to a Service: routing comes before the rules.
        self._ip(name, f"route add default via {CLIENT}")
        off = ("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0")
        self._sysctl(name, "net.ipv4.ip_forward=1", *off)

    def _pod(self, pod: Pod) -> None:
        gateway = GATEWAYS[pod.node]
        self._veth(pod.node, pod.name, pod.name, "eth0")
        self._ip(pod.node, f"addr add {gateway}/32 dev {pod.name}", f"link set {pod.name} up")
        self._ip(pod.node, f"route add {pod.address}/32 dev {pod.name}")
        self._ip(pod.name, f"addr add {pod.address}/32 dev eth0", "link set eth0 up")
        self._ip(pod.name, f"route add {gateway} dev eth0", f"route add default via {gateway}")
        self.serve(pod)

    def _veth(self, name: str, device: str, peer: str, peer_device: str) -> None:
        peer_end = f"peer name {peer_device} netns {self.netns(peer)}"
        self._ip(name, f"link add {device} type veth {peer_end}")


def ask(address: str, port: int) -> tuple[str, str]:
    """Connect, and return (name of the pod that answers, address that it sees).

    Raises:
        OSError: nobody answers.
    """
    with socket.create_connection((address, port), timeout=2) as connection:
        answer = b""
        while part := connection.recv(64):
            answer += part
    pod, _, seen = answer.decode().partition(" ")
    return pod, seen


def missing(target: str) -> str:
    """What keeps a target from running here, in one line; "" if nothing does."""
    if os.geteuid() != 0:
        return f"{target} needs root: it makes network namespaces"
    tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{target} needs {', '.join(tools)}: install them, or run it as root" if tools else ""


def remove(prefix: str) -> None:
    """Remove the namespaces whose name begins so, and end what still runs in them."""
    for path in sorted(Path("/run/netns").glob(f"{prefix}*")):
        listed = subprocess.run(
            ["ip", "netns", "pids", path.name], capture_output=True, check=False
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def remove_leftovers() -> None:
    """Remove what demos left that were killed."""
    for path in Path("/run/netns").glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove(f"{PREFIX}{pid}-")


def _run(*argv: str) -> None:
    with signals.held():  # in a session of its own: Ctrl-C is for the demo
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, start_new_session=True
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
