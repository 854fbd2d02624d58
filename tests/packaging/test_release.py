"""`make release`: what it builds from a clone, and when it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from steersman import __version__
from steersman.config import load
from tests.packaging.artefacts import ROOT, checkout, needs_clang, needs_cross, run

pytest.importorskip("helm_python", reason="there is no Helm engine for this machine")

MODES = ("ebpf", "iptables", "ipvs", "nftables", "userspace")
PARTS = ("packages", "chart", "manifests", "plugin")
"""Without the Debian packages and the image, which have tests of their own."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with one commit, in which this version is to be released."""
    place = checkout(tmp_path / "clone")
    changelog = place / "CHANGELOG.md"
    dated = f"## [Unreleased]\n\n## [{__version__}] - 2026-01-02"
    text = changelog.read_text()
    if f"## [{__version__}] - " not in text:
        changelog.write_text(text.replace("## [Unreleased]", dated, 1))
    git(place, "init", "--quiet")
    commit(place)
    return place


def git(place: Path, *words: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    return run("git", *identity, *words, at=place)


def commit(place: Path) -> None:
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--message", "tests: commit", "--no-verify")


def release(
    place: Path, *words: str, version: str = __version__, check: str = "true", status: int = 0
) -> str:
    argv = [sys.executable, "scripts/release.py", version, "--check", check, *words]
    # The clone's own modules, not those of the environment that runs the tests.
    code = f"import runpy, sys; sys.path.insert(0, {str(place / 'src')!r}); sys.argv = {argv[1:]!r}"
    code += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    return run(sys.executable, "-c", code, at=place, status=status)


def test_it_refuses_changes_that_are_not_committed(clone: Path) -> None:
    (clone / "forgotten.txt").write_text("text")
    assert "forgotten.txt" in release(clone, status=1)
    assert not (clone / "build").exists()


def test_it_refuses_another_version_than_the_programs(clone: Path) -> None:
    assert f"the program's version is {__version__}" in release(clone, version="9.9.9", status=1)


def test_it_refuses_a_version_without_a_section_in_the_changelog(clone: Path) -> None:
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(f"## [{__version__}] - ", "## ["))
    commit(clone)
    assert "CHANGELOG.md has no section" in release(clone, status=1)


def test_it_refuses_when_a_check_fails(clone: Path) -> None:
    said = release(clone, "--only", "chart", check="false", status=1)
    assert "the checks fail (`false`)" in said
    assert not (clone / "build").exists()


def test_it_refuses_licences_that_are_not_up_to_date(clone: Path) -> None:
    (clone / "NOTICE").write_text("nothing")
    commit(clone)
    assert "NOTICE is not up to date" in release(clone, status=1)


@needs_clang
@needs_cross
def test_a_release_has_every_file_with_its_checksum(clone: Path, tmp_path: Path) -> None:
    only = [word for part in PARTS for word in ("--only", part)]
    url = "https://example.org/download"
    release(clone, *only, "--url", url)
    out = clone / "build" / "release"
    compiled = f"steersman-{__version__}-cp311-abi3-manylinux_2_17"
    wanted = {
        *(f"steersman-{__version__}{end}" for end in ("-py3-none-any.whl", ".tar.gz", ".tgz")),
        *(f"{compiled}_{machine}.whl" for machine in ("x86_64", "aarch64")),
        *(f"steersman-{mode}.yaml" for mode in MODES),
        *(f"kubectl-steersman-v{__version__}.tar.gz", "krew-steersman.yaml"),
        *("NOTICE", "provenance.json", "SHA256SUMS"),
    }
    assert {path.name for path in out.iterdir()} == wanted
    run("sha256sum", "--check", "--strict", "SHA256SUMS", at=out)
    listed = {line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    assert listed == wanted - {"SHA256SUMS"}

    provenance = json.loads((out / "provenance.json").read_text())
    assert {each["name"] for each in provenance["subject"]} == listed - {"provenance.json"}
    (source, *_) = provenance["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"]["gitCommit"] == git(clone, "rev-parse", "HEAD").strip()

    plugin = yaml.safe_load((out / "krew-steersman.yaml").read_text())
    (platform,) = plugin["spec"]["platforms"]
    assert platform["uri"] == f"{url}/kubectl-steersman-v{__version__}.tar.gz"
    assert f"{platform['sha256']}  kubectl" in (out / "SHA256SUMS").read_text()

    with tarfile.open(out / f"steersman-{__version__}.tgz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 or later
        archive.extractall(tmp_path)
    done = subprocess.run(
        ["diff", "-r", tmp_path / "steersman", ROOT / "deploy/helm/steersman"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    for mode in MODES:
        check_manifest(mode, (out / f"steersman-{mode}.yaml").read_text())


def check_manifest(mode: str, text: str) -> None:
    """One file is all that `kubectl apply` needs, in an order that works."""
    objects = list(yaml.safe_load_all(text))
    kinds = [each["kind"] for each in objects]
    assert kinds == [
        *("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "DaemonSet")
    ]
    for each in objects:
        kubernetes_validate.validate(each, "1.36", strict=True)
        assert each["kind"].startswith("Cluster") or each["metadata"]["namespace"] == "kube-system"
    loaded = load(objects[3]["data"]["config.conf"])
    assert loaded.config.mode == mode
    assert loaded.warnings == ()
    assert "https://api-server.example:6443" in objects[3]["data"]["kubeconfig.conf"]
    (container,) = objects[4]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"steersman:{__version__}"
