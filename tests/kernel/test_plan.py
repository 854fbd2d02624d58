"""`steersman plan` on a node: the kernel compared, nothing written, scripts that tools accept."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.apiserver.reading import service, slice_
from tests.support.builders import kube
from tests.support.lab.conntrack_flows import FlowEntry, add_entries
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import (
    FLAGS,
    NOBODY,
    command,
    manifests,
    steersman,
    world,
)
from tests.support.waiting import until

pytestmark = pytest.mark.kernel
PATIENCE = 60.0
UPSTREAM = """\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-SVC-LOLE4ISW44XBNF3G - [0:0]
:KUBE-SEP-62U4XBOPUQ2ZVTFH - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.77/32 -p tcp -m comment --comment "old/gone cluster IP" -m tcp \
--dport 80 -j KUBE-SVC-LOLE4ISW44XBNF3G
-A KUBE-SVC-LOLE4ISW44XBNF3G -m comment --comment "old/gone" -j KUBE-SEP-62U4XBOPUQ2ZVTFH
-A KUBE-SEP-62U4XBOPUQ2ZVTFH -p tcp -m tcp -j DNAT --to-destination 10.244.0.9:80
COMMIT
"""


def counts(out: str) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Added, changed and removed objects by mode and kind, of the table in an answer."""
    rows = re.findall(r"^(\w.*?) {3,}(\w.*?) {3,}([\d-]+) +([\d-]+) +([\d-]+)$", out, re.MULTILINE)
    return {
        (mode, kind): (number(added), number(changed), number(removed))
        for mode, kind, added, changed, removed in rows
    }


def number(text: str) -> int:
    return 0 if text == "-" else int(text)


def everything() -> str:
    said = sh("(iptables-save; ip6tables-save; nft -s list ruleset; ip address) 2>/dev/null")
    said = re.sub(r"^#.*$", "", said, flags=re.MULTILINE)  # times
    return re.sub(r"\[\d+:\d+\]", "", said)


