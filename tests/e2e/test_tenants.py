"""Two tenants on one node, through the whole process: what each keeps and cannot take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.apiserver.reading import slice_
from tests.support.builders import kube
from tests.support.lab.namespace import in_namespace
from tests.support.processes.steersman import get, manifests, rules, steersman
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

CONFIGURATION = """
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clusterCIDR: 10.244.0.0/16
hostnameOverride: node-a
conntrack: {maxPerCore: 0}
iptables: {minSyncPeriod: 0s, masqueradeBit: %d}
"""


def asking(name: str, address: str, **meta: Any) -> dict[str, Any]:
    ports = [{"port": 80, "nodePort": 30080}]
    return kube.service(name, address, ports=ports, metadata=meta, type="NodePort")


def node_port_of() -> str:
    """The Service that has node port 30080 in the kernel."""
    lines = [line for line in rules().splitlines() if "--dport 30080" in line]
    return " ".join(lines)


def test_a_manifest_cannot_take_the_node_port_of_a_service_that_serves(tmp_path: Path) -> None:
    async def body() -> None:
        web = asking("web", "10.96.0.20"), slice_("web-1", "web", "10.244.0.5")
        aaa = asking("aaa", "10.96.0.21"), slice_("aaa-1", "aaa", "10.244.0.6")
        folder = manifests(tmp_path / "m", *web)
        config = tmp_path / "config.yaml"
        config.write_text(CONFIGURATION % 14)
        async with steersman(tmp_path, f"--manifests={folder}", f"--config={config}") as proxy:
            await proxy.said("sync 1 (start)")
            before = node_port_of()
            assert before
            manifests(folder, *aaa, *web)
            await proxy.said("node port 30080/TCP is held by Service shop/web (")
            config.write_text(CONFIGURATION % 15)
            await proxy.said("applied: ")

            async def is_marked() -> bool:
                return "0x8000" in rules()

            await until(is_marked)
            assert node_port_of() == before

            manifests(folder, *aaa)

            async def is_taken() -> bool:
                return node_port_of() not in ("", before)

            await until(is_taken)

            async def is_well() -> bool:
                return not json.loads((await get("/state"))[1])["findings"]

            await until(is_well)

    in_namespace(body)
