"""Ways to plant something in a cluster; each removes it again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

from tests.kernel.faults.cluster import Cluster
from tests.support.lab.faulty_node import NODE, Object

Plant: TypeAlias = Callable[[Cluster], AbstractContextManager[Any]]


def shell(plant: str, undo: str, where: str = NODE) -> Plant:
    """Run shell commands in the namespace of an address."""
    return lambda cluster: cluster.run(where, plant, undo)


def ip(arguments: str, where: str = NODE) -> Plant:
    """Add something by `ip`: a route, a rule, an address."""
    what, _, rest = arguments.partition(" add ")
    return shell(f"ip {arguments}", f"ip {what} del {rest}", where)


def nft(hook: str, rule: str, *, family: str = "inet", where: str = NODE) -> Plant:
    """Add a base chain of someone else, with a rule.

    Args:
        hook: type, hook and priority, such as `filter hook forward priority 0`.
        rule: the rule.
        family: of the table.
        where: an address of the namespace.
    """
    text = f"table {family} other {{ chain c {{ type {hook};\n{rule}\n}}\n}}"
    return shell(f"nft -f - <<'END'\n{text}\nEND", f"nft delete table {family} other", where)


def iptables(*rules: str, where: str = NODE) -> Plant:
    """Insert rules of iptables, given as in `-t nat -I PREROUTING 1 ...` or `-N CHAIN`."""
    undo = []
    for rule in reversed(rules):
        for add, remove in (("-I ", "-D "), ("-A ", "-D ")):
            if add in rule:
                undo.append(f"iptables {rule.replace(add, remove)}")
        if "-N " in rule:
            undo.append(f"iptables {rule.replace('-N ', '-X ')}")
    return shell("\n".join(f"iptables -w {rule}" for rule in rules), "\n".join(undo), where)


def sysctl(name: str, value: str, where: str = NODE) -> Plant:
    """Set a sysctl below /proc/sys/net."""
    path = f"/proc/sys/net/{name}"

    @contextlib.contextmanager
    def plant(cluster: Cluster) -> Iterator[None]:
        argv = ["nsenter", f"--net={cluster.lab.netns(where).path}", "cat", path]
        before = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
        with cluster.run(where, f"echo {value} >{path}", f"echo {before} >{path}"):
            yield

    return plant


def objects(change: Callable[[Object, Object], None]) -> Plant:
    """Change the Service and its EndpointSlice."""
    return lambda cluster: cluster.objects(lambda found: change(found[0], found[1]))


def together(*plants: Plant) -> Plant:
    """Plant several things, one after the other."""

    @contextlib.contextmanager
    def plant(cluster: Cluster) -> Iterator[None]:
        with ExitStack() as stack:
            for each in plants:
                stack.enter_context(each(cluster))
            yield

    return plant


def silent(*addresses: str) -> Plant:
    """End the programs of pods."""

    @contextlib.contextmanager
    def plant(cluster: Cluster) -> Iterator[None]:
        for address in addresses:
            cluster.lab.servers.silence(address)
        try:
            yield
        finally:
            cluster.serve()

    return plant


@contextlib.contextmanager
def stopped(cluster: Cluster) -> Iterator[None]:
    """Stop steersman, as a debugger or a frozen container does."""
    assert cluster.process
    cluster.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.process.send_signal(signal.SIGCONT)


_PROGRAMS = """
#define SEC(name) __attribute__((section(name), used))
SEC("tc_drop") int drop_tc(void *packet) { return 2; }
SEC("xdp_drop") int drop_xdp(void *packet) { return 1; }
SEC("tc_pass") int pass_tc(void *packet) { return -1; }
SEC("xdp_pass") int pass_xdp(void *packet) { return 2; }
"""


def bpf(device: str, hook: str, where: str = NODE, *, passes: bool = False) -> Plant:
    """Attach a program that drops all packets to a device.

    Args:
        device: its name.
        hook: `ingress`, `egress` or `xdp`.
        where: an address of the namespace.
        passes: the program lets all packets pass.
    """

    @contextlib.contextmanager
    def plant(cluster: Cluster) -> Iterator[None]:
        file = cluster.folder / "programs.o"
        if not file.exists():
            argv = ["clang", "-O2", "-target", "bpf", "-x", "c", "-c", "-", "-o", str(file)]
            subprocess.run(argv, input=_PROGRAMS, text=True, check=True)
        what = "pass" if passes else "drop"
        if hook == "xdp":
            add = f"ip link set {device} xdpgeneric obj {file} sec xdp_{what}"
            remove = f"ip link set {device} xdpgeneric off"
        else:
            add = (
                f"tc qdisc add dev {device} clsact 2>/dev/null || true\n"
                f"tc filter add dev {device} {hook} pref 7 bpf da obj {file} sec tc_{what}"
            )
            remove = f"tc filter del dev {device} {hook} pref 7"
        with cluster.run(where, add, remove):
            yield

    return plant
