"""The Debian package: installed, run as its unit says, removed and purged, in a chroot."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import hatch_build
from steersman import __version__
from tests.packaging.artefacts import ROOT, needs_clang, ready_made, run, until
from tests.support.builders import kube

DEBIAN = ROOT / "deploy" / "debian"
MODES = {"nftables": ["nft", "list", "ruleset"], "iptables": ["iptables-save", "-t", "nat"]}
"""Modes in which it is run, and how their rules are listed."""
ENDPOINT = "10.244.1.5"
WORLD = [
    kube.node("node-a", "192.0.2.1"),
    kube.service("web", "10.96.0.10", clusterIPs=["10.96.0.10"]),
    kube.endpoint_slice("web-1", "web", ENDPOINT),
]
NETNS = f"sm-deb-{os.getpid()}"
GENERATED = ("var/cache", "var/lib/dpkg", "var/lib/systemd", "var/log", "proc", "sys", "run")
"""What dpkg and the kernel write about packages, below the root."""

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=120), needs_clang]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("dh", "dpkg-buildpackage"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: `FULL=1 make test` as root installs it")
    out = tmp_path_factory.mktemp("deb")
    given = {**ready_made(tmp_path_factory), "OUT": str(out), "PYTHON": sys.executable}
    given["DPKG_DEB_COMPRESSOR_LEVEL"] = "1"  # a sixth of the time
    run("env", *(f"{name}={value}" for name, value in given.items()), ROOT / "scripts" / "deb.sh")
    (deb,) = out.glob("*.deb")
    return deb


@pytest.fixture(scope="module")
def root(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A minimal Debian with what the package needs, in which it is not installed."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is missing: `make setup` as root installs it")
    fields = run("dpkg-deb", "--field", package, "Depends", "Recommends")
    wanted = re.sub(r"\(.*?\)|^\w+:", "", fields, flags=re.MULTILINE).replace("\n", ",")
    place = tmp_path_factory.mktemp("chroot") / "root"
    run(
        *("mmdebstrap", "--quiet", "--variant=apt", "--aptopt=Acquire::Languages none"),
        *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=force-unsafe-io"),
        f"--include={','.join(sorted(set(wanted.replace(' ', '').split(',')) - {''}))}",
        *("bookworm", place),
    )
    subprocess.run(["mount", "-t", "proc", "proc", place / "proc"], check=True)
    run("ip", "netns", "add", NETNS)
    for words in ("link set lo up", "addr add 192.0.2.1/24 dev lo"):
        run("ip", "-n", NETNS, *words.split())
    try:
        yield place
    finally:
        run("ip", "netns", "del", NETNS)
        run("umount", place / "proc")
        shutil.rmtree(place)


def inside(root: Path, *words: str, status: int = 0) -> str:
    """What a program of the chroot prints, in the namespace."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    return run(
        *("ip", "netns", "exec", NETNS, "chroot", str(root), *words),
        path=path,
        status=status,
        DEBIAN_FRONTEND="noninteractive",
        LC_ALL="C.UTF-8",
    )


def rules(listing: list[str]) -> str:
    return run("ip", "netns", "exec", NETNS, *listing)


def files(root: Path) -> set[str]:
    """Every file of a root filesystem but for those that describe packages."""
    found = run("find", root, "-xdev", "!", "-type", "d", "-printf", "%P\n").splitlines()
    return {name for name in found if not name.startswith(GENERATED)}


def unit() -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in (DEBIAN / "steersman.service").read_text().splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def configure(root: Path, mode: str) -> None:
    """Write the conffile: the objects come from a directory."""
    path = root / "etc/steersman/config.yaml"
    text = yaml.safe_load(path.read_text())
    text.pop("clientConnection", None)
    # The size of the machine's table can be set in its first network namespace only.
    text |= {"mode": mode, "conntrack": {"maxPerCore": 0}, "hostnameOverride": "node-a"}
    text |= {"steersman": {"manifests": ["/srv/objects"]}}
    path.write_text(yaml.safe_dump(text))
    (root / "srv/objects").mkdir(exist_ok=True)
    (root / "srv/objects/world.yaml").write_text(yaml.safe_dump_all(WORLD))