def tool_accepts(argv: list[str], text: str) -> None:
    done = subprocess.run(argv, input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{text}"


def test_a_switch_of_the_running_mode(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        async with steersman(tmp_path, f"--manifests={folder}") as process:
            await process.said("(start)", PATIENCE)
            before = everything()
            code, out, _ = await command("plan")
            assert (code, "nothing to change" in out) == (0, True), out
            code, out, _ = await command("plan", "--proxy-mode=nftables")
            assert code == 1
            assert "from iptables mode to nftables mode" in out
            found = counts(out)
            assert found["nftables", "elements of service-ips"] == (1, 0, 0)
            removed = {kind for (mode, kind), n in found.items() if n[2] and "iptables" in mode}
            assert removed >= {"chains of Services", "chains of the node", "rules by destination"}
            assert "a cluster IP rejects connections to ports of no Service at once" in out
            assert "no established connection is cut" in out
            script = (await command("plan", "--proxy-mode=nftables", "--script=nft"))[1]
            tool_accepts(["nft", "-c", "-f", "-"], script)
            words = ("plan", "--proxy-mode=nftables", "--script=iptables-restore")
            script = (await command(*words))[1]
            assert "-X KUBE-SERVICES" in script
            tool_accepts(["iptables-restore", "--test", "--noflush"], script)
            code, _, error = await command("plan", "--proxy-mode=nftables", "--script=ipvsadm")
            assert code == 2
            assert "nothing to do for ipvsadm" in error
            assert everything() == before

    in_namespace(body)


def test_new_manifests_name_the_services_and_objects_that_change(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = ("--proxy-mode=nftables", *FLAGS)
        async with steersman(tmp_path, f"--manifests={folder}", *flags) as process:
            await process.said("(start)", PATIENCE)
            new: list[dict[str, Any]] = [service("web"), slice_("web-1", "web", "10.244.0.6")]
            new += [service("db", "10.96.0.2"), slice_("db-1", "db", "10.244.0.7")]
            other = manifests(tmp_path / "new", *new)
            code, out, _ = await command("plan", f"--manifests={other}", "--objects")
            assert code == 1
            assert counts(out)["nftables", "elements of service-ips"] == (1, 0, 0)
            assert counts(out)["nftables", "elements of service-endpoints"] == (1, 1, 0)
            assert "cluster IP served from now on\n    1 Service: shop/db" in out
            assert "endpoint gets no more connections\n    1 Service: shop/web" in out
            gone = "- table ip kube-proxy, map service-endpoints: 10.96.0.1 . tcp . 80 . 0 : "
            assert gone in out

    in_namespace(body)


def test_endpoints_that_came_and_went_leave_nothing_to_change(tmp_path: Path) -> None:
    """An endpoint keeps its slot, so the slots differ from those of a plan made from nothing."""

    def elements() -> str:
        return sh("nft list map ip kube-proxy service-endpoints")

    def is_gone(address: str) -> bool:
        return address not in elements()

    async def body() -> None:
        folder = manifests(tmp_path / "m", *world("10.244.0.5", "10.244.0.6", "10.244.0.7"))
        flags = ("--proxy-mode=nftables", *FLAGS)
        async with steersman(tmp_path, f"--manifests={folder}", *flags) as process:
            await process.said("(start)", PATIENCE)
            for addresses, gone in (
                (("10.244.0.6", "10.244.0.7"), "10.244.0.5"),
                (("10.244.0.4", "10.244.0.7"), "10.244.0.6"),
            ):
                manifests(folder, *world(*addresses))
                await until(partial(is_gone, gone))
            assert "10.244.0.4" in elements()
            code, out, _ = await command("plan")
            assert (code, "nothing to change" in out) == (0, True), out
            assert "10.244.0.4" in elements()

    in_namespace(body)


def test_the_rules_of_an_upstream_proxy_go_or_are_replaced(tmp_path: Path) -> None:
    async def body() -> None:
        tool_accepts(["iptables-restore", "--noflush"], UPSTREAM)
        folder = manifests(tmp_path / "m", *world())
        before = everything()
        flags = (f"--manifests={folder}", *FLAGS)
        code, out, _ = await command("plan", *flags)
        assert code == 1
        _, _, removed = counts(out)["iptables", "chains of Services"]
        assert removed == 2  # of a Service that does not exist any more
        assert counts(out)["iptables", "rules by destination"][2] == 1
        code, out, _ = await command("plan", "--proxy-mode=nftables", *flags)
        assert "from iptables mode to nftables mode" in out
        assert counts(out)["iptables (nft)", "chains of Services"] == (0, 0, 2)
        code, out, _ = await command("plan", "--cleanup", *flags)
        assert code == 1
        assert "to no rules" in out
        assert counts(out)["iptables", "chains of Services"] == (0, 0, 2)
        assert everything() == before

    in_namespace(body)


def test_a_dry_run_after_a_run_has_nothing_to_change(tmp_path: Path) -> None:
    """Node ports on loopback are sockets of the process: no change of the kernel."""

    async def body() -> None:
        sh("ip address add 192.0.2.1/24 dev lo; ip route add default via 192.0.2.2 dev lo")
        port = {"port": 80, "protocol": "TCP", "nodePort": 30080}
        web = kube.service("web", type="NodePort", ports=[port])
        folder = manifests(tmp_path / "m", web, slice_("web-1", "web", "10.244.0.5"))
        flags = (f"--manifests={folder}", "--proxy-mode=nftables")
        async with steersman(tmp_path, *flags) as process:
            await process.said("(start)", PATIENCE)
            assert "30080" in sh("ss -ltn")
        status, out, _ = await command("run", "--dry-run", *flags, *FLAGS)
        assert (status, "nothing to change" in out) == (0, True), out
        sh("nft flush ruleset")
        status, out, _ = await command("run", "--dry-run", *flags, *FLAGS)
        assert status == 1
        assert counts(out)["nftables", "tables"] == (2, 0, 0)
        assert "+ table ip kube-proxy: base chains" in out

    in_namespace(body)


def test_without_root_the_rules_of_a_mode_are_rendered(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", "--proxy-mode=nftables", *FLAGS)
        program = [
            *NOBODY,
            sys.executable,
            "-m",
            "steersman",
            "plan",
            *flags,
            "--from-mode=iptables",
        ]
        out = sh(f"{' '.join(program)}; echo status $?")
        assert out.endswith("status 1\n")
        assert "the rules that the iptables mode has for these objects" in out
        assert counts(out)["iptables", "chains of the node"][2] > 5
        assert "reading it needs root" in sh(f"{' '.join(program[:-1])}; true")

    in_namespace(body)


def test_connections_that_would_end_are_counted(tmp_path: Path) -> None:
    async def body() -> None:
        dns = kube.service("dns", ports=[{"port": 53, "protocol": "UDP"}])

        def ends(*addresses: str) -> dict[str, Any]:
            port = {"name": "", "port": 5353, "protocol": "UDP"}
            return kube.endpoint_slice("dns-1", "dns", *addresses, ports=[port])

        folder = manifests(tmp_path / "m", dns, ends("10.244.0.5", "10.244.0.6"))
        async with steersman(tmp_path, f"--manifests={folder}") as process:
            await process.said("(start)", PATIENCE)
            flows = [
                FlowEntry(
                    17, "10.244.1.1", 1000 + n, "10.96.0.1", 53, f"10.244.0.{5 + n % 2}", 5353
                )
                for n in range(6)
            ]
            add_entries(flows)
            fewer = manifests(tmp_path / "new", dns, ends("10.244.0.5"))
            code, out, _ = await command("plan", f"--manifests={fewer}")
            assert code == 1
            assert "connections: 3 entries of conntrack lead to endpoints that go" in out, out
            _, out, _ = await command("plan", f"--manifests={manifests(tmp_path / 'none')}")
            assert "connections: 6 entries of conntrack lead" in out, out
            code, out, _ = await command("plan", "--proxy-mode=nftables")
            assert "no established connection is cut" in out, out

    in_namespace(body)


def test_leaving_a_mode_that_carries_connections_is_said_to_cut_them(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", "--proxy-mode=userspace", *FLAGS)
        async with steersman(tmp_path, *flags) as process:
            await process.said("(start)", PATIENCE)
            code, out, _ = await command("plan")
            assert (code, "nothing to change" in out) == (0, True), out
            code, out, _ = await command("plan", "--proxy-mode=iptables")
            assert code == 1
            assert "connections: all that the process carries end with it" in out
            assert "connections no longer end in the process" in out
            assert any("userspace" in mode for mode, _ in counts(out)), out

    in_namespace(body)


def test_without_root_the_present_rules_are_those_that_the_process_wrote(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        sh("ip address add 10.96.0.1/32 dev lo; sysctl -qw net.ipv4.ip_unprivileged_port_start=0")
        flags = (f"--manifests={folder}", "--proxy-mode=userspace", "--userspace-portals=none")
        async with steersman(tmp_path, *flags, through=NOBODY) as process:
            await process.said("(start)", PATIENCE)
            nobody = " ".join((*NOBODY, sys.executable, "-m", "steersman"))
            out = sh(f"{nobody} plan --proxy-mode=nftables; echo status $?")
            assert out.endswith("status 1\n")
            assert "the rules as the running process wrote them" in out
            assert "from userspace mode to nftables mode" in out
            assert counts(out)["nftables", "elements of service-ips"] == (1, 0, 0)

    in_namespace(body)


def test_a_configuration_file_is_taken_as_it_is(tmp_path: Path) -> None:
    """Nothing in it follows the running process: it is what a restart with it would do."""

    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        file = tmp_path / "new.yaml"
        file.write_text(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
            "mode: iptables\nhostnameOverride: node-a\nclusterCIDR: 10.250.0.0/16\n"
        )
        async with steersman(tmp_path, f"--manifests={folder}") as process:
            await process.said("(start)", PATIENCE)
            code, out, error = await command("plan", f"--config={file}")
            assert code == 1, error
            reason = "IPv4: local pods are recognised by 10.250.0.0/16 instead of 10.244.0.0/16"
            assert reason in out
            assert counts(out)["iptables", "chains of Services"][1] >= 1

    in_namespace(body)
