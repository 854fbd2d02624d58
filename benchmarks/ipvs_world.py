"""The same cluster as upstream's ipvs mode programs it, through ipvsadm, ipset and ip."""

from __future__ import annotations

import subprocess

from benchmarks import world
from benchmarks.node import Netns

_DEVICE = "kube-ipvs0"


class IpvsFlat:
    """A node with upstream's virtual servers, sets and addresses.

    Upstream writes all but the sets by netlink itself. So one change by these programs would say
    nothing of it: they would mostly start.
    """

    def __init__(self) -> None:
        self.netns = Netns()
        _run(f"link add {_DEVICE} type dummy\n", "ip", "-batch", "-")
        _run(
            "create KUBE-CLUSTER-IP hash:ip,port maxelem 1048576\n"
            "create KUBE-LOOP-BACK hash:ip,port,ip maxelem 1048576\n",
            "ipset",
            "restore",
        )

    def fill(self, services: int) -> None:
        """Bring all Services in."""
        servers, entries, addresses = [], [], []
        for number in range(services):
            vip, pods = world.cluster_ip(number), world.pods(number)
            servers.append(f"-A -t {vip}:80 -s rr")
            servers += [f"-a -t {vip}:80 -r {pod}:8080 -m -w 1" for pod in pods]
            entries.append(f"add KUBE-CLUSTER-IP {vip},tcp:80")
            entries += [f"add KUBE-LOOP-BACK {pod},tcp:8080,{pod}" for pod in pods]
            addresses.append(f"addr add {vip}/32 dev {_DEVICE}")
        self.netns.enter()
        _run("\n".join([*addresses, ""]), "ip", "-batch", "-")
        _run("\n".join([*entries, ""]), "ipset", "restore")
        _run("\n".join([*servers, ""]), "ipvsadm", "-R")

    def close(self) -> None:
        self.netns.close()


def _run(text: str, *argv: str) -> None:
    subprocess.run(argv, input=text.encode(), check=True)
