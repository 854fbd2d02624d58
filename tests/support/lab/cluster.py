"""A small cluster in network namespaces: a node, pods on it, pods elsewhere, clients outside.

    outside ---- eth0 node eth1 ---- remote ---- remote pods
                      | veth per pod (or a bridge)
                      local pods

Every pod has a namespace of its own and is routed; neighbours are static, so that nothing waits
for ARP or NDP. Whatever the node does not know goes to `remote`, where sentinels can listen on any
address: so a packet that is left alone is seen to arrive. All names start with `sm-PID-`; a lab
removes itself, and the next one removes what dead processes left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.lab.sockets import CGROUPS, Netns, Outcome, Servers, probe

RUN = Path("/run/netns")
PREFIX = "sm-"
GATEWAY4, GATEWAY6 = "169.254.1.1", "fe80::1"
"""Next hops of pods and clients; no interface has them, the neighbour entry is enough."""
FORWARDING = {
    "ipv4/ip_forward": "1",
    "ipv6/conf/all/forwarding": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/icmp_ratelimit": "0",
    "ipv6/icmp/ratelimit": "0",
    "ipv4/conf/all/send_redirects": "0",
    "ipv4/conf/default/send_redirects": "0",
    "ipv6/conf/all/accept_dad": "0",
    "ipv6/conf/default/accept_dad": "0",
    "ipv6/conf/default/addr_gen_mode": "1",
    "ipv4/ip_nonlocal_bind": "0",
}
_serial = itertools.count(1)


@dataclass(frozen=True)
class Pod:
    """A pod, or one of the two addresses of a dual-stack one."""

    address: str
    local: bool = True
    """Whether it runs on the lab's node."""


@dataclass(frozen=True)
class Layout:
    """What a lab is made of; two worlds with fitting layouts can share one."""

    interfaces: Mapping[str, Sequence[str]]
    """`address/length` by interface of the node; eth0 leads outside."""
    outside: tuple[str, ...] = ()
    """Addresses of clients outside."""
    pods: tuple[Pod, ...] = ()
    bridge: str = ""
    """Put the local pods on a bridge of this name."""
    pod_prefix: str = "pod"
    """Name of the node's interfaces to pods, without the number."""


def ip(netns: str, lines: Iterable[str]) -> None:
    """Run `ip` commands in a namespace ("" for the one we are in), in one process."""
    argv = ["ip", *(("-n", netns) if netns else ()), "-batch", "-"]
    text = "\n".join(lines)
    done = subprocess.run(argv, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr}\n{text}")


def remove_leftovers() -> None:
    """Delete the namespaces of labs whose process is gone."""
    for path in RUN.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


def _mac(number: int, inner: bool) -> str:
    return f"02:00:00:{int(inner):02x}:{number >> 8:02x}:{number & 255:02x}"


def _length(address: str) -> str:
    return f"{address}/{128 if ':' in address else 32}"


def _nodad(address: str) -> str:
    return " nodad" if ":" in address else ""


def _reach(address: str, device: str, number: int) -> list[str]:
    """Route and neighbour entry by which a host reaches the far end of a link."""
    return [
        f"route add {_length(address)} dev {device}",
        f"neigh add {address} lladdr {_mac(number, True)} dev {device} nud permanent",
    ]


def _default(device: str, number: int, inner: bool = False) -> list[str]:
    """Default routes over a link, to the end that `inner` names (see `_mac`)."""
    mac = _mac(number, inner)
    return [
        f"neigh add {GATEWAY4} lladdr {mac} dev {device} nud permanent",
        f"neigh add {GATEWAY6} lladdr {mac} dev {device} nud permanent",
        f"route add default via {GATEWAY4} dev {device} onlink",
        f"route add ::/0 via {GATEWAY6} dev {device} onlink",
    ]


def _gateway(address: str) -> str:
    return GATEWAY6 if ":" in address else GATEWAY4


