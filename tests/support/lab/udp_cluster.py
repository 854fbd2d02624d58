"""A node with a process of ours, and a UDP Service whose type, ports and endpoints change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.builders import kube
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.mounts import Mounts, ebpf_mounts
from tests.support.lab.sockets import CGROUPS
from tests.support.waiting import wait_until

NODE, NODE6, OUTSIDE, OUTSIDE6 = "192.0.2.1", "2001:db8::1", "203.0.113.9", "2001:db8:9::9"
CLIENT, CLIENT6 = "10.244.7.7", "fd00:10:244::7"
ENDS, ENDS6 = ("10.244.0.1", "10.244.0.2"), ("fd00:10:244::1", "fd00:10:244::2")
VIP, VIP6, LB, LB6 = "10.96.0.10", "fd00:10:96::10", "198.51.100.1", "2001:db8:51::1"
WAIT = 60.0


class UdpCluster:
    """A process of ours on the node, and the Service."""

    def __init__(self, lab: Lab, folder: Path, mode: str) -> None:
        self.lab, self.folder = lab, folder
        self.log = folder / "log"
        (folder / "objects").mkdir()
        self.apply([], [])
        command = [
            *(sys.executable, "-m", "steersman", "run", f"--manifests={folder}/objects"),
            *(f"--proxy-mode={mode}", "--hostname-override=here", "--conntrack-max-per-core=0"),
            "--cluster-cidr=10.244.0.0/16,fd00:10:244::/64",
        ]
        cgroup, script = ebpf_mounts(lab)
        self._mounts = Mounts(script)
        into = f'echo 0 > {cgroup}/cgroup.threads && exec "$@"'
        argv = ["sh", "-c", into, "sh", *self._mounts.argv(*command)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(lab.exec_argv(argv), stdout=log, stderr=log)

    def apply(self, ends: Sequence[str], ends6: Sequence[str], **service: Any) -> None:
        """Replace the objects by others."""
        port = {"protocol": "UDP", "targetPort": 5300, **service.pop("port", {"port": 53})}
        both: dict[str, Any] = {"clusterIPs": [VIP, VIP6], "ipFamilies": ["IPv4", "IPv6"]}
        listens: list[dict[str, Any]] = [{"name": "", "port": 5300, "protocol": "UDP"}]
        objects = [
            kube.service("dns", VIP, ports=[port], **both, **service),
            kube.endpoint_slice("dns-4", "dns", *ends, ports=listens),
            kube.endpoint_slice("dns-6", "dns", *ends6, ports=listens, family="IPv6"),
        ]
        new = self.folder / "new"
        new.write_text(yaml.safe_dump_all(objects))
        new.replace(self.folder / "objects" / "dns.yaml")

    def until(self, true: Callable[[], bool]) -> None:
        wait_until(true, lambda: (self.log.read_text(), self.lab.run("conntrack", "-L")))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._mounts.close()
        del CGROUPS[self.lab.node.path]


@contextmanager
def udp_lab() -> Iterator[Lab]:
    """The namespaces of the node and of the pods, with servers on all endpoints."""
    pods = tuple(map(Pod, (*ENDS, *ENDS6, CLIENT, CLIENT6)))
    interfaces = {"eth0": (f"{NODE}/24", f"{NODE6}/64")}
    with Lab(Layout(interfaces, (OUTSIDE, OUTSIDE6), pods)) as made:
        for end in (*ENDS, *ENDS6):
            made.serve(end, 5300, "UDP", end)
        yield made
