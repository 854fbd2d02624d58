"""A configuration that changes while the process runs: what it says is applied is in force."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import (
    HAS_IPVS,
    get,
    in_rules,
    manifests,
    rules,
    steersman,
    world,
)
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

HEAD = (
    "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    "conntrack: {maxPerCore: 0}\nclusterCIDR: 10.244.0.0/16\n"
)


def write(folder: Path, text: str) -> Path:
    new = folder / ".config"
    new.write_text(HEAD + text)
    os.replace(new, folder / "config.yaml")
    return folder / "config.yaml"


async def routes_localhost() -> bool:
    return sh("sysctl -n net.ipv4.conf.all.route_localnet").strip() == "1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nodePortAddresses: [192.0.2.0/24]\n", ""),
        ("iptables: {localhostNodePorts: false}\n", "iptables: {localhostNodePorts: true}\n"),
    ],
)
def test_node_ports_come_to_localhost(tmp_path: Path, before: str, after: str) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", f"--config={write(tmp_path, before)}")
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("sync 1 (start)")
            assert not await routes_localhost()
            write(tmp_path, after)
            await proxy.said("applied: ")
            await until(routes_localhost)
            await until(lambda: gone("! -d 127.0.0.0/8"))

    in_namespace(body)


async def gone(text: str) -> bool:
    return text not in rules()


def test_a_shorter_sync_period_holds_from_now_on(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        config = write(tmp_path, "iptables: {syncPeriod: 1h}\n")
        async with steersman(tmp_path, f"--manifests={folder}", f"--config={config}") as proxy:
            await proxy.said("sync 1 (start)")
            write(tmp_path, "iptables: {syncPeriod: 1s}\n")
            await proxy.said("applied: iptables.syncPeriod")
            sh("iptables -t nat -F; iptables -F")
            await until(lambda: in_rules("10.244.0.5:"))

    in_namespace(body)


def test_the_least_time_between_syncs_may_be_longer_than_the_longest_was(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        config = write(tmp_path, "iptables: {syncPeriod: 3h, minSyncPeriod: 2h}\n")
        async with steersman(tmp_path, f"--manifests={folder}", f"--config={config}") as proxy:
            await proxy.said("sync 1 (start)")

    in_namespace(body)


def test_a_file_of_another_mode_changes_nothing_before_the_restart(tmp_path: Path) -> None:
    """Its defaults (`nodePortAddresses: [primary]`) and sections are those of the other mode."""

    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        config = write(tmp_path, "iptables: {masqueradeAll: true}\n")
        async with steersman(tmp_path, f"--manifests={folder}", f"--config={config}") as proxy:
            await proxy.said("sync 1 (start)")
            before = json.loads((await get("/configz"))[1])
            write(tmp_path, "mode: nftables\niptables: {masqueradeAll: true}\n")
            await proxy.said("takes effect after a restart: the mode, and everything else")
            assert json.loads((await get("/configz"))[1]) == before
            write(tmp_path, "iptables: {masqueradeAll: true, masqueradeBit: 7}\n")
            await proxy.said("applied: iptables.masqueradeBit")

    in_namespace(body)


@pytest.mark.skipif(HAS_IPVS, reason="this kernel has ip_vs: nothing falls back")
def test_what_stands_in_for_ipvs_stays_what_it_is(tmp_path: Path) -> None:
    async def body() -> None:
        service, slice_ = world()
        service["spec"] |= {"type": "NodePort", "externalTrafficPolicy": "Local"}
        service["spec"]["ports"] = [{"port": 80, "nodePort": 30080, "protocol": "TCP"}]
        folder = manifests(tmp_path / "m", service, slice_)
        text = "mode: ipvs\nsteersman: {ipvsLocalFallback: true}\n"
        flags = (f"--manifests={folder}", f"--config={write(tmp_path, text)}")
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("sync 1 (start)")
            before = rules("filter")
            assert "has no local endpoints" in before
            write(tmp_path, text + "logging: {verbosity: 2}\n")
            await proxy.said("applied: logging.verbosity")
            slice_["endpoints"].append({"addresses": ["10.244.9.99"], "nodeName": "elsewhere"})
            manifests(tmp_path / "m", service, slice_)
            await until(synced_again)
            assert rules("filter") == before
            assert '"mode":"iptables"' in (await get("/configz"))[1]

    in_namespace(body)


async def synced_again() -> bool:
    return bool(json.loads((await get("/state"))[1])["revision"] >= 2)