def serve(root: Path, log: Path, listing: list[str]) -> None:
    """Run it as the unit does, with no more capabilities, until its rules are there."""
    settings = unit()
    names = " ".join(settings["CapabilityBoundingSet"]).lower().replace("cap_", "+").split()
    bounded = ["setpriv", f"--bounding-set=-all,{','.join(names)}", "--no-new-privs"]
    (command,) = settings["ExecStart"]
    argv = ["ip", "netns", "exec", NETNS, "chroot", str(root), *bounded, *command.split()]
    with log.open("w") as output, subprocess.Popen(argv, stdout=output, stderr=output) as process:
        try:
            until(process, log, lambda: ENDPOINT in rules(listing))
            assert json.loads(inside(root, "steersman", "services", "-o", "json"))
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()


def test_life_of_a_package(package: Path, root: Path, tmp_path: Path) -> None:
    before = files(root)
    inside(root, "dpkg", "--install", str(copied(package, root)))
    assert inside(root, "steersman", "version") == f"steersman {__version__}\n"
    checked = "/etc/steersman/config.yaml"
    inside(root, "steersman", "config", "check", "--strict", checked)
    compiled = files(root)
    assert "usr/lib/steersman/packages/steersman/__pycache__/__init__.cpython-311.pyc" in compiled
    for mode, listing in MODES.items():
        configure(root, mode)
        serve(root, tmp_path / f"{mode}.log", listing)
        assert ENDPOINT in rules(listing), "the rules stay when the process ends"
    kept = (root / "etc/steersman/config.yaml").read_text()
    inside(root, "dpkg", "--install", "/package.deb")
    assert ENDPOINT in rules(MODES["iptables"]), "an upgrade leaves the rules alone"
    assert (root / "etc/steersman/config.yaml").read_text() == kept
    assert files(root) - compiled == {"srv/objects/world.yaml"}, "it writes nothing when it runs"
    said = inside(root, "dpkg", "--remove", "steersman")
    assert "kernel objects removed" in said
    for listing in MODES.values():
        for name in ("steersman", ENDPOINT, "KUBE-SERVICES", "KUBE-SVC"):
            assert name not in rules(listing), rules(listing)
    assert (root / "etc/steersman/config.yaml").read_text() == kept
    (root / "etc/steersman/kubeconfig.conf").write_text("secret")
    inside(root, "dpkg", "--purge", "steersman")
    assert files(root) == before | {"package.deb", "srv/objects/world.yaml"}
    for name in ("etc/steersman", "usr/lib/steersman"):
        assert not (root / name).exists()


def copied(package: Path, root: Path) -> Path:
    shutil.copy(package, root / "package.deb")
    return Path("/package.deb")


def test_it_has_pages_for_man_and_completion_for_shells(package: Path, tmp_path: Path) -> None:
    run("dpkg-deb", "--extract", package, tmp_path)
    share = tmp_path / "usr/share"
    pages = {path.name for path in (share / "man/man1").iterdir()}
    assert {"steersman.1.gz", "steersman-doctor.1.gz", "steersman-run.1.gz"} <= pages
    for name in (
        "bash-completion/completions/steersman",
        "zsh/vendor-completions/_steersman",
        "fish/vendor_completions.d/steersman.fish",
    ):
        assert "steersman" in (share / name).read_text()
    machine = os.uname().machine
    compiled = {path.name for path in tmp_path.rglob("*.so")}
    assert hatch_build.EXTENSION.name in compiled
    for minor in (11, 12, 13, 14):
        assert f"_core.cpython-3{minor}-{machine}-linux-gnu.so" in compiled


def test_lintian_has_nothing_to_say(package: Path) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("lintian is missing: `FULL=1 make test` as root installs it")
    said = run("lintian", "--allow-root", "--fail-on=error,warning", package)
    assert [line for line in said.splitlines() if line[:3] in ("E: ", "W: ")] == []


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing")
    program = tmp_path / "usr/bin/steersman"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEBIAN / "steersman.service").read_text().replace("/usr/bin/steersman", str(program))
    copy = tmp_path / "steersman.service"
    copy.write_text(text)
    assert run("systemd-analyze", "verify", "--man=no", copy) == ""
