"""A dual-stack Service on a node that ejects endpoints: IPv6 is as IPv4, also without NFLOG."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from steersman.host.netlink import NETLINK_NETFILTER, Netlink, NetlinkError
from steersman.netfilter import nflog
from steersman.netfilter.failure_log import GROUPS
from tests.support.builders import kube
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.faulty_node import (
    CLIENT,
    ENDS,
    NODE,
    PATIENCE,
    VIP,
    FaultyNode,
    Object,
    endpoint,
)
from tests.support.lab.sockets import Outcome, printed
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=60)]
MODES = [
    ("nftables",),
    ("iptables", "--iptables-variant=nft"),
    ("iptables", "--iptables-variant=legacy"),
]
NODE6, CLIENT6, VIP6 = "2001:db8::1", "fd00:244::9", "fd00:96::a"
ENDS6 = ("fd00:244::5", "fd00:244::6", "fd00:244:1::7")
CLIENTS = {VIP: (CLIENT, NODE), VIP6: (CLIENT6, NODE6)}
TWIN = dict(zip(ENDS6, ENDS, strict=True))


class DualStackNode(FaultyNode):
    """The node, its Service and its endpoints with an IPv6 address each, too."""

    def __init__(self, folder: Path, mode: str, *flags: str) -> None:
        super().__init__(folder, mode, "--cluster-cidr=10.244.0.0/16,fd00:244::/48", *flags)
        pods = [Pod(address, local=address != ENDS[2]) for address in (*ENDS, CLIENT)]
        pods += [Pod(address, local=address != ENDS6[2]) for address in (*ENDS6, CLIENT6)]
        self.lab = Lab(Layout({"eth0": (f"{NODE}/24", f"{NODE6}/64"), "lo": ()}, (), tuple(pods)))

    def serve(self) -> None:
        super().serve()
        for address in ENDS6:
            self.lab.serve(address, 8080, "TCP")

    def write(self, objects: Sequence[Object]) -> None:
        service = objects[0]
        service["spec"] |= {"clusterIPs": [VIP, VIP6], "ipFamilies": ["IPv4", "IPv6"]}
        ends = [{**endpoint(TWIN[address]), "addresses": [address]} for address in ENDS6]
        port = {"name": "http", "port": 8080, "protocol": "TCP"}
        more = kube.endpoint_slice("web-2", "web", *ends, family="IPv6", ports=[port])
        super().write([*objects, more])

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def until(self, true: Callable[[], bool]) -> None:
        wait_until(true, lambda: self.log)

    def connect(self, vip: str, number: int = 30, timeout: float = PATIENCE) -> list[Outcome]:
        """Connect many times at once, from a pod and from the node."""

        def one(index: int) -> Outcome:
            return self.lab.probe(CLIENTS[vip][index % 2], vip, 80, timeout=timeout)

        with ThreadPoolExecutor(number) as pool:
            return list(pool.map(one, range(number)))

    def reached(self, vip: str, timeout: float = PATIENCE) -> set[str]:
        return {each.endpoint or each.kind for each in self.connect(vip, timeout=timeout)}

    def says_doctor(self) -> list[tuple[str, str]]:
        """Verdicts and texts of doctor about failover."""
        results = self.doctor().results
        return [(each["verdict"], each["text"]) for each in results if each["check"] == "failover"]

    def ejected(self, address: str) -> int:
        """How many times an endpoint was ejected."""
        where = printed(address, 8080)
        return self.log.count(f"endpoint {where} of Service shop/web is ejected")


@pytest.fixture(params=MODES, ids=lambda words: "-".join(words).replace("--iptables-variant=", ""))
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DualStackNode]:
    mode, *more = request.param
    with DualStackNode(tmp_path, mode, "--eject-failing-endpoints", *more) as node:
        yield node


def names(addresses: Sequence[str]) -> set[str]:
    return {printed(address, 8080) for address in addresses}


def fail(node: DualStackNode, address: str, vip: str, action: str) -> None:
    """Let an endpoint fail: it is ejected, and used again once it is well."""
    others = names([each for each in (ENDS6 if vip == VIP6 else ENDS) if each != address])
    other_family = VIP if vip == VIP6 else VIP6
    before = node.ejected(address)
    with node.rules(
        address, f"chain in {{ type filter hook input priority 0; tcp dport 8080 {action}; }}"
    ):
        # A watch that lists entries every second sees each SYN only once: there must be new ones
        # if the machine stood still meanwhile.
        node.until(lambda: node.reached(vip, 10.0) == others)
        assert node.ejected(address) == before + 1
        assert len(node.reached(other_family)) == 3
    node.until(lambda: node.reached(vip) == others | names([address]))


@pytest.mark.parametrize(
    "action", ["drop", "reject with tcp reset", "reject with icmpx type host-unreachable"]
)
def test_an_endpoint_of_ipv6_that_fails_is_left_and_used_again(
    node: DualStackNode, action: str
) -> None:
    assert node.reached(VIP6) == names(ENDS6)
    fail(node, ENDS6[1], VIP6, action)
    assert sum(map(node.ejected, (*ENDS, *ENDS6))) == 1
    assert node.says_doctor() == [("ok", "packets of connections that fail are logged")]


def listens(netlink: Netlink, group: int) -> bool:
    """Listen to a group, unless the kernel has not yet closed the socket of a killed process."""
    try:
        nflog.listen(netlink.request, [group])
    except NetlinkError as error:
        if error.errno != errno.EPERM:
            raise
        return False
    return True


def test_where_packets_cannot_be_logged_a_finding_says_so(tmp_path: Path) -> None:
    with (
        DualStackNode(tmp_path, "nftables", "--eject-failing-endpoints") as node,
        ExitStack() as others,
    ):
        node.stop(signal.SIGKILL)

        def listen() -> None:
            """Be the other programs that listen to every group."""
            for group in GROUPS:
                netlink = others.enter_context(Netlink(NETLINK_NETFILTER))
                node.until(lambda: listens(netlink, group))  # noqa: B023 - it is called at once

        node.lab.node.call(listen)
        node.start()
        why = "failing endpoints are not ejected: other programs listen to all NFLOG groups"
        node.until(lambda: why in node.log)
        [(verdict, text)] = node.says_doctor()
        assert verdict == "warning"
        assert text.startswith(why)
        assert "steersman-failures" not in node.lab.run("nft", "list", "tables")
