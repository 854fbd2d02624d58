"""Faults of every kind are done to a node that runs steersman, and doctor names the cause first.

`pytest tests/kernel/test_doctor_faults.py -s` prints the table; with `--update` it is written into
doctor_faults.md, which is otherwise compared with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

from tests.support.builders import kube
from tests.support.lab.faulty_node import (
    CLIENT,
    ENDS,
    NODE,
    NODE_PORT,
    OUTSIDE,
    VIP,
    FaultyNode,
    Object,
    endpoint,
)
from tests.support.processes.steersman import HAS_IPVS

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

PAGE = Path(__file__).with_name("doctor_faults.md")
UNREACHABLE = "A Service is not reachable"
NODE_PORTS = "A node port is not reachable"
UNEVEN = "The load is uneven"
SLOW = "It is slow"
RESTART = "It broke after a restart"
CASES = (UNREACHABLE, NODE_PORTS, UNEVEN, SLOW, RESTART)

LOST = (
    r"\S+ from [^|]*: dropped at eth0 [^|]*table inet other [^|]* tcp dport 8080 drop"
    r"|\S+ from [^|]*: the packet left this node by eth1, and nothing came back"
    r"|the pod [^|]*: rules in the pod may drop or redirect packets: table inet other"
)
"""Of pods that drop packets: it depends on the pod that the packet that was followed met."""
NONE_BEHIND_PROXY = "the proxy accepted the connection, but has none to"
"""What the node meets in userspace mode, if it has seen no process listen in time."""
VARYING = (
    (
        rf"({LOST}|(no endpoint|\S+ \(1 of 3 endpoints\)) [^|]*: no answer at all)",
        "the rule of a pod that drops packets, where one was lost, or who does not answer",
    ),
    (r"(node port )?[\d.:]+/TCP( at \S+)? from [^|]*?: dropped by", "one of the ways: dropped by"),
    (r"bytes from [^|]* do not reach", "bytes from one of the places do not reach"),
    (r"pid \d+ \(.*?\)(?!\))", "pid PID (COMMAND)"),  # a command may end in parentheses
    (r"pid \d+", "pid PID"),
    (r"\d+ of \d+ entries", "262144 of 262144 entries"),
    (r"there are \d+ rules", "there are 11005 rules"),
    (r"handle \d+", "handle 2"),
)
"""Figures of what doctor says that differ from run to run, and what the page shows."""

Do: TypeAlias = Callable[[FaultyNode], AbstractContextManager[Sequence[str] | None]]
"""Does a fault for a while; may give the words for doctor."""


class Fault(NamedTuple):
    """Something that goes wrong, and what doctor must name as the cause."""

    case: str
    name: str
    do: Do
    cause: str
    """A regular expression that the named cause matches."""
    words: tuple[str, ...] = ("shop/web",)
    status: int = 1
    mode: str = "nftables"
    flags: tuple[str, ...] = ()
    """Of the process."""
    bridge: str = ""
    """A bridge with the pods of the node."""
    through: Callable[[FaultyNode], Sequence[str]] = lambda _: ()
    """The command through which doctor runs."""

    @property
    def node(self) -> tuple[str, tuple[str, ...], str]:
        """The node that it needs; faults of equal ones share it."""
        return self.mode, self.flags, self.bridge


# Faults of objects


def changed(change: Callable[[Object, Object], None]) -> Do:
    """Change the Service and its EndpointSlice."""

    def do(node: FaultyNode) -> AbstractContextManager[None]:
        return node.objects(lambda objects: change(objects[0], objects[1]))

    return do


@contextlib.contextmanager
def nothing(_: FaultyNode) -> Iterator[None]:
    yield


def without_slice(node: FaultyNode) -> AbstractContextManager[None]:
    return node.objects(lambda objects: objects.remove(objects[1]))


def no_endpoints(_: Object, slice_: Object) -> None:
    slice_["endpoints"] = []


def not_ready(_: Object, slice_: Object) -> None:
    for each in slice_["endpoints"]:
        each["conditions"] = {"ready": False}


def other_port_name(_: Object, slice_: Object) -> None:
    slice_["ports"][0]["name"] = "web"


def bad_port(service: Object, _: Object) -> None:
    service["spec"]["ports"][0]["port"] = 70000


def internal_local(service: Object, slice_: Object) -> None:
    service["spec"]["internalTrafficPolicy"] = "Local"
    slice_["endpoints"] = [endpoint(ENDS[2])]


def external_local(service: Object, slice_: Object) -> None:
    service["spec"]["externalTrafficPolicy"] = "Local"
    slice_["endpoints"] = [endpoint(ENDS[2])]


def no_node_port(service: Object, _: Object) -> None:
    del service["spec"]["ports"][0]["nodePort"]
    service["spec"]["type"] = "ClusterIP"


def stolen(node: FaultyNode) -> AbstractContextManager[None]:
    """Another, older Service has the same cluster IP and port."""

    def change(objects: list[Object]) -> None:
        objects[0]["metadata"]["creationTimestamp"] = "2026-02-02T00:00:00Z"
        other: Object = {
            "kind": "Service",
            "apiVersion": "v1",
            "metadata": {
                "namespace": "shop",
                "name": "aaa",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"clusterIP": VIP, "ports": [{"port": 80, "protocol": "TCP"}]},
        }
        objects.append(other)

    return node.objects(change)


def restricted(service: Object, _: Object) -> None:
    service["spec"]["type"] = "LoadBalancer"
    service["spec"]["loadBalancerSourceRanges"] = ["198.18.0.0/16"]
    service["status"] = {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}


# Faults of endpoints and of the network


def dead(*addresses: str) -> Do:
    """The programs in some pods are gone."""

    @contextlib.contextmanager
    def do(node: FaultyNode) -> Iterator[None]:
        for address in addresses:
            node.lab.servers.silence(address)
        yield
        node.serve()

    return do


def black_hole(*addresses: str) -> Do:
    """Packets to some pods are dropped where the pods are."""

    @contextlib.contextmanager
    def do(node: FaultyNode) -> Iterator[None]:
        rule = "chain in { type filter hook input priority 0; tcp dport 8080 drop; }"
        with ExitStack() as stack:
            for address in addresses:
                stack.enter_context(node.rules(address, rule))
            yield

    return do


@contextlib.contextmanager
def local_process(node: FaultyNode) -> Iterator[None]:
    node.lab.serve(NODE, NODE_PORT, "TCP")
    yield
    node.lab.servers.silence(NODE)


# Faults of the node


def sysctl(name: str, value: str, usual: str) -> Do:
    return lambda node: node.sysctl(name, value, usual)


def other_rules(hook: str, rule: str, priority: str = "0") -> Do:
    """Someone else's rules on the node."""
    chain = f"chain c {{ type filter hook {hook} priority {priority}; {rule}; }}"
    return lambda node: node.rules(NODE, chain)


