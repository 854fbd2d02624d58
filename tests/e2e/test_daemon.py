"""The whole process in a network namespace: what operators, probes and supervisors see of it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.apiserver.reading import slice_
from tests.support.apiserver.server import ApiServer
from tests.support.builders import kube
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import (
    FLAGS,
    NODE,
    answers,
    command,
    get,
    in_rules,
    manifests,
    not_in_rules,
    rules,
    steersman,
    world,
)
from tests.support.waiting import until

pytestmark = pytest.mark.kernel


def test_manifests_reach_the_kernel_and_changes_follow(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        async with steersman(tmp_path, f"--manifests={folder}") as proxy:
            await proxy.said("Using iptables Proxier")
            await until(lambda: in_rules("10.244.0.5:"))
            manifests(folder, *world("10.244.0.6"))
            await until(lambda: in_rules("10.244.0.6:"))
            assert "10.244.0.5:" not in rules()
            assert await proxy.stop() == 0
            assert "10.244.0.6:" in rules()  # the data path outlives the process
        status, out, _ = await command("cleanup")
        assert (status, "KUBE-SVC" in rules()) == (0, False)
        assert re.search(r"^iptables: [1-9]\d* kernel objects removed$", out, re.MULTILINE)

    in_namespace(body)


def test_a_restart_that_finds_nothing_to_change_writes_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        async with steersman(tmp_path, f"--manifests={folder}") as proxy:
            await proxy.said("sync 1 (start)")
            await proxy.stop(signal.SIGKILL)
        async with steersman(tmp_path, f"--manifests={folder}", name="second") as proxy:
            await proxy.said("sync 1 (start): 1 ServicePorts planned, kernel objects 0 added, 0 ")

    in_namespace(body)


def test_what_breaks_in_a_world_at_rest_is_said_and_so_is_its_mending(tmp_path: Path) -> None:
    async def body() -> None:
        folder, broken = tmp_path / "m", tmp_path / "m" / "broken.yaml"
        flags = (f"--manifests={folder}", "--iptables-sync-period=1h")  # nothing else wakes it
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said(f"{folder}: cannot be read")
            manifests(folder, *world())
            await proxy.said(f"resolved: {folder}: cannot be read")
            await proxy.said("sync 1 (start)")
            broken.write_text("kind: [\n")
            await proxy.said(f"{broken} line 2: is not YAML")
            assert json.loads((await get("/state"))[1])["findings"]
            broken.unlink()
            await proxy.said(f"resolved: {broken} line 2")
            assert not json.loads((await get("/state"))[1])["findings"]

    in_namespace(body)


def test_a_dry_run_shows_the_difference_and_changes_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        status, out, _ = await command("run", "--dry-run", f"--manifests={folder}", *FLAGS)
        assert status == 1
        assert any(line.startswith("+ ") and "10.244.0.5:" in line for line in out.splitlines())
        assert re.search(r"^iptables +chains of Services +\d+ +- +-$", out, re.MULTILINE)
        assert "KUBE-" not in rules()

    in_namespace(body)


def test_a_dry_run_speaks_nft_in_nftables_mode(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", "--proxy-mode=nftables", *FLAGS)
        status, out, _ = await command("run", "--dry-run", *flags)
        assert status == 1
        assert "+ table ip kube-proxy: base chains, sets and maps" in out
        slot = "map service-endpoints: 10.96.0.1 . tcp . 80 . 0 : 10.244.0.5 . 8080"
        assert f"+ table ip kube-proxy, {slot}" in out.splitlines()
        assert sh("nft list ruleset") == ""

    in_namespace(body)


def test_flushed_rules_are_back_within_the_sync_period(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", "--iptables-sync-period=300ms")
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("sync 1 (start)")
            sh("iptables -t nat -F; iptables -F")
            await until(lambda: in_rules("10.244.0.5:"))
            await proxy.said("(drift)")

    in_namespace(body)


def test_rules_that_cannot_be_repaired_make_the_proxy_unhealthy_until_they_are(
    tmp_path: Path,
) -> None:
    broken, tools = tmp_path / "broken", tmp_path / "tools"
    tools.mkdir()
    for name in ("iptables-restore", "iptables-nft-restore"):
        script = tools / name
        real = f"/usr/sbin/{name}"
        script.write_text(f'#!/bin/sh\n[ ! -e {broken} ] || exit 4\nexec {real} "$@"\n')
        script.chmod(0o755)

    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", "--iptables-sync-period=300ms")
        through = ("env", f"PATH={tools}:{os.environ['PATH']}:/usr/sbin:/sbin")
        async with steersman(tmp_path, *flags, through=through) as proxy:
            await proxy.said("sync 1 (start)")
            await answers("/healthz", 10256)
            broken.touch()
            sh("iptables -t nat -F; iptables -F")
            await answers("/healthz", 10256, 503)
            await proxy.said("sync failed: iptables")
            assert "10.244.0.5:" not in rules()
            assert "Traceback" not in proxy.log
            broken.unlink()
            await until(lambda: in_rules("10.244.0.5:"))
            await answers("/healthz", 10256)

    in_namespace(body)


def test_servers_answer_as_probes_and_monitoring_expect(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        async with steersman(tmp_path, f"--manifests={folder}", "--v=2"):
            await answers("/readyz", 10256)
            health = json.loads((await get("/healthz", 10256))[1])
            assert health["healthy"]
            assert set(health["status"]) >= {"IPv4"}
            assert (await get("/livez", 10256))[0] == 200
            assert (await get("/proxyMode"))[1] == "iptables"
            assert "kubeproxy.config.k8s.io" in json.loads((await get("/configz"))[1])
            metrics = (await get("/metrics"))[1]
            assert (
                'kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1' in metrics
            )
            assert 'sync_proxy_rules_iptables_total{ip_family="IPv4",table="nat"} ' in metrics
            state = json.loads((await get("/state"))[1])
            assert state["objects"]["servicePorts"] == 1
            status, out, _ = await command("status")
            assert status == 0
            assert "1 Services, 1 EndpointSlices, 1 ServicePorts" in out

    in_namespace(body)


def test_the_health_check_node_port_tells_of_local_endpoints(tmp_path: Path) -> None:
    async def body() -> None:
        lb = kube.service(
            type="LoadBalancer",
            externalTrafficPolicy="Local",
            healthCheckNodePort=32100,
            ports=[{"port": 80, "nodePort": 30080}],
        )
        slice_here = slice_("web-1", "web", "10.244.0.5")
        slice_here["endpoints"][0]["nodeName"] = NODE
        folder = manifests(tmp_path / "m", lb, slice_here)
        async with steersman(tmp_path, f"--manifests={folder}"):
            await answers("/", 32100)
            _, body, headers = await get("/", 32100)
            assert json.loads(body)["localEndpoints"] == 1
            assert headers["X-Load-Balancing-Endpoint-Weight"] == "1"
            slice_here["endpoints"][0]["nodeName"] = "elsewhere"
            manifests(folder, lb, slice_here)
            await answers("/", 32100, status=503)

    in_namespace(body)


def test_the_api_server_is_followed_and_told_of_the_start(tmp_path: Path) -> None:
    async def body() -> None:
        node = kube.node(NODE, "192.0.2.1")
        async with ApiServer([*world(), node]) as server:  # noqa: SIM117 - the flag needs its URL
            async with steersman(tmp_path, f"--master={server.url}") as proxy:
                await proxy.said("sync 1 (start)")
                server.add(slice_("web-1", "web", "10.244.0.9"))
                await until(lambda: in_rules("10.244.0.9:"))
                await answers("/healthz", 10256)
                node["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                server.add(node)
                await answers("/healthz", 10256, status=503)
                assert await proxy.stop() == 0

    in_namespace(body)


def test_a_changed_configuration_is_applied_live_and_a_bad_one_refused(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        file = tmp_path / "config.yaml"

        def write(text: str) -> None:
            new = tmp_path / "config.new"
            new.write_text(
                "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
                f"conntrack: {{maxPerCore: 0}}\nclusterCIDR: 10.244.0.0/16\n{text}"
            )
            os.replace(new, file)

        write("")
        flags = (f"--manifests={folder}", f"--config={file}")
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("sync 1 (start)")
            assert "! -s 10.244.0.0/16" in rules()
            write("iptables: {masqueradeAll: true}\n")
            await proxy.said("applied: iptables.masqueradeAll")
            await until(lambda: not_in_rules("! -s 10.244.0.0/16"))
            write("iptables: {masqueradeBit: 99}\n")
            await proxy.said("keeping the previous configuration")
            write("mode: nftables\n")
            await proxy.said("takes effect after a restart: the mode")
            assert proxy.process.returncode is None

    in_namespace(body)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--proxy-mod=iptables",), "--proxy-mode"),
        (("--kubeconfig=/nowhere/config",), "/nowhere/config"),
        (("--proxy-mode=fast",), "proxy"),
    ],
)
def test_what_cannot_start_says_why_and_changes_nothing(
    flags: tuple[str, ...], message: str
) -> None:
    async def body() -> None:
        status, _, err = await command("run", *flags)
        assert status == (2 if message == "--proxy-mode" else 1)
        assert message in err.splitlines()[-1]
        assert "Traceback" not in err
        assert sh("sysctl -n net.ipv4.conf.all.route_localnet").strip() == "0"

    in_namespace(body)


def test_the_other_iptables_does_not_keep_old_rules(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", "--iptables-variant=legacy")
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("sync 1 (start)")
            await proxy.stop()
        assert "10.244.0.5:" in sh("iptables-legacy-save")
        flags = (f"--manifests={folder}", "--iptables-variant=nft")
        async with steersman(tmp_path, *flags, name="second") as proxy:
            await proxy.said("iptables (legacy) mode: removed")
            assert "KUBE-SVC" not in sh("iptables-legacy-save")
            assert "10.244.0.5:" in sh("iptables-nft-save")

    in_namespace(body)