class Lab:
    """A running lab; a context manager."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._tag = f"{PREFIX}{os.getpid()}-{next(_serial)}{random.randrange(16**4):04x}-"
        self._names: dict[str, str] = {}
        self._netns: dict[str, Netns] = {}
        self._owner: dict[str, str] = {}
        self._pods: dict[str, Pod] = {}
        self.servers = Servers()
        self.at_close = contextlib.ExitStack()
        """What ends before the lab, as it is in its namespaces."""

    def __enter__(self) -> Self:
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything."""
        try:
            self.at_close.close()
        finally:
            self._remove()

    def _remove(self) -> None:
        self.servers.close()
        for netns in self._netns.values():
            netns.close()
        subprocess.run(
            ["ip", "-force", "-batch", "-"],
            input="\n".join(f"netns del {name}" for name in self._names.values()),
            text=True,
            capture_output=True,
            check=False,
        )

    @property
    def node(self) -> Netns:
        """The node's namespace."""
        return self._netns["node"]

    @property
    def node_addresses(self) -> frozenset[str]:
        """What masqueraded packets may come from: the node's addresses, without loopback."""
        lists = [v for name, v in self.layout.interfaces.items() if name != "lo"]
        return frozenset(address.partition("/")[0] for group in lists for address in group)

    def netns(self, address: str) -> Netns:
        """The namespace that an address is in; addresses of nobody are in `remote`."""
        return self._netns[self._owner.get(address, "remote")]

    def can_hold(self, layout: Layout) -> bool:
        """Whether `extend` can make this lab fit another layout."""
        same = ("interfaces", "bridge", "pod_prefix")
        return all(getattr(layout, name) == getattr(self.layout, name) for name in same) and all(
            self._pods.get(pod.address, pod) == pod for pod in layout.pods
        )

    def _build(self) -> None:
        self._add_netns(["node", "outside", "remote"])
        ip(
            "",
            [
                self._link(("node", "outside"), ("eth0", "eth0"), 1),
                self._link(("node", "remote"), ("eth1", "eth0"), 2),
            ],
        )
        ip(self._names["node"], self._node())
        for name, number in (("outside", 1), ("remote", 2)):
            ip(self._names[name], ["link set eth0 up", *_default("eth0", number)])
        self.extend(self.layout)

    def extend(self, layout: Layout) -> None:
        """Add the clients and pods of a layout that are not there yet."""
        lines: dict[str, list[str]] = {"node": [], "outside": [], "remote": []}
        for address in [a for a in layout.outside if a not in self._owner]:
            self._owner[address] = "outside"
            lines["outside"].append(f"addr add {_length(address)} dev eth0{_nodad(address)}")
            lines["node"] += _reach(address, "eth0", 1)
        pods = [pod for pod in layout.pods if pod.address not in self._pods]
        for number, pod in enumerate(pods, len(self._pods)):
            self._pods[pod.address], self._owner[pod.address] = pod, f"p{number}"
            self._pod(lines, number, pod)
        self._add_netns([self._owner[pod.address] for pod in pods])
        if pods:
            ip("", [self._pod_link(pod) for pod in pods])
        for name, batch in lines.items():
            if batch:
                ip(self._names[name], batch)

    def _add_netns(self, names: Sequence[str]) -> None:
        full = {name: self._tag + name for name in names}
        self._names.update(full)
        if full:
            ip("", [f"netns add {name}" for name in full.values()])
        for name in names:
            self._netns[name] = Netns(str(RUN / full[name]))
            self._netns[name].call(_set_sysctls)
            ip(full[name], ["link set lo up"])

    def _link(self, ends: tuple[str, str], names: tuple[str, str], number: int) -> str:
        return (
            f"link add {names[0]} netns {self._names[ends[0]]} address {_mac(number, False)} "
            f"type veth peer name {names[1]} netns {self._names[ends[1]]} "
            f"address {_mac(number, True)}"
        )

    def _pod_link(self, pod: Pod) -> str:
        name = self._owner[pod.address]
        device = f"{self.layout.pod_prefix}{name[1:]}"
        host = "node" if pod.local else "remote"
        return self._link((host, name), (device, "eth0"), 16 + int(name[1:]))

    def _node(self) -> list[str]:
        """Interfaces and addresses of the node; eth1 is the way to everything unknown."""
        layout, lines = self.layout, []
        for name in [n for n in layout.interfaces if n not in ("lo", "eth0")]:
            lines.append(f"link add {name} type bridge")
        if layout.bridge:
            lines.append(f"link add {layout.bridge} address {_mac(3, False)} type bridge")
            lines.append(f"link set {layout.bridge} up")
        for name, addresses in layout.interfaces.items():
            lines.append(f"link set {name} up")
            for address in [a for a in addresses if name != "lo"]:
                self._owner[address.partition("/")[0]] = "node"
                lines.append(f"addr add {address} dev {name}{_nodad(address)}")
        self._owner.update({"127.0.0.1": "node", "::1": "node", "": "node"})
        return [*lines, "link set eth1 up", *_default("eth1", 2, inner=True)]

    def _pod(self, lines: dict[str, list[str]], number: int, pod: Pod) -> None:
        layout, mac_number = self.layout, 16 + number
        device, host = f"{layout.pod_prefix}{number}", "node" if pod.local else "remote"
        bridged = bool(layout.bridge) and pod.local
        address = f"{_length(pod.address)} dev eth0{_nodad(pod.address)}"
        lines[f"p{number}"] = [
            "link set eth0 up",
            f"addr add {address}",
            *_default("eth0", 3 if bridged else mac_number),
        ]
        if bridged:
            lines[host].append(f"link set {device} master {layout.bridge}")
            lines[host].append(f"link set {device} type bridge_slave hairpin on")
        lines[host].append(f"link set {device} up")
        lines[host] += _reach(pod.address, layout.bridge if bridged else device, mac_number)
        if not pod.local:
            lines["node"].append(
                f"route add {_length(pod.address)} via {_gateway(pod.address)} dev eth1 onlink"
            )

    def sysctl(self, name: str, value: str) -> None:
        """Write /proc/sys/net/NAME in the node's namespace."""
        self.node.call(lambda: _write(name, value))

    def serve(self, address: str, port: int, protocol: str, name: str = "") -> None:
        """Start a server on an address, in the namespace that has it."""
        self.servers.listen(self.netns(address), address, port, protocol, name)

    @contextmanager
    def sentinel(self, address: str, port: int, protocol: str) -> Iterator[None]:
        """Listen for a while where an untouched packet arrives, and answer as `untouched`.

        An address of nobody is then one of `remote`, so its own pods do not get beyond it.
        """
        foreign = address not in self._owner
        if foreign:
            self._owner[address] = "remote"
            address_of_lo = f"{_length(address)} dev lo{_nodad(address)}"
            ip(self._names["remote"], [f"addr add {address_of_lo}"])
        with contextlib.suppress(OSError):  # the mode itself listens there: then nobody else can
            self.serve(address, port, protocol, "untouched")
        try:
            yield
        finally:
            self.servers.silence(address)
            if foreign:
                del self._owner[address]
                ip(self._names["remote"], [f"addr del {_length(address)} dev lo"])

    def silence(self) -> None:
        """Stop all servers."""
        self.servers.silence()

    def probe(
        self,
        source: str,
        address: str,
        port: int,
        protocol: str = "TCP",
        *,
        timeout: float = 30.0,
        at_once: bool = False,
    ) -> Outcome:
        """One new connection from an address of the lab ("" for any of the node's)."""
        cgroup, netns = self._cgroup(source), self.netns(source)
        return probe(netns, source, address, port, protocol, timeout, cgroup, at_once=at_once)

    def socket(self, source: str, protocol: str) -> socket.socket:
        """A socket of who has an address, as `probe` makes it."""
        return self.netns(source).socket(source, protocol, self._cgroup(source))

    def _cgroup(self, source: str) -> Path | None:
        return CGROUPS.get(self.node.path) if self._is_ours(source) else None

    def _is_ours(self, address: str) -> bool:
        """Whether an address is of the node or of a pod on it."""
        pod = self._pods.get(address)
        return pod.local if pod else self._owner.get(address) == "node"

    def exec_argv(self, argv: Sequence[str]) -> list[str]:
        """A command line that runs in the node's namespace."""
        return ["nsenter", f"--net={self.node.path}", *argv]

    def run(self, *argv: str, stdin: str = "") -> str:
        """Run a command in the node's namespace and return what it printed."""
        done = subprocess.run(
            self.exec_argv(argv), input=stdin, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr}")
        return done.stdout


def _write(name: str, value: str) -> None:
    Path("/proc/sys/net", name).write_text(value)


def _set_sysctls() -> None:
    for name, value in FORWARDING.items():
        _write(name, value)
