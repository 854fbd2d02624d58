"""Three kinds of nodes in network namespaces: those that proxy, and two that only have pods.

    lan        a switch, and the client from outside
    b, c       nodes with two pods each, which serve
    p0, p1..   nodes with steersman, a pod that serves, and a pod with a client

All proxying nodes meet the same faults of b and c at the same time, so that modes, and runs with
and without ejection, can be compared side by side. Everything has IPv4 and IPv6. Nothing of the
machine's own network is touched; `close` removes all that was made.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.failover_client import CLIENT, SERVER
from steersman.modes.ebpf.probe import cgroup_root

VIPS = ("10.96.0.10", "fd00:10:96::10")
NODE_PORT, PORT = 30080, 8080
CLUSTER_CIDR = "10.244.0.0/16,fd00:10:244::/48"
_PREFIX = "sm-fo"
_OFF = ("all", "default")
_SYSCTLS = (
    *(f"net.ipv4.conf.{name}.rp_filter=0" for name in _OFF),
    *(f"net.ipv6.conf.{name}.accept_dad=0" for name in _OFF),
    "net.ipv4.ip_forward=1",
    "net.ipv6.conf.all.forwarding=1",
)


class Pod(NamedTuple):
    """A pod, and the number of its node."""

    name: str
    node: int
    number: int

    @property
    def addresses(self) -> tuple[str, str]:
        """In IPv4 and IPv6."""
        return (
            f"10.244.{self.node}.{self.number}",
            f"fd00:10:244:{self.node:x}::{self.number:x}",
        )


def node_addresses(number: int) -> tuple[str, str]:
    return f"192.0.2.{number}", f"2001:db8::{number:x}"


def gateway(number: int) -> tuple[str, str]:
    return f"10.244.{number}.1", f"fd00:10:244:{number:x}::1"


B, C, FIRST = 2, 3, 10
B_PODS = (Pod("b1", B, 11), Pod("b2", B, 12))
PODS = (*B_PODS, Pod("c1", C, 11), Pod("c2", C, 12))
"""The pods that every proxying node has as endpoints, beside one of its own."""


class Proxy:
    """A node with steersman."""

    def __init__(self, number: int, words: Sequence[str], folder: Path) -> None:
        self.number, self.words = number, words
        self.name = f"p{number - FIRST}"
        self.server = Pod(f"{self.name}-s", number, 11)
        self.client = Pod(f"{self.name}-c", number, 12)
        self.manifests, self.log = folder / self.name, folder / f"{self.name}.log"
        self.cgroup: Path | None = None

    def write(self, unready: Collection[str] = ()) -> None:
        """Write the objects of the cluster; the pods named are not ready."""
        self.manifests.mkdir(exist_ok=True)
        for obj in self._objects(unready):
            path = self.manifests.parent / f"{self.name}.new"
            path.write_text(json.dumps(obj))  # JSON is YAML
            path.rename(self.manifests / f"{obj['kind']}-{obj['metadata']['name']}.yaml")

    def _objects(self, unready: Collection[str]) -> Iterable[dict[str, Any]]:
        addresses = [{"type": "InternalIP", "address": ip} for ip in node_addresses(self.number)]
        yield {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name},
            "status": {"addresses": addresses},
        }
        yield {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web", "namespace": "shop"},
            "spec": {
                "type": "NodePort",
                "clusterIP": VIPS[0],
                "clusterIPs": VIPS,
                "ipFamilies": ["IPv4", "IPv6"],
                "ports": [{"port": 80, "targetPort": PORT, "nodePort": NODE_PORT}],
            },
        }
        nodes = {B: "b", C: "c", self.number: self.name}
        for index, family in enumerate(("IPv4", "IPv6")):
            labels = {"kubernetes.io/service-name": "web"}
            name = f"web-{family.lower()}"
            yield {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {"name": name, "namespace": "shop", "labels": labels},
                "addressType": family,
                "ports": [{"port": PORT, "protocol": "TCP"}],
                "endpoints": [
                    {
                        "addresses": [pod.addresses[index]],
                        "nodeName": nodes[pod.node],
                        "conditions": {"ready": pod.name not in unready},
                    }
                    for pod in (*PODS, self.server)
                ],
            }


class Lab:
    """The namespaces and what runs in them."""

    def __init__(self, proxies: Sequence[Sequence[str]], folder: Path) -> None:
        """Plan a lab.

        Args:
            proxies: arguments of `steersman run` for each proxying node.
            folder: for manifests and logs.
        """
        self.proxies = [Proxy(FIRST + n, words, folder) for n, words in enumerate(proxies)]
        self._prefix = f"{_PREFIX}{os.getpid()}-"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cgroups: list[Path] = []

    @property
    def pods(self) -> list[Pod]:
        """All pods that serve."""
        return [*PODS, *(proxy.server for proxy in self.proxies)]

    def build(self) -> None:
        """Make the namespaces, and start the servers; call `close` also when this fails."""
        nodes = {"b": B, "c": C, **{proxy.name: proxy.number for proxy in self.proxies}}
        clients = [proxy.client for proxy in self.proxies]
        for name in ("lan", *nodes, *(pod.name for pod in (*self.pods, *clients))):
            subprocess.run(["ip", "netns", "add", self.netns(name)], check=True)
            self.run(name, "sysctl", "-qw", *_SYSCTLS)
            self._ip(name, "link set lo up")
        self._ip("lan", "link add lan type bridge", "link set lan up", *_on("lan", 100))
        for name, number in nodes.items():
            peer = f"peer name eth0 netns {self.netns(name)}"
            port = f"to-{name}"
            self._ip("lan", f"link add {port} type veth {peer}", f"link set {port} master lan up")
            # A client's SYN to a Service address needs a route before it is translated.
            defaults = [f"route add default via {via}" for via in node_addresses(100)]
            routes = [
                f"route add {net} via {via}"
                for other in nodes.values()
                for net, via in zip(_pod_nets(other), node_addresses(other), strict=True)
                if other != number
            ]
            self._ip(name, "link set eth0 up", *_on("eth0", number), *routes, *defaults)
        names = {number: name for name, number in nodes.items()}
        for pod in (*self.pods, *clients):
            self._pod(pod, names[pod.node])
        for pod in self.pods:
            self.start_server(pod)

    def _pod(self, pod: Pod, node: str) -> None:
        peer = f"peer name eth0 netns {self.netns(pod.name)}"
        ours, hosts = gateway(pod.node), [_host(ip) for ip in pod.addresses]
        self._ip(
            node,
            f"link add {pod.name} type veth {peer}",
            f"link set {pod.name} up",
            *(f"addr add {_host(ip)} dev {pod.name}" for ip in ours),
            *(f"route add {host} dev {pod.name}" for host in hosts),
        )
        self._ip(
            pod.name,
            "link set eth0 up",
            *(f"addr add {host} dev eth0" for host in hosts),
            *(f"route add {_host(ip)} dev eth0" for ip in ours),
            *(f"route add default via {ip} dev eth0" for ip in ours),
        )

    def start_server(self, pod: Pod) -> None:
        """Start what a pod runs, and wait until it listens."""
        server = self.start(pod.name, pod.name, [sys.executable, "-c", SERVER, str(PORT)])
        assert server.stdout
        if server.stdout.readline() != b"serving\n":
            raise RuntimeError(f"{pod.name} does not start")

    def start_proxies(self) -> None:
        """Start steersman on each proxying node; it logs to a file."""
        root = cgroup_root()
        for proxy in self.proxies:
            proxy.write()
            words = [sys.executable, "-m", "steersman", "run", f"--manifests={proxy.manifests}"]
            words += [f"--hostname-override={proxy.name}", f"--cluster-cidr={CLUSTER_CIDR}"]
            # Only the first network namespace may size conntrack's table (Linux 6.1 says so).
            words.append("--conntrack-max-per-core=0")
            words += proxy.words
            # Each has its own bpffs and, as the root of cgroups, that of its client.
            mounts = "mount -t bpf bpf /sys/fs/bpf"
            if root is not None:
                proxy.cgroup = root / f"{self._prefix}{proxy.name}"
                proxy.cgroup.mkdir()
                self._cgroups.append(proxy.cgroup)
                mounts += f" && mount --bind {proxy.cgroup} {root}"
            inside = ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
            with proxy.log.open("wb") as log:
                self.start(proxy.name, f"steersman-{proxy.name}", [*inside, *words], log)

    def start_client(
        self,
        name: str,
        targets: Sequence[tuple[str, int]],
        rate: float,
        seconds: float,
        cgroup: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a client that opens connections to all targets in turn."""
        argv = [sys.executable, "-c", CLIENT, json.dumps(targets), str(rate), str(seconds)]
        if cgroup is not None:
            procs = f"{cgroup}/cgroup.procs"
            argv = ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *argv]
        return self.start(name, f"client-{name}", argv)

    # Faults

    def drop(self, name: str, rule: str, hooks: Sequence[str] = ("input",)) -> None:
        """Add a rule of nftables to hooks of a namespace."""
        self.drop_at_once([name], rule, hooks)

    def drop_at_once(
        self, names: Sequence[str], rule: str, hooks: Sequence[str] = ("input",)
    ) -> None:
        """Add a rule to several namespaces: all programs are started before one has its rule."""
        chains = [f"chain {h} {{ type filter hook {h} priority 0; {rule}; }}" for h in hooks]
        text = "\n".join(("table inet fault {", *chains, "}"))
        programs = [
            subprocess.Popen(self.argv(name, "nft", "-f", "-"), stdin=subprocess.PIPE, text=True)
            for name in names
        ]
        for program in programs:
            assert program.stdin
            program.stdin.write(text)
            program.stdin.close()
        for program in programs:
            if program.wait():
                raise subprocess.CalledProcessError(program.returncode, program.args)

    def heal(self, name: str) -> None:
        """Remove the rules of `drop`."""
        self.run(name, "nft", "delete", "table", "inet", "fault")

    def signal(self, key: str, number: signal.Signals) -> None:
        """Send a signal to a process."""
        self._processes[key].send_signal(number)

    def link_down(self, node: str) -> None:
        """Take the switch's port of a node down."""
        self._ip("lan", f"link set to-{node} down")

    # Processes

    def netns(self, name: str) -> str:
        return self._prefix + name

    def argv(self, name: str, *argv: str) -> list[str]:
        """Command line that runs a program in a namespace; /sys stays that of the machine."""
        return ["nsenter", f"--net=/run/netns/{self.netns(name)}", *argv]

    def run(self, name: str, *argv: str) -> None:
        subprocess.run(self.argv(name, *argv), check=True)

    def start(
        self, name: str, key: str, argv: Sequence[str], output: Any = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        command = self.argv(name, *argv)
        self._processes[key] = process = subprocess.Popen(command, stdout=output, stderr=output)
        return process

    def stop(self, key: str) -> None:
        """Kill a process."""
        process = self._processes.pop(key)
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()

    def close(self) -> None:
        """End all processes, and remove namespaces and cgroups."""
        for key in list(self._processes):
            self.stop(key)
        for path in Path("/run/netns").glob(f"{self._prefix}*"):
            subprocess.run(["ip", "netns", "del", path.name], check=False)
        for cgroup in self._cgroups:
            _remove_cgroup(cgroup)

    def _ip(self, name: str, *commands: str) -> None:
        argv = ["ip", "-n", self.netns(name), "-batch", "-"]
        subprocess.run(argv, input="\n".join(commands), text=True, check=True)


def _on(device: str, number: int) -> list[str]:
    four, six = node_addresses(number)
    return [f"addr add {four}/24 dev {device}", f"addr add {six}/64 dev {device}"]


def _pod_nets(number: int) -> tuple[str, str]:
    return f"10.244.{number}.0/24", f"fd00:10:244:{number:x}::/64"


def _host(address: str) -> str:
    return f"{address}/128" if ":" in address else f"{address}/32"


def _remove_cgroup(cgroup: Path) -> None:
    """Remove a cgroup; its last process may still be on its way out."""
    deadline = time.monotonic() + 10
    while cgroup.exists():
        try:
            cgroup.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)


def missing() -> str:
    """What keeps the lab from running here; "" if nothing does."""
    if os.geteuid() != 0:
        return "it makes network namespaces: run it as root"
    tools = [tool for tool in ("ip", "nft", "nsenter", "unshare") if shutil.which(tool) is None]
    return f"install {', '.join(tools)}" if tools else ""
