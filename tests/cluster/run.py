"""Bring a cluster up, deploy steersman, run e2e.test, and read its report."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
PROGRAMS = ("kind", "kubectl", "e2e.test")
PODS, SERVICES = "10.244.0.0/16,fd00:10:244::/56", "10.96.0.0/16,fd00:10:96::/112"
ZONES = ("a", "b", "c")
FOCUS = (
    r"\[sig-network\] (Services|Networking|EndpointSlice|Conntrack|KubeProxy|Proxy|LoadBalancers)"
)
SKIP = (
    r"\[Slow\]|\[Disruptive\]|\[Serial\]|\[Flaky\]"
    r"|\[Feature:(SCTPConnectivity|NetworkPolicy|Networking-DNS|Networking-Performance)\]"
    # It reads the log and the endpoints of a DaemonSet named kube-proxy.
    r"|kube-proxy.*DaemonSet"
)
_SECONDS = {"create": 600, "test": 4 * 3600}


class MissingError(RuntimeError):
    """A program that this needs is not there."""


class Result(NamedTuple):
    """One test of SIG Network."""

    name: str
    outcome: str
    """`passed`, `failed` or `skipped`."""
    why: str = ""
    """The first line of the failure, or the reason to skip."""


def programs(variables: Mapping[str, str]) -> dict[str, Path]:
    """Return the programs in KUBE_BIN by name.

    Raises:
        MissingError: a sentence that says which is missing.
    """
    folder = variables.get("KUBE_BIN", "")
    if not folder:
        names = ", ".join(PROGRAMS)
        raise MissingError(f"KUBE_BIN is not set: it must be a directory with {names}")
    found = {name: Path(folder, name) for name in PROGRAMS}
    missing = [name for name, path in found.items() if not os.access(path, os.X_OK)]
    if missing:
        raise MissingError(f"KUBE_BIN={folder} has no program {', '.join(missing)}")
    search = variables.get("PATH", os.defpath)
    if not (shutil.which("docker", path=search) or shutil.which("podman", path=search)):
        raise MissingError("kind needs docker or podman on the PATH")
    return found


def kind_config() -> str:
    """Return the configuration of kind: three nodes, two families, no kube-proxy."""
    nodes = [
        {
            "role": role,
            "labels": {"topology.kubernetes.io/zone": zone, "topology.kubernetes.io/region": "r"},
        }
        for role, zone in zip(("control-plane", "worker", "worker"), ZONES, strict=True)
    ]
    networking = {
        "ipFamily": "dual",
        "kubeProxyMode": "none",
        "podSubnet": PODS,
        "serviceSubnet": SERVICES,
    }
    config = {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4"}
    return yaml.safe_dump({**config, "networking": networking, "nodes": nodes})


def overlay(mode: str, server: str, image: str, folder: Path) -> None:
    """Write an overlay of deploy/kustomize for a cluster into an empty folder.

    Args:
        mode: name of an overlay.
        server: URL of the API server that works without kube-proxy.
        image: `name:tag`.
        folder: takes the files.

    Raises:
        ValueError: there is no such overlay.
    """
    source = ROOT / "deploy/kustomize"
    if not (source / "overlays" / mode).is_dir():
        raise ValueError(f"deploy/kustomize/overlays has no mode {mode}")
    shutil.copytree(source, folder / "kustomize")
    config = yaml.safe_load((source / "overlays" / mode / "config.conf").read_text())
    config["clusterCIDR"] = PODS
    (folder / "config.conf").write_text(yaml.safe_dump(config))
    kubeconfig = (source / "base/kubeconfig.conf").read_text()
    kubeconfig = re.sub(r"server: \S+", f"server: {server}", kubeconfig)
    (folder / "kubeconfig.conf").write_text(kubeconfig)
    name, _, tag = image.rpartition(":")
    files = ["config.conf", "kubeconfig.conf"]
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "namespace": "kube-system",
                "resources": [f"kustomize/overlays/{mode}"],
                "configMapGenerator": [{"name": "steersman", "behavior": "merge", "files": files}],
                "images": [{"name": "steersman", "newName": name, "newTag": tag}],
            }
        )
    )


def read_report(folder: Path) -> list[Result]:
    """Return the tests in the JUnit files of a folder that were not left out by the focus."""
    found = []
    for path in sorted(folder.glob("*.xml")):
        for case in ET.parse(path).getroot().iter("testcase"):
            name = case.get("name", "").removeprefix("[It] ")
            skipped, failed = case.find("skipped"), case.find("failure")
            if "[sig-network]" not in name:
                continue
            if failed is None:
                failed = case.find("error")
            if failed is not None:
                found.append(Result(name, "failed", _first_line(failed)))
            elif skipped is None:
                found.append(Result(name, "passed"))
            # ginkgo reports what it was not asked to run as skipped without a message.
            elif why := _first_line(skipped).removeprefix("skipped").strip(" -"):
                found.append(Result(name, "skipped", why))
    return found


def _first_line(element: ET.Element) -> str:
    text = element.get("message") or element.text or ""
    return text.strip().partition("\n")[0]


def table(results: Mapping[str, Sequence[Result]]) -> str:
    """Return the results of each mode as Markdown: counts, then each test that did not pass."""
    lines = ["| mode | passed | failed | skipped |", "| --- | --- | --- | --- |"]
    for mode, found in results.items():
        counts = [sum(each.outcome == kind for each in found) for kind in ("passed", "failed")]
        counts.append(len(found) - sum(counts))
        lines.append(f"| {mode} | {counts[0]} | {counts[1]} | {counts[2]} |")
    names = sorted({each.name for found in results.values() for each in found})
    lines += ["", f"| test | {' | '.join(results)} |", "| --- " * (len(results) + 1) + "|"]
    for name in names:
        by_mode = [{each.name: each for each in found} for found in results.values()]
        cells = [_cell(found.get(name)) for found in by_mode]
        lines.append(f"| {name.replace('|', '/')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(result: Result | None) -> str:
    if result is None:
        return "not run"
    return result.outcome + (f": {result.why.replace('|', '/')}" if result.why else "")


class Cluster:
    """A cluster of kind without kube-proxy."""

    def __init__(self, tools: Mapping[str, Path], name: str, folder: Path) -> None:
        self._tools, self._name = tools, name
        self.kubeconfig = folder / "kubeconfig"

    @contextmanager
    def running(self) -> Iterator[None]:
        """The cluster, while the context lasts."""
        config = self.kubeconfig.with_name("kind.yaml")
        config.write_text(kind_config())
        common = ("--name", self._name, "--kubeconfig", str(self.kubeconfig))
        try:
            # Nodes get ready only with a proxy: their network plugin asks for a Service.
            self.run("kind", "create", "cluster", *common, "--config", str(config))
            yield
        finally:
            self.run("kind", "delete", "cluster", *common, check=False)

    def deploy(self, image: Path, name: str, mode: str) -> None:
        """Load an image into all nodes, apply steersman, and wait until the cluster is ready."""
        self.run("kind", "load", "image-archive", str(image), "--name", self._name)
        with tempfile.TemporaryDirectory() as folder:
            server = f"https://{self._name}-control-plane:6443"
            overlay(mode, server, name, Path(folder))
            self.kubectl("apply", "-k", folder)
        limit = f"--timeout={_SECONDS['create']}s"
        self.kubectl("-n", "kube-system", "rollout", "status", "daemonset/steersman", limit)
        self.kubectl("wait", "--for=condition=Ready", "nodes", "--all", limit)

    def test(self, report: Path, focus: str) -> list[Result]:
        """Run upstream's tests; return their results. That some fail is no error."""
        report.mkdir(parents=True, exist_ok=True)
        self.run(
            "e2e.test",
            f"--kubeconfig={self.kubeconfig}",
            "--provider=local",
            f"--report-dir={report}",
            f"--ginkgo.focus={focus}",
            f"--ginkgo.skip={SKIP}",
            "--ginkgo.timeout=4h",
            check=False,
        )
        found = read_report(report)
        if not found:
            raise RuntimeError(f"e2e.test ran no test: see {report}")
        return found

    def kubectl(self, *words: str) -> None:
        self.run("kubectl", f"--kubeconfig={self.kubeconfig}", *words)

    def run(self, program: str, *words: str, check: bool = True) -> None:
        argv = [str(self._tools[program]), *words]
        print("+", program, *words, flush=True)
        subprocess.run(argv, check=check, timeout=_SECONDS["test"])
