"""`steersman dump` on a real kernel: all as planned, and what others changed, in each mode."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from steersman.compile.planner import compile_all
from steersman.host.exec import SubprocessExec
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import Family, ObjectName
from steersman.model.ruleset import diff
from steersman.model.world import Origin, World
from steersman.netfilter.trace.events import TraceEvent
from steersman.netfilter.trace.reader import read_rule_book
from steersman.operate.dump import compare
from steersman.source.store import Store
from tests.support.builders.ebpf_node_plan import NODE as NODE_IP
from tests.support.builders.ebpf_node_plan import POD, VIP
from tests.support.builders.store import replace_objects, service, slice_
from tests.support.lab.ebpf_node import MARKS, Node, serving
from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.registry import render
from tests.support.processes.steersman import NOBODY, NODE, command, manifests, steersman, world

pytestmark = pytest.mark.kernel
PATIENCE = 60.0


async def dumped(*words: str) -> tuple[int, dict[str, list[str]]]:
    """The exit status of `dump`, and the lines by state."""
    status, out, err = await command("dump", "shop/web", "-o", "json", *words)
    assert status < 2, err
    lines: dict[str, list[str]] = {}
    for line in json.loads(out)["lines"]:
        lines.setdefault(line["state"], []).append(line["text"])
    return status, lines


@pytest.mark.parametrize(
    ("flags", "present", "break_it", "missing"),
    [
        pytest.param(
            ["--proxy-mode=iptables"],
            "-j DNAT --to-destination 10.244.0.5:8080",
            "iptables -t nat -F KUBE-SERVICES",
            "-d 10.96.0.1/32",
            id="iptables",
        ),
        pytest.param(
            ["--proxy-mode=iptables"],
            "-A KUBE-SERVICES -d 10.96.0.1/32",
            "iptables -t nat -F PREROUTING",
            "-A PREROUTING",
            id="iptables-jump",
        ),
        pytest.param(
            ["--proxy-mode=iptables", "--iptables-variant=legacy"],
            "-A KUBE-SERVICES -d 10.96.0.1/32",
            "iptables-legacy -t nat -F KUBE-SERVICES",
            "-d 10.96.0.1/32",
            id="iptables-legacy",
        ),
        pytest.param(
            ["--proxy-mode=nftables"],
            "10.96.0.1 . tcp . 80 . 0 : 10.244.0.5 . 8080",
            "nft delete element ip kube-proxy service-ips { 10.96.0.1 . tcp . 80 }",
            "10.96.0.1 . tcp . 80 ",
            id="nftables",
        ),
        pytest.param(
            ["--proxy-mode=nftables"],
            "rules of this node",
            "nft flush chain ip kube-proxy nat-prerouting",
            "rules of this node",
            id="nftables-chain",
        ),
    ],
)
def test_what_others_removed_is_missing(
    tmp_path: Path, flags: Sequence[str], present: str, break_it: str, missing: str
) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        source = f"--manifests={folder}"
        async with steersman(tmp_path, source, *flags) as process:
            await process.said("(start)", PATIENCE)
            status, lines = await dumped()
            assert (status, lines.keys() - {"context"}) == (0, {"planned"})
            assert any(present in line for line in lines["planned"])
            await process.stop()  # it would repair the damage below
        same = (source, *flags, f"--hostname-override={NODE}", "--cluster-cidr=10.244.0.0/16")
        assert (await dumped(*same))[0] == 0
        sh(break_it)
        status, lines = await dumped(*same)
        assert status == 1
        assert any(missing in line for line in lines["missing"])
        assert len(lines.get("unexpected", ())) <= 1  # the digest of other rules of the node

    in_namespace(body)


def test_chains_of_nftables_are_listed_as_nft_does(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        flags = (f"--manifests={folder}", "--proxy-mode=nftables")
        async with steersman(tmp_path, *flags) as process:
            await process.said("(start)", PATIENCE)
            _, lines = await dumped()
            chain = sh("nft list chain ip kube-proxy nat-prerouting")
            rule = next(line for line in lines["context"] if "vmap @service-ips" in line)
            assert rule in chain
            assert any("map @service-endpoints" in line for line in lines["context"])

    in_namespace(body)


_MANY = ", ".join(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(60_000))
_TABLES = f"""
table ip another {{
    chain lb-1 {{ drop; }}
}}
table ip kube-proxy {{
    set many {{ type ipv4_addr; elements = {{ {_MANY} }}; }}
    chain lb-1 {{ ip daddr {{ 192.0.2.1, 192.0.2.9 }} accept; }}
    chain nat-prerouting {{ ip daddr @many goto lb-1; }}
}}
"""
_ONE = "element ip kube-proxy many { 203.0.113.1 }"


@contextmanager
def busy_rules(tables: str = _TABLES, element: str = _ONE) -> Iterator[None]:
    """Tables with many elements, one of which comes and goes all the time."""
    subprocess.run(["nft", "-f", "-"], input=tables, text=True, check=True)
    busy = f"yes 'add {element}\ndelete {element}' | nft -i >/dev/null"
    with subprocess.Popen(["sh", "-c", busy], start_new_session=True) as process:
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_rules_of_a_trace_are_read_while_elements_change() -> None:
    """To list a chain nft reads all elements of its table, again after each change of them."""
    rule = "ip daddr { 192.0.2.1, 192.0.2.9 } accept"

    async def body() -> None:
        with busy_rules():
            # A trace names rules by their handles.
            listed = sh("nft -a -t list ruleset ip").partition("kube-proxy")[2]
            handle = int(listed.partition(rule)[2].split()[2])
            event = TraceEvent("nft", "ip", "kube-proxy", "lb-1", "rule", handle, "", 1, None)
            async with asyncio.timeout(PATIENCE):
                book = await read_rule_book(SubprocessExec(), [event])
            assert book.text(event) == rule

    in_namespace(body)


def test_the_answer_comes_while_others_change_rules_all_the_time(tmp_path: Path) -> None:
    """No list of all rules is ever read without a change."""

    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        flags = (f"--manifests={folder}", "--proxy-mode=nftables")
        busy = (
            "table ip another { set one { type ipv4_addr; }; }",
            "element ip another one { 1.1.1.1 }",
        )
        async with steersman(tmp_path, *flags) as process:
            await process.said("(start)", PATIENCE)
            with busy_rules(*busy):
                # The writer may stand still for a moment.
                answer: dict[str, Any] = {"changes": 0}
                plan = ""
                async with asyncio.timeout(PATIENCE):
                    while not answer["changes"]:
                        status, out, err = await command("dump", "shop/web", "-o", "json")
                        assert status == 0, err
                        answer = json.loads(out)
                    while "times while they were read" not in plan:
                        _, plan, err = await command("plan", *flags)
                        assert "cannot be read" not in plan + err
                present = [line for line in answer["lines"] if line["state"] == "planned"]
                assert any("10.96.0.1 . tcp . 80 . 0" in line["text"] for line in present)
                assert any("chain lb-" in line["place"] for line in answer["lines"])
                _, out, err = await command("doctor", "-o", "json")
                (rules,) = (each for each in json.loads(out)["results"] if each["check"] == "rules")
                assert rules["verdict"] == "ok", (rules, err)
            await process.stop()
            sh("nft delete element ip kube-proxy service-ips { 10.96.0.1 . tcp . 80 }")
            same = (*flags, f"--hostname-override={NODE}", "--cluster-cidr=10.244.0.0/16")
            with busy_rules(*busy):
                status, lines = await dumped(*same)
            assert (status, len(lines["missing"])) == (1, 1)

    in_namespace(body)


@pytest.mark.parametrize(
    ("portals", "rule"),
    [
        ("iptables", "-j DNAT --to-destination 192.0.2.7:"),
        ("nftables", "10.96.0.1 . 6 . 80 : 192.0.2.7 . "),
        ("direct", "LISTEN 10.96.0.1:80"),
    ],
)
def test_listeners_and_portals_of_another_process_are_found(
    tmp_path: Path, portals: str, rule: str
) -> None:
    async def body() -> None:
        sh("ip address add 192.0.2.7/32 dev lo")
        folder = manifests(tmp_path / "objects", *world())
        flags = ("--proxy-mode=userspace", f"--userspace-portals={portals}")
        async with steersman(tmp_path, f"--manifests={folder}", *flags) as process:
            await process.said("(start)", PATIENCE)
            status, lines = await dumped()
            assert (status, [*lines]) == (0, ["planned"])
            assert any(rule in line for line in lines["planned"])
            assert any(line.startswith("LISTEN ") for line in lines["planned"])

    in_namespace(body)


def test_without_rights_it_says_what_it_needs(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "objects", *world())
        words = ("dump", "shop/web", f"--manifests={folder}", "--proxy-mode=nftables")
        status, _, err = await command(*words, through=NOBODY)
        assert status == 2
        assert "needs root or CAP_NET_ADMIN" in err

    in_namespace(body)


@pytest.mark.skipif(MARKS[1].args[0], reason=str(MARKS[1].kwargs["reason"]))
def test_entries_of_the_maps_are_read_by_another_process() -> None:
    store = Store("me")
    replace_objects(store, "Service", [service(clusterIP=VIP)])
    replace_objects(store, "EndpointSlice", [slice_(ips=(POD,))])
    facts = HostFacts("me", {"lo": ("127.0.0.1/8",), "eth0": (f"{NODE_IP}/24",)}, ipv6=False)
    config = NodeConfig(node_name="me", families=(Family.IPV4,), cluster_cidrs=("10.244.0.0/16",))

    with serving("TCP") as lab:
        node = Node(lab)
        try:
            mode, other = node.mode(), node.mode()
            plan = compile_all(store.snapshot, config, facts, mode.traits)
            asked = World(Origin("process", ""), store.snapshot, plan, mode.name)
            name = ObjectName("shop", "web")

            async def story() -> tuple[Any, Any]:
                await mode.worker.do(
                    mode.apply, diff(await mode.worker.do(mode.read), render(plan, mode))
                )
                before = await compare(asked, name, other)
                frontend = next(key for key in render(plan, mode) if key[:1] == b"F")
                await mode.worker.do(mode.apply, diff({frontend: render(plan, mode)[frontend]}, {}))
                return before, await compare(asked, name, other)

            before, after = asyncio.run(story())
        finally:
            node.close()
    assert {line.state for line in before} == {"planned"}
    assert any(f"{POD}:8080" in line.text for line in before)
    (missing,) = [line.text for line in after if line.state == "missing"]
    assert missing.startswith(f"{VIP}:80/TCP: ")
