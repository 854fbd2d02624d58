"""`python -m tests.conformance`: any file, a line per failed check, a count, an exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.__main__ import main

NODE = {
    "nodeName": "here",
    "ipFamily": "IPv4",
    "interfaces": {"lo": ["127.0.0.1/8"], "eth0": ["192.168.0.2/24"]},
    "localDetector": {"mode": "ClusterCIDR", "cidr": "10.0.0.0/8"},
    "masqueradeMark": "0x4000",
}
SERVICE = {
    "metadata": {"name": "web", "namespace": "shop"},
    "spec": {"clusterIP": "172.30.0.1", "ports": [{"name": "p", "port": 80, "protocol": "TCP"}]},
}
SLICE = {
    "metadata": {
        "name": "web-1",
        "namespace": "shop",
        "labels": {"kubernetes.io/service-name": "web"},
    },
    "addressType": "IPv4",
    "ports": [{"name": "p", "port": 8080, "protocol": "TCP"}],
    "endpoints": [{"addresses": ["10.1.0.1"], "nodeName": "here"}, {"addresses": ["10.1.0.2"]}],
}


def flow(port: int, kind: str, *endpoints: str) -> dict[str, Any]:
    expect = {"kind": kind, "endpoints": list(endpoints), "masq": False}
    return {
        "name": f"to {port}",
        "sourceIP": "10.0.0.9",
        "protocol": "TCP",
        "destIP": "172.30.0.1",
        "destPort": port,
        "expect": expect,
    }


RIGHT = [flow(80, "dnat", "10.1.0.1:8080", "10.1.0.2:8080"), flow(81, "none")]
WRONG = flow(80, "dnat", "10.1.0.1:8080")


def write(path: Path, suite: str, *cases: dict[str, Any]) -> str:
    path.write_text(json.dumps({"suite": suite, "cases": list(cases)}))
    return str(path)


def case(name: str, *flows: dict[str, Any]) -> dict[str, Any]:
    world = {"services": [SERVICE], "endpointslices": [SLICE], "nodes": []}
    return {"id": name, "mode": "iptables", "node": NODE, "flows": list(flows), **world}


EACH_WAY = [
    "trace",
    "rules",
    pytest.param("packets", marks=pytest.mark.kernel),
]


@pytest.mark.parametrize("how", EACH_WAY)
def test_it_counts_and_names_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    file = write(tmp_path / "f.json", "packetflow", case("good", *RIGHT), case("bad", WRONG))
    assert main([file, "--how", how]) == 1
    *failed, count = capsys.readouterr().out.splitlines()
    assert count == "2 passed, 1 failed"
    assert [line.split()[:3] for line in failed] == [["FAILED", "f.json", "bad:"]]


@pytest.mark.parametrize("how", EACH_WAY)
def test_it_succeeds_where_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    file = write(tmp_path / "f.json", "packetflow", case("good", *RIGHT), case("bad", WRONG))
    assert main([file, "--mode", "iptables", "--how", how, "--filter", "goo"]) == 0
    assert capsys.readouterr().out == "2 passed, 0 failed\n"


def test_suites_without_flows_run_by_their_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def probability(value: str) -> dict[str, Any]:
        return {"id": f"iptables/{value}", "sourceTest": "TestComputeProbability", "key": 4} | {
            "case": value
        }

    names = write(tmp_path / "n.json", "chain_names", probability("0.25"), probability("0.3"))
    assert main([names]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed"


def test_what_cannot_be_checked_is_skipped_by_name_and_not_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "n.json", "no_such_suite", {"id": "one"})
    assert main([file]) == 0
    first, count = capsys.readouterr().out.splitlines()
    assert "no suite no_such_suite here" in first
    assert count == "0 passed, 0 failed, 1 skipped"


def test_a_case_that_makes_no_sense_is_a_failure_of_that_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = case("broken", *RIGHT) | {"node": {}}
    assert main([write(tmp_path / "f.json", "packetflow", broken, case("good", *RIGHT))]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 1 failed"


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([write(tmp_path / "f.json", "packetflow"), "--variant", "ebtables"])


def step(op: str, obj: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"op": op} | ({"object": obj} if obj else {})


ADDED = [step("addService", SERVICE), step("sync"), step("addEndpointSlice", SLICE)]


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([*ADDED, step("sync")], "3 passed, 0 failed"),
        ([*ADDED, step("deleteEndpointSlice", SLICE), step("sync")], "2 passed, 1 failed"),
        ([step("addService", SERVICE), step("sync")], "2 passed, 1 failed"),
    ],
)
def test_the_history_of_a_case_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: list[dict[str, Any]], count: str
) -> None:
    main([write(tmp_path / "f.json", "packetflow", case("good", *RIGHT) | {"steps": steps})])
    assert capsys.readouterr().out.splitlines()[-1] == count


def test_it_runs_in_any_directory(tmp_path: Path) -> None:
    write(tmp_path / "cases.json", "packetflow_common", case("a", *RIGHT))
    argv = [sys.executable, "-m", "tests.conformance", "cases.json", "--how", "trace"]
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["2 passed, 0 failed"]), done
