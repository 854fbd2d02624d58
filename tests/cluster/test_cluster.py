"""The real cluster where its programs are given, and what can be shown without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.run import (
    ROOT,
    MissingError,
    Result,
    kind_config,
    overlay,
    programs,
    read_report,
    table,
)

MODES = sorted(path.name for path in (ROOT / "deploy/kustomize/overlays").iterdir())
JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite name="e2e">
<testcase name="[It] [sig-network] Services should serve a basic endpoint"/>
<testcase name="[It] [sig-network] Services should fail"><failure message="no | answer&#10;more"/>
</testcase>
<testcase name="[It] [sig-network] Services IPv6"><skipped message="skipped - needs IPv6"/>
</testcase>
<testcase name="[It] [sig-network] left out"><skipped message="skipped"/></testcase>
<testcase name="[It] [sig-node] other"/>
</testsuite></testsuites>
"""
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$FAKE_LOG"
for word in "$@"; do
  case $word in
    --report-dir=*) cp "$FAKE_JUNIT" "${word#--report-dir=}/junit_01.xml" ;;
    /*) test ! -d "$word" || cp "$word"/*.conf "$FAKE_OVERLAY" ;;
  esac
done
"""


def test_the_real_cluster(tmp_path: Path) -> None:
    try:
        programs(os.environ)
    except MissingError as error:
        pytest.skip(f"no real cluster: {error}")
    image = ROOT / "build/image/steersman.oci.tar"
    argv = [sys.executable, "-m", "tests.cluster", f"--image={image}", f"--out={tmp_path}"]
    assert subprocess.run(argv, cwd=ROOT, check=False).returncode == 0


def test_missing_programs_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="KUBE_BIN is not set"):
        programs({})
    with pytest.raises(MissingError, match=r"has no program kind, kubectl, e2e\.test"):
        programs({"KUBE_BIN": str(tmp_path)})
    for name in ("kind", "kubectl", "e2e.test"):
        (tmp_path / name).write_text(FAKE)
        (tmp_path / name).chmod(0o755)
    with pytest.raises(MissingError, match="docker or podman"):
        programs({"KUBE_BIN": str(tmp_path), "PATH": "/nowhere"})


def test_the_cluster_has_no_other_proxy() -> None:
    config = yaml.safe_load(kind_config())
    assert config["networking"]["kubeProxyMode"] == "none"
    assert len({node["labels"]["topology.kubernetes.io/zone"] for node in config["nodes"]}) == 3


@pytest.mark.parametrize("mode", MODES)
def test_an_overlay_has_the_address_of_the_api_server(mode: str, tmp_path: Path) -> None:
    overlay(mode, "https://c-control-plane:6443", "localhost/steersman:1", tmp_path)
    config = yaml.safe_load((tmp_path / "config.conf").read_text())
    assert (config["mode"], config["clusterCIDR"].count(",")) == (mode, 1)
    clusters = yaml.safe_load((tmp_path / "kubeconfig.conf").read_text())["clusters"]
    assert clusters[0]["cluster"]["server"] == "https://c-control-plane:6443"
    made = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())
    assert made["images"][0]["newName"] == "localhost/steersman"
    assert (tmp_path / made["resources"][0] / "kustomization.yaml").exists()


def test_an_unknown_mode_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no mode nothing"):
        overlay("nothing", "", "a:b", tmp_path)


def test_reports_are_read(tmp_path: Path) -> None:
    (tmp_path / "junit_01.xml").write_text(JUNIT)
    found = read_report(tmp_path)
    assert found == [
        Result("[sig-network] Services should serve a basic endpoint", "passed"),
        Result("[sig-network] Services should fail", "failed", "no | answer"),
        Result("[sig-network] Services IPv6", "skipped", "needs IPv6"),
    ]
    text = table({"nftables": found, "ebpf": found[:1]})
    assert "| nftables | 1 | 1 | 1 |" in text
    assert "| [sig-network] Services should fail | failed: no / answer | not run |" in text


def test_each_step_runs_in_order(tmp_path: Path) -> None:
    """With programs that only note how they are called."""
    bins = tmp_path / "bin"
    bins.mkdir()
    for name in ("kind", "kubectl", "e2e.test", "docker"):
        (bins / name).write_text(FAKE)
        (bins / name).chmod(0o755)
    (tmp_path / "junit").write_text(JUNIT)
    (tmp_path / "overlay").mkdir()
    variables = {
        **os.environ,
        "PATH": f"{bins}:{os.environ['PATH']}",
        "KUBE_BIN": str(bins),
        "FAKE_LOG": str(tmp_path / "log"),
        "FAKE_JUNIT": str(tmp_path / "junit"),
        "FAKE_OVERLAY": str(tmp_path / "overlay"),
    }
    argv = [sys.executable, "-m", "tests.cluster", "--image=image.tar", f"--out={tmp_path}/out"]
    done = subprocess.run(
        [*argv, "--modes=nftables"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr  # one test failed
    called = [line.split()[:3] for line in (tmp_path / "log").read_text().splitlines()]
    kubeconfig = f"--kubeconfig={tmp_path}/out/nftables/kubeconfig"
    assert called[:3] == [
        ["kind", "create", "cluster"],
        ["kind", "load", "image-archive"],
        ["kubectl", kubeconfig, "apply"],
    ]
    assert called[-2:] == [
        ["e2e.test", kubeconfig, "--provider=local"],
        ["kind", "delete", "cluster"],
    ]
    sent = yaml.safe_load((tmp_path / "overlay/kubeconfig.conf").read_text())
    server = sent["clusters"][0]["cluster"]["server"]
    assert server == "https://steersman-nftables-control-plane:6443"
    assert "| nftables | 1 | 1 | 1 |" in (tmp_path / "out/results.md").read_text()