@contextlib.contextmanager
def iptables_drop(node: FaultyNode) -> Iterator[None]:
    """As the firewalls of Docker and of many hosts do."""
    node.inside(NODE, "iptables", "-I", "FORWARD", "-d", "10.244.0.0/16", "-j", "DROP")
    yield
    node.inside(NODE, "iptables", "-D", "FORWARD", "-d", "10.244.0.0/16", "-j", "DROP")


def full_table(node: FaultyNode) -> Sequence[str]:
    """The table is the machine's own, so doctor is shown another figure of its entries."""
    count = node.folder / "count"
    count.write_text(Path("/proc/sys/net/netfilter/nf_conntrack_max").read_text())
    mount = f"mount --bind {count} /proc/sys/net/netfilter/nf_conntrack_count"
    return ("unshare", "--mount", "sh", "-ec", f'{mount}; exec "$@"', "sh")


@contextlib.contextmanager
def locked(node: FaultyNode) -> Iterator[None]:
    """A program keeps the lock of iptables (the node has a file of its own in its place)."""
    with (node.folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def many_services(node: FaultyNode) -> AbstractContextManager[None]:
    def change(objects: list[Object]) -> None:
        for number in range(1300):
            high, low = divmod(number, 250)
            name = f"many-{number}"
            objects.append(kube.service(name, f"10.96.{100 + high}.{low + 1}"))
            objects.append(kube.endpoint_slice(f"{name}-x", name, "10.244.1.8", "10.244.1.9"))

    return node.objects(change)


@contextlib.contextmanager
def small_path(node: FaultyNode) -> Iterator[None]:
    """Behind the node's interface large packets get lost, and nobody says so."""
    rule = "chain c { type filter hook forward priority 0; meta length > 1400 drop; }"
    with node.rules("198.51.100.77", rule):  # where remote pods are
        yield


@contextlib.contextmanager
def no_hairpin(node: FaultyNode) -> Iterator[None]:
    for number in range(4):
        with contextlib.suppress(subprocess.CalledProcessError):  # pods elsewhere have none
            argv = ("bridge", "link", "set", "dev", f"pod{number}", "hairpin", "off")
            node.inside(NODE, *argv)

    def one(_: Object, slice_: Object) -> None:
        slice_["endpoints"] = [endpoint(ENDS[0])]

    with changed(one)(node):
        yield


# After a restart


@contextlib.contextmanager
def gone(node: FaultyNode) -> Iterator[Sequence[str]]:
    """The process did not come back, and somebody flushed the rules."""
    node.stop()
    node.lab.run("nft", "flush", "ruleset")
    yield ("shop/web", *node.from_manifests)
    node.start()


@contextlib.contextmanager
def another_proxy(node: FaultyNode) -> Iterator[None]:
    """The kube-proxy of before has come back, in another mode."""
    path = node.folder / "kube-proxy"
    path.symlink_to(shutil.which("sleep") or "/bin/sleep")
    process = subprocess.Popen(node.lab.exec_argv([str(path), "600"]))
    yield
    process.kill()
    process.wait()


@contextlib.contextmanager
def stale_rules(node: FaultyNode) -> Iterator[None]:
    """Rules of the mode of before still lead the Service to a former endpoint."""
    node.inside(
        NODE,
        "iptables-restore",
        "--noflush",
        stdin=f"""*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-XVCZ5O7KJ6AJH4R2 - [0:0]
:KUBE-SEP-ABCDEFGHIJKLMNOP - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d {VIP}/32 -p tcp --dport 80 -j KUBE-SVC-XVCZ5O7KJ6AJH4R2
-A KUBE-SVC-XVCZ5O7KJ6AJH4R2 -j KUBE-SEP-ABCDEFGHIJKLMNOP
-A KUBE-SEP-ABCDEFGHIJKLMNOP -p tcp -j DNAT --to-destination 10.244.0.99:8080
COMMIT
""",
    )
    yield
    node.inside(NODE, "iptables", "-t", "nat", "-F")
    node.inside(NODE, "iptables", "-t", "nat", "-X")


# Uneven load


def connect(node: FaultyNode, source: str, address: str, port: int) -> socket.socket:
    sock = node.lab.socket(source, "TCP")
    sock.settimeout(60)
    sock.bind((source, 0))
    sock.connect((address, port))
    sock.recv(100)  # who answers
    return sock


def clients(source: str, address: str, port: int, change: Callable[[Object, Object], None]) -> Do:
    """Forty connections, one after another, to a Service that was changed before."""

    @contextlib.contextmanager
    def do(node: FaultyNode) -> Iterator[None]:
        with changed(change)(node):
            for _ in range(40):
                connect(node, source, address, port).close()
            yield

    return do


def affinity(service: Object, _: Object) -> None:
    service["spec"]["sessionAffinity"] = "ClientIP"


def hints(_: Object, slice_: Object) -> None:
    for each, zone in zip(slice_["endpoints"], "abb", strict=True):
        each["hints"] = {"forZones": [{"name": zone}]}


def one_here(service: Object, slice_: Object) -> None:
    service["spec"]["externalTrafficPolicy"] = "Local"
    slice_["endpoints"] = [endpoint(ENDS[0]), endpoint(ENDS[2])]


@contextlib.contextmanager
def long_lived(node: FaultyNode) -> Iterator[None]:
    """Forty connections stay open from a time when there was but one endpoint."""

    def one(_: Object, slice_: Object) -> None:
        slice_["endpoints"] = [endpoint(ENDS[0])]

    with changed(one)(node):
        socks = [connect(node, CLIENT, VIP, 80) for _ in range(40)]
    yield
    for sock in socks:
        sock.close()


FAULTS = (
    Fault(UNREACHABLE, "the name is misspelt", nothing, "no Service shop/wep", ("shop/wep",)),
    Fault(
        UNREACHABLE,
        "the selector matches no pod (no EndpointSlice)",
        without_slice,
        "no EndpointSlice belongs to shop/web: its selector matches no pod",
    ),
    Fault(
        UNREACHABLE,
        "the selector matches no pod (an empty EndpointSlice)",
        changed(no_endpoints),
        "EndpointSlices of shop/web are empty: its selector matches no pod",
    ),
    Fault(
        UNREACHABLE,
        "no endpoint is ready",
        changed(not_ready),
        "no endpoint of shop/web:http .* is ready",
    ),
    Fault(
        UNREACHABLE,
        "the port is named differently in the EndpointSlice",
        changed(other_port_name),
        "no endpoint of shop/web:http .* has a port named 'http': .* have 'web'",
    ),
    Fault(UNREACHABLE, "a port of the Service is malformed", changed(bad_port), "70000"),
    Fault(UNREACHABLE, "an older Service has its cluster IP", stolen, "shop/aaa"),
    Fault(
        UNREACHABLE,
        "internalTrafficPolicy Local, and no endpoint on the node",
        changed(internal_local),
        "internalTrafficPolicy of shop/web:http is Local",
    ),
    Fault(
        UNREACHABLE,
        "the programs in all pods are dead",
        dead(*ENDS),
        f"no process of the pod .* listens|no endpoint answers .*: refused|{NONE_BEHIND_PROXY}",
    ),
    Fault(
        UNREACHABLE,
        "all pods drop the packets",
        black_hole(*ENDS),
        f"no endpoint answers .*: no answer at all|{LOST}",
    ),
    Fault(
        NODE_PORTS,
        "the node port answers on other addresses",
        nothing,
        r"answers on no IPv4 address: nodePortAddresses \(192.0.2.77/32\)",
        flags=("--nodeport-addresses=192.0.2.77/32",),
    ),
    Fault(
        NODE_PORTS,
        "the Service has no node port",
        changed(no_node_port),
        "Service shop/web has no port 30080",
        (f"shop/web:{NODE_PORT}",),
        status=2,
    ),
    Fault(
        NODE_PORTS,
        "a process of the node listens on it",
        local_process,
        "pid .* listens on 192.0.2.1:30080/TCP, a node port of shop/web",
        status=0,
    ),
    Fault(
        NODE_PORTS,
        "externalTrafficPolicy Local, and no endpoint on the node",
        changed(external_local),
        "externalTrafficPolicy of shop/web:http is Local and no ready endpoint is on this",
        status=0,
    ),
    Fault(
        NODE_PORTS,
        "the client is not in loadBalancerSourceRanges",
        changed(restricted),
        "is dropped as the Service asks: 203.0.113.9 is not in the ranges",
        ("--from", OUTSIDE, "--to", "198.51.100.1:80"),
    ),
    Fault(
        UNEVEN,
        "session affinity and few clients",
        clients(CLIENT, VIP, 80, affinity),
        "uneven: session affinity",
        status=0,
    ),
    Fault(
        UNEVEN,
        "topology hints leave endpoints out",
        clients(CLIENT, VIP, 80, hints),
        "uneven: topology hints leave 2 of 3",
        status=0,
    ),
    Fault(
        UNEVEN,
        "policy Local",
        clients(OUTSIDE, NODE, NODE_PORT, one_here),
        "uneven: policy Local",
        status=0,
    ),
    Fault(
        UNEVEN,
        "long-lived connections from before a scale-up",
        long_lived,
        "uneven: 40 long-lived connections",
        status=0,
    ),
    Fault(
        UNREACHABLE,
        "the node does not forward packets",
        sysctl("ipv4/ip_forward", "0", "1"),
        "does not forward IPv4 packets: /proc/sys/net/ipv4/ip_forward is 0",
    ),
    Fault(
        UNREACHABLE,
        "a firewall drops forwarded packets (nftables)",
        other_rules("forward", "ip daddr 10.244.0.0/16 drop"),
        "dropped by a rule of another program in chain .* of table inet other",
    ),
    Fault(
        UNREACHABLE,
        "a firewall drops forwarded packets (iptables)",
        iptables_drop,
        "dropped by a rule of another program in chain FORWARD of table ip filter",
        mode="iptables",
    ),
    Fault(
        UNREACHABLE,
        "a pod behind a bridge without hairpin mode dials its own Service",
        no_hairpin,
        "no hairpin mode",
        ("shop/web", "--from-pod", ENDS[0]),
        bridge="cni0",
    ),
    Fault(
        UNREACHABLE,
        "--cluster-cidr is not that of the pods",
        nothing,
        "pods of this node have addresses outside of the pod network 10.99.0.0/16",
        flags=("--cluster-cidr=10.99.0.0/16",),
        status=0,
    ),
    Fault(
        NODE_PORTS,
        "a firewall drops the node port",
        other_rules("prerouting", "tcp dport 30080 drop", "-300"),
        "dropped by a rule of another program in .* table inet other .*tcp dport 30080 drop",
    ),
    Fault(
        SLOW,
        "the conntrack table is full",
        nothing,
        "the conntrack table is full",
        through=full_table,
    ),
    Fault(
        SLOW,
        "a program keeps the lock of iptables",
        locked,
        "xtables.lock is kept locked",
        mode="iptables",
        flags=("--iptables-variant=legacy",),
    ),
    Fault(
        SLOW,
        "more than 10,000 rules of iptables",
        many_services,
        "there are .* rules, more than 10000",
        mode="iptables",
        status=0,
    ),
    Fault(
        SLOW,
        "large packets get lost on the way",
        small_path,
        "packets of 1500 bytes from .* do not reach the endpoint 10.244.1.7",
    ),
    Fault(
        RESTART,
        "the process did not start, and the rules are gone",
        gone,
        "no steersman runs on this node",
    ),
    Fault(RESTART, "another kube-proxy started, too", another_proxy, "another proxy runs"),
    Fault(
        RESTART,
        "rules of the mode before lead to a former endpoint",
        stale_rules,
        "rules that the iptables .*mode left lead shop/web elsewhere",
    ),
    Fault(
        RESTART,
        "a sysctl was set by hand only",
        sysctl("ipv4/ip_forward", "0", "1"),
        "does not forward IPv4 packets",
    ),
    Fault(
        SLOW,
        "one of three pods drops the packets",
        black_hole(ENDS[2]),
        rf"10.244.1.7:8080 \(1 of 3 endpoints\) does not answer .*: no answer at all|{LOST}",
    ),
)


def nodes() -> list[tuple[str, tuple[str, ...], str]]:
    return [*dict.fromkeys(fault.node for fault in FAULTS)]


class Row(NamedTuple):
    case: str
    fault: str
    said: str
    seconds: float


def diagnosed(node: FaultyNode, fault: Fault) -> Row:
    """Do a fault, ask doctor, and check what it names."""
    node.inside(NODE, "conntrack", "-F")  # what others did is no part of this
    with fault.do(node) as words:
        found = node.doctor(*(words or fault.words), through=fault.through(node))
    assert re.search(fault.cause, found.cause), (fault.name, found)
    assert found.status == fault.status, (fault.name, found)
    return Row(fault.case, fault.name, found.cause, found.seconds)


def healthy(node: FaultyNode) -> None:
    """Check that doctor finds nothing wrong."""
    found = node.doctor("shop/web")
    bad = [r for r in found.results if r["verdict"] in ("error", "warning")]
    assert (found.status, found.cause, bad) == (0, "", []), bad


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        pytest.param("ipvs", (), marks=pytest.mark.skipif(not HAS_IPVS, reason="no IPVS here")),
        ("userspace", ()),
        ("nftables", ()),
        ("iptables", ()),
        ("iptables", ("--iptables-variant=legacy",)),
    ],
)
def test_faults_of_every_mode_are_named_and_no_others(
    tmp_path: Path, mode: str, flags: tuple[str, ...]
) -> None:
    names = ("no endpoint is ready", "the programs in all pods are dead")
    with FaultyNode(tmp_path, mode, *flags) as node:
        healthy(node)
        for fault in FAULTS:
            if fault.name in names:
                diagnosed(node, fault)
        healthy(node)


