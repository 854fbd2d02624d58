"""`steersman plan` as functions: settings that are merged, sums, texts and exit codes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from steersman.cli.main import main
from steersman.cli.output import plain_lines
from steersman.compile.compare import Treatment
from steersman.config import parse_command_line
from steersman.model.inputs import NodeConfig
from steersman.model.ruleset import Diff
from steersman.model.world import World
from steersman.modes.specs import ModeOptions
from steersman.operate import plan_change
from steersman.operate.plan_answer import Effort, ObjectCount, PlanAnswer, ScriptAnswer
from steersman.operate.plan_change import (
    Change,
    Part,
    Wanted,
    count_objects,
    estimate,
    find_change,
    merged_config,
    render,
)
from steersman.run.process.startup import node_config
from tests.support.builders.doctor import world_of
from tests.support.builders.objects import endpoint, service, slice_
from tests.support.modes.memory import MemoryMode

NAME = "--hostname-override=here"


def config(*flags: str) -> NodeConfig:
    return node_config(parse_command_line([NAME, *flags]).config)


def test_settings_that_are_not_given_stay_those_of_the_process() -> None:
    running = config("--cluster-cidr=10.244.0.0/16", "--masquerade-all")
    merged = merged_config(config("--nodeport-addresses=192.0.2.0/24"), running, *["iptables"] * 2)
    assert merged == replace(running, node_port_addresses=("192.0.2.0/24",))


def test_a_default_follows_the_mode_and_a_choice_does_not() -> None:
    flags = "--proxy-mode=nftables"
    default = config("--cluster-cidr=10.244.0.0/16")
    merged = merged_config(config(flags), default, "nftables", "iptables")
    assert merged.node_port_addresses == ("primary",)
    assert merged.cluster_cidrs == ("10.244.0.0/16",)
    chosen = config("--nodeport-addresses=192.0.2.0/24")
    merged = merged_config(config(flags), chosen, "nftables", "iptables")
    assert merged.node_port_addresses == ("192.0.2.0/24",)


def test_a_mode_that_is_not_given_is_the_process_s_with_its_defaults() -> None:
    running = config("--proxy-mode=nftables", "--cluster-cidr=10.244.0.0/16")
    asked = config("--masquerade-all")
    merged = merged_config(asked, running, "nftables", "nftables", defaults_of="iptables")
    assert merged == replace(running, masquerade_all=True)


ANSWER = PlanAnswer(
    before="memory mode",
    after="other mode",
    compared_with="the kernel",
    objects=(ObjectCount("other", "things", added=3), ObjectCount("memory", "things", removed=2)),
    treatments=(
        Treatment("the node's reason"),
        Treatment("a reason", ("shop/a", "shop/b"), tuple(f"shop/a {n}" for n in range(5))),
    ),
    cut=("7 are cut",),
    effort=Effort(how="1 s"),
    findings=("Service shop/a: bad",),
    notes=("not known",),
    details=("+ x",),
)


def text(answer: Any, wide: bool = False) -> list[str]:
    return list(plain_lines(answer.blocks(wide)))


def test_the_summary_comes_first_and_the_objects_last() -> None:
    lines = text(ANSWER)
    assert lines[:3] == [
        "from memory mode to other mode",
        "compared with the kernel",
        "note: not known",
    ]
    assert "other    things           3       -         -" in lines
    assert "    2 Services: shop/a 0, shop/a 1, shop/a 2 and 2 more" in lines
    assert lines[-4:] == [
        "finding: Service shop/a: bad",
        "connections: 7 are cut",
        "takes about 1 s",
        "+ x",
    ]
    assert "    2 Services: " + ", ".join(f"shop/a {n}" for n in range(5)) in text(
        ANSWER, wide=True
    )
    assert ANSWER.exit_code == 1
    assert msgspec.to_builtins(ANSWER.data)["objects"][0] == {
        **{"mode": "other", "kind": "things"},
        **{"added": 3, "changed": 0, "removed": 0},
    }


def test_nothing_to_change() -> None:
    answer = PlanAnswer(before="a mode", after="a mode", compared_with="the kernel")
    assert text(answer) == ["a mode", "compared with the kernel", "nothing to change"]
    assert answer.exit_code == 0


def test_what_is_not_known_is_not_claimed() -> None:
    known = PlanAnswer(
        before="a", after="b", compared_with="the kernel", objects=(ObjectCount("b", "x", 1),)
    )
    assert "no Service is treated differently" in text(known)
    assert "no Service is treated differently" not in text(replace(known, compared=False))


def test_a_script_is_printed_as_it_is() -> None:
    script = ScriptAnswer(tool="nft", script="add table ip x\nadd table ip6 x\n")
    assert text(script) == ["add table ip x", "add table ip6 x"]
    assert script.exit_code == 1
    assert ScriptAnswer(tool="nft", script="").exit_code == 0


def test_objects_are_counted_and_estimated() -> None:
    mode = MemoryMode()
    mode.name = "iptables"
    changed = {f"c{number}": ("", "x") for number in range(501)}
    change = Diff(dict.fromkeys(range(1500), ""), {"b": ""}, changed)
    part = Part(mode, "memory", {}, change)
    (count,) = count_objects([part])
    assert count.counts == (1500, 501, 1)
    plan = object()
    wanted: Any = Wanted("iptables", plan, NodeConfig(), plan, plan, "")  # type: ignore[arg-type]
    all_of_it = Change(wanted, "", None, plan, mode, (part,), True, False, ())  # type: ignore[arg-type]
    effort = estimate(all_of_it)
    assert effort.seconds == pytest.approx(2001 * 38e-6 + 15e-6, abs=1e-3)
    assert effort.kilobytes == round(1499 * 1600 / 1024)
    assert effort.how.startswith("76 ms, and 2.3 MB more memory of the kernel (2,002 objects")


def test_what_the_process_has_changed_meanwhile_is_no_part_of_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy node endpoints come and go while the kernel is read."""
    mode = MemoryMode()
    before, later = (world_of(service(), slice_(endpoint(f"10.1.0.{n}"))) for n in (5, 6))
    mode.kernel = {str(key): value for key, value in render(mode, later.plan).items()}
    monkeypatch.setattr(plan_change, "create", lambda *_: mode)
    monkeypatch.setattr(plan_change, "leftover_modes", lambda *_: [])
    wanted = Wanted("memory", ModeOptions(), before.config, before.snapshot, before.facts, "")

    def parts(now: World, wanted: Wanted = wanted) -> list[Diff]:
        async def again(_: World) -> World:
            return now

        monkeypatch.setattr(plan_change, "world_again", again)
        change = asyncio.run(find_change(wanted, before=before, before_mode="memory"))
        return [part.change for part in change.parts]

    assert parts(later) == []
    (difference,) = parts(before)
    assert [len(part) for part in difference.parts] == [1, 1, 0]
    # What was asked for shows for the Services that have changed meanwhile, too.
    other = world_of(service(), slice_(endpoint("10.1.0.7")))
    asked = wanted._replace(snapshot=other.snapshot)
    (difference,) = parts(later, asked)
    gone, added = (f"shop/cart:http (TCP, IPv4) 10.1.0.{n}:8080" for n in (5, 7))
    assert [[*each] for each in difference.parts] == [[added], [gone], []]
    del mode.kernel["node"]
    (missing,) = parts(later)
    assert [*missing.added] == ["node"]


MANIFEST = """
{apiVersion: v1, kind: Service, metadata: {namespace: shop, name: web},
 spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}
---
{apiVersion: v1, kind: Service, metadata: {namespace: shop, name: bad},
 spec: {clusterIP: 10.96.0.300, ports: [{port: 80}]}}
"""


def test_manifests_alone_are_enough_to_compare_two_modes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On any machine: nothing is read from its kernel."""
    (tmp_path / "m.yaml").write_text(MANIFEST)
    words = ["plan", f"--manifests={tmp_path}", NAME, "--from-mode=iptables"]
    assert main([*words, "--proxy-mode=nftables", "--output=json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["before"] == "iptables mode"
    assert any(each["mode"] == "iptables" and each["removed"] for each in answer["objects"])
    assert any("shop/bad" in finding for finding in answer["findings"])
    assert main([*words, "--proxy-mode=iptables"]) == 0
    assert "nothing to change" in capsys.readouterr().out
    assert main(["plan", f"--manifests={tmp_path}", NAME, "--from-mode=no"]) == 2
    assert "there is no mode no" in capsys.readouterr().err
