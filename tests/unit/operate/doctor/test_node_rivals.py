"""Doctor's check of other proxies: who counts as one, and what a container can see of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from steersman.host.listening import ListeningSocket
from steersman.model.names import Protocol
from steersman.model.node_state import NodeState
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.modes.base import Mode
from steersman.operate.doctor import node_rivals
from steersman.operate.doctor.processes import Owner, Process, proxies_services, sees_processes
from steersman.operate.doctor.result import Verdict
from tests.support.builders.doctor import NOON, context_of, named, only, verdicts
from tests.support.builders.objects import endpoint, service, slice_
from tests.support.modes.memory import MemoryMode

(OTHER,) = named("other-proxy")


class Named(MemoryMode):
    """A mode that leaves its objects behind."""

    def find_leftovers(self, families: object) -> str:
        return "chains are left: 3" if self.kernel else ""


def leftovers(monkeypatch: pytest.MonkeyPatch, root: Path, left: Mode, *things: Any) -> Any:
    monkeypatch.setattr(node_rivals, "other_modes", lambda *_: [("other", left)])
    files = {"proc/cpuinfo": ""}
    return only(OTHER, context_of(*things, mode=MemoryMode(), root=root, files=files))


def filled(plans: Mapping[Any, ServicePlan]) -> Named:
    mode = Named()
    settings = NodeSettings(node_name="node-1")
    objects: dict[Any, Any] = dict(mode.render_node(settings))
    for plan in plans.values():
        objects |= mode.render_service(plan, settings)
    mode.kernel = objects
    return mode


@pytest.fixture(autouse=True)
def _all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rivals, "sees_processes", lambda _: True)


def test_rules_of_other_modes_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    things = service(), slice_(endpoint("10.0.0.5"))
    plans = context_of(*things).world.plan.services
    assert leftovers(monkeypatch, tmp_path, Named(), *things).verdict is Verdict.OK
    same = leftovers(monkeypatch, tmp_path, filled(plans), *things)
    assert (same.verdict, same.text) == (Verdict.WARNING, "the other mode left 4 kernel objects")
    old = filled(plans)
    old.kernel["clusterIP 10.96.0.10:80"] = "another"
    outdated = leftovers(monkeypatch, tmp_path, old, *things)
    assert outdated.verdict is Verdict.ERROR
    assert "lead shop/cart elsewhere" in outdated.text


def test_other_proxies_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "proc/self/ns/net": "",
        "proc/17/comm": "kube-proxy\n",
        "proc/18/comm": "nginx\n",
        "proc/42/comm": "kube-proxy\n",
        "proc/cpuinfo": "",
    }
    (tmp_path / "proc/17/ns").mkdir(parents=True)
    for pid in (17, 18, 42):
        (tmp_path / f"proc/{pid}/ns").mkdir(parents=True, exist_ok=True)
    context = context_of(root=tmp_path, files=files, server_pid=42)
    for pid in (17, 18, 42):
        (tmp_path / f"proc/{pid}/ns/net").hardlink_to(tmp_path / "proc/self/ns/net")
    result = only(OTHER, context)
    assert result.verdict is Verdict.ERROR
    assert "another proxy runs on this node: kube-proxy (pid 17)" in result.text


def test_who_has_the_ports_of_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = {ListeningSocket(Protocol.TCP, "::", number): number for number in (80, 10249, 10256)}
    monkeypatch.setattr(node_rivals, "listening_sockets", lambda _: sockets)
    owners = {10256: Owner(17, "/usr/bin/proxy --fast"), 80: Owner(18, "nginx")}
    monkeypatch.setattr(node_rivals, "socket_owners", lambda *_: owners)
    files = {"proc/cpuinfo": ""}
    result = only(OTHER, context_of(root=tmp_path, files=files))
    assert result.verdict is Verdict.WARNING
    assert result.text.startswith("pid 17 (/usr/bin/proxy --fast) listens on 10256")
    ours = context_of(root=tmp_path, files=files, server_pid=17)
    assert only(OTHER, ours).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("name", "command", "proxies"),
    [
        ("kube-proxy", "", True),
        ("nginx", "nginx", False),
        ("kube-router", "/kube-router --run-router=true", True),
        ("kube-router", "/kube-router --run-service-proxy=false", False),
        ("cilium-agent", "cilium-agent --kube-proxy-replacement=true", True),
        ("cilium-agent", "cilium-agent --kube-proxy-replacement=false", False),
        ("cilium-agent", "cilium-agent --config-dir=/on", True),
        ("cilium-agent", "cilium-agent --config-dir=/off", False),
        ("cilium-agent", "cilium-agent --config-dir=/unset", False),
        ("cilium-agent", "cilium-agent --config-dir=/unreadable", None),
        ("cilium-agent", "cilium-agent", False),
    ],
)
def test_agents_of_networks_are_rivals_only_if_they_serve_services(
    tmp_path: Path, name: str, command: str, proxies: bool | None
) -> None:
    for folder, value in (("on", "true"), ("off", "false\n"), ("unset", None)):
        (tmp_path / "17/root" / folder).mkdir(parents=True)
        if value:
            (tmp_path / "17/root" / folder / "kube-proxy-replacement").write_text(value)
    (tmp_path / "17/cmdline").write_text(command.replace(" ", "\0") + "\0")
    assert proxies_services(Process(17, name), tmp_path) is proxies
    if name not in ("kube-proxy", "nginx"):
        assert proxies_services(Process(18, name), tmp_path) is None


def agents(root: Path, command: str) -> Any:
    files = {
        "proc/17/comm": "cilium-agent\n",
        "proc/17/cmdline": command.replace(" ", "\0"),
        "proc/17/ns/net": "",
        "proc/cpuinfo": "",
    }
    return only(OTHER, context_of(root=root, files=files))


def test_cilium_beside_another_proxy_is_no_trouble(tmp_path: Path) -> None:
    found = agents(tmp_path, "cilium-agent --kube-proxy-replacement=false")
    assert found.verdict is Verdict.OK
    found = agents(tmp_path, "cilium-agent --config-dir=/nowhere")
    assert found.verdict is Verdict.UNKNOWN
    found = agents(tmp_path, "cilium-agent --kube-proxy-replacement=true")
    assert found.verdict is Verdict.ERROR
    assert "another proxy runs on this node: cilium-agent (pid 17)" in found.text


HEALTH = {ListeningSocket(Protocol.TCP, "::", 10256): 1}


def test_the_proxy_inside_of_k3s_is_seen_by_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_rivals, "listening_sockets", lambda _: HEALTH)
    owner = Owner(17, "/usr/local/bin/k3s server")
    monkeypatch.setattr(node_rivals, "socket_owners", lambda *_: {1: owner})
    result = only(OTHER, context_of(root=tmp_path, files={"proc/cpuinfo": ""}))
    assert result.verdict is Verdict.ERROR
    assert "--disable-kube-proxy" in result.remedy


def test_the_proxy_inside_of_k3s_is_seen_by_its_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    things = service(), slice_(endpoint("10.0.0.5"))
    left = filled(context_of(*things).world.plan.services)
    monkeypatch.setattr(node_rivals, "other_modes", lambda *_: [("other", left)])
    for age, words in ((60, "the other mode left 4"), (600, "another proxy writes them")):
        process = NodeState(pid=1, started=NOON - age, synced_at=NOON - age)
        result = only(
            OTHER,
            context_of(
                *things,
                mode=MemoryMode(),
                root=tmp_path,
                files={"proc/cpuinfo": ""},
                world={"process": process},
                server_pid=1,
            ),
        )
        assert words in result.text
        assert result.suspect == (age == 600)


def test_a_container_does_not_see_the_processes_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_rivals, "sees_processes", sees_processes)
    files = {"proc/1/comm": "kube-proxy\n"}
    context = context_of(root=tmp_path, files=files, server_pid=1)
    result = only(OTHER, context)
    assert result.verdict is Verdict.UNKNOWN
    assert "hostPID" in result.text
    # A stranger's socket is seen, and that is all.
    monkeypatch.setattr(node_rivals, "listening_sockets", lambda _: HEALTH)
    assert verdicts(OTHER, context_of(root=tmp_path, server_pid=1)) == ["warning", "unknown"]
    # It may be that of our own process, if that is not seen either.
    process = {"process": NodeState(pid=1)}
    assert verdicts(OTHER, context_of(root=tmp_path, world=process)) == ["unknown"]


def test_who_sees_all_processes(tmp_path: Path) -> None:
    assert not sees_processes(tmp_path)
    (tmp_path / "1").mkdir()
    for name, sees in (("kube-proxy", False), ("systemd", True), ("pause", False)):
        (tmp_path / "1/comm").write_text(f"{name}\n")
        assert sees_processes(tmp_path) is sees
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026531836]")
    assert sees_processes(tmp_path)