@pytest.mark.parametrize("kind", nodes(), ids=lambda kind: "-".join((kind[0], *kind[1], kind[2])))
def test_the_cause_of_every_fault_is_named_first(
    tmp_path: Path, kind: tuple[str, tuple[str, ...], str], update: bool
) -> None:
    mode, flags, bridge = kind
    with FaultyNode(tmp_path, mode, *flags, bridge=bridge) as node:
        rows = [diagnosed(node, fault) for fault in FAULTS if fault.node == kind]
    for row in rows:
        print(f"{row.seconds:5.1f} s  {row.case}: {row.fault}\n         {row.said}")
    text = PAGE.read_text()
    before, _, rest = text.partition("<!-- faults -->\n")
    table, _, after = rest.partition("<!-- end of faults -->\n")
    table = with_rows(table, rows)
    new = f"{before}<!-- faults -->\n{table}<!-- end of faults -->\n{after}"
    if update:
        PAGE.write_text(new)
        return
    assert new == text, "run it with --update, and read the difference"


def with_rows(table: str, rows: Sequence[Row]) -> str:
    """Return the page's table with these rows; it has faults of ours only, in our order."""
    lines = {tuple(line.split(" | ")[:2]): line for line in table.splitlines()}
    for row in rows:
        line = f"| {row.case} | {row.fault} | {row.said} |"
        for pattern, words in VARYING:
            line = re.sub(pattern, words, line)
        lines[f"| {row.case}", row.fault] = line
    ordered = [(f"| {case}", f.name) for case in CASES for f in FAULTS if f.case == case]
    listed = [lines[each] for each in ordered if each in lines]
    return "\n".join(
        ["| case | fault | what doctor names first |", "| --- | --- | --- |", *listed, ""]
    )


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_several_faults(case: str) -> None:
    assert len([fault for fault in FAULTS if fault.case == case]) >= 3
