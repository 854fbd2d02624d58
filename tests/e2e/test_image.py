"""The image: built, run as its manifests say, in a namespace against the test API server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from steersman import __version__
from steersman.modes.specs import SPECS
from steersman.operate.connectivity import pod
from tests.packaging.artefacts import ready_made
from tests.support.builders import kube
from tests.support.processes.container import Object, argv, buildah, prepare

ROOT = Path(__file__).parents[2]
TAG = "steersman:test"
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "")
LIMIT = 60_000_000
"""Bytes of all files in it."""
SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"
ADDRESS, ENDPOINT, CLUSTER_IP = "192.0.2.1", "10.244.1.5", "10.96.0.10"
RULES = {
    "iptables": (ENDPOINT, ["iptables-save", "-t", "nat"]),
    "nftables": (ENDPOINT, ["nft", "list", "ruleset"]),
    "userspace": (CLUSTER_IP, ["iptables-save", "-t", "nat"]),
}
"""By mode: what its rules name, and how they are listed."""
PROXY_MODE = "http://127.0.0.1:10249/proxyMode"
READY = "http://127.0.0.1:10256/readyz"

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

WORLD: list[Object] = [
    kube.node("node-a", ADDRESS),
    kube.service("web", CLUSTER_IP, clusterIPs=[CLUSTER_IP]),
    kube.endpoint_slice("web-1", "web", ENDPOINT),
]


def build(out: Path, **more: str) -> Path:
    """Build the image into a folder."""
    given = {"OUT": str(out), "IMAGE": TAG, "PYTHON": sys.executable, "ARCHS": ARCH}
    done = subprocess.run(
        [ROOT / "scripts" / "image.sh"],
        env=os.environ | given | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the image's files; its storage is in `storage` there."""
    for tool in ("mmdebstrap", "buildah", "clang", "llvm-strip"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: `make setup` as root installs it")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the image has Python 3.11, which also has to build it")
    out = tmp_path_factory.mktemp("image")
    given = ready_made(tmp_path_factory)
    yield build(out, BUILDER="buildah", STORAGE=str(out / "storage"), **given)
    shutil.rmtree(out)


@pytest.fixture(scope="module")
def container(built: Path) -> Iterator[str]:
    """Name of a container of the image; copying its files takes seconds."""
    storage = built / "storage"
    name = buildah(storage, "from", "--pull-never", TAG)
    yield name
    buildah(storage, "rm", name)


@pytest.fixture(scope="module")
def root(built: Path, container: str) -> Path:
    """The container's root filesystem; tests add mount points and mounts."""
    return Path(buildah(built / "storage", "mount", container))


@pytest.fixture
def netns() -> Iterator[str]:
    """A network namespace with this node's address."""
    name = f"sm-image-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for words in (
            "link set lo up",
            "link add eth0 type veth peer name peer",
            f"addr add {ADDRESS}/24 dev eth0",
            "link set eth0 up",
        ):
            subprocess.run(["ip", "-n", name, *words.split()], check=True)
        # A new namespace has what the machine's first one has.
        inside(name, "sysctl", "-qw", "net.ipv4.conf.all.route_localnet=0")
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def api_server(netns: str, tmp_path: Path) -> Iterator[str]:
    """URL of an API server in the namespace."""
    objects = tmp_path / "objects.yaml"
    objects.write_text(yaml.safe_dump_all(WORLD))
    command = [sys.executable, "-m", "tests.support.apiserver.server", "--objects", str(objects)]
    process = subprocess.Popen(
        ["ip", "netns", "exec", netns, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout
        yield process.stdout.readline().split()[-1]
        process.terminate()


def inside(netns: str, *command: str) -> str:
    """What a program of this machine prints in the namespace; "" where it fails."""
    words = ["ip", "netns", "exec", netns, *command]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def page(netns: str, url: str) -> str:
    script = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=60).read().decode())"
    return inside(netns, sys.executable, "-c", script).strip()


def wait(process: subprocess.Popen[str], log: Path, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def chart(mode: str, api_server: str) -> list[Object]:
    """The chart's objects for a mode."""
    helm = pytest.importorskip("helm_python")
    folder = ROOT / "deploy" / "helm" / "steersman"
    values = yaml.safe_load((folder / f"values-{mode}.yaml").read_text())
    with helm.Chart.load(folder) as loaded:
        values |= {"apiServers": [api_server]}
        # The size of the machine's table can be set in its first network namespace only.
        values["config"] |= {"conntrack": {"maxPerCore": 0}}
        texts = loaded.render(values, name="steersman")
    documents = [yaml.safe_load_all(t) for name, t in texts.items() if name.endswith(".yaml")]
    return [each for document in documents for each in document if each]


def test_says_its_version(built: Path, container: str) -> None:
    command = ("/usr/local/bin/kube-proxy", "--version=raw")
    said = buildah(built / "storage", "run", "--isolation", "chroot", container, *command)
    assert said == __version__


def test_labels_and_entrypoint(built: Path) -> None:
    text = buildah(built / "storage", "inspect", "--type", "image", TAG)
    config = json.loads(text)["OCIv1"]["config"]
    assert config["Entrypoint"] == ["/usr/local/bin/kube-proxy"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert re.fullmatch("[0-9a-f]{40}", config["Labels"]["org.opencontainers.image.revision"])


def test_it_is_small(built: Path) -> None:
    assert (built / f"rootfs-{ARCH}.tar").stat().st_size <= LIMIT


def test_a_second_build_has_the_same_digest(
    built: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    again = build(tmp_path, **ready_made(tmp_path_factory))
    assert (again / "digests.txt").read_text() == (built / "digests.txt").read_text()
    one, other = (each / "steersman.oci.tar" for each in (built, again))
    assert one.read_bytes() == other.read_bytes()


def test_provenance_names_the_image_by_its_digest(built: Path) -> None:
    made = json.loads((built / "provenance.json").read_text())
    digest = (built / "digests.txt").read_text().splitlines()[0]
    assert made["subject"] == [{"name": TAG, "digest": {"sha256": digest.removeprefix("sha256:")}}]
    with tarfile.open(built / "steersman.oci.tar") as archive:
        index = archive.extractfile("index.json")
        assert index is not None
        assert json.load(index)["manifests"][0]["digest"] == digest


def test_every_module_can_be_imported(root: Path) -> None:
    """What was left out of Python's library is used nowhere, neither by us nor by packages."""
    code = """
import importlib, pkgutil
import h11, h2, hpack, hyperframe, jinja2, msgspec, steersman, yaml
for package in (h11, h2, hpack, hyperframe, jinja2, msgspec, steersman, yaml):
    for each in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not each.name.endswith("__main__"):
            try:
                importlib.import_module(each.name)
            except ImportError as error:
                print(each.name, error)
"""
    argv = ["chroot", str(root), "/usr/bin/python3.11", "-I", "-c", code]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == ""


def test_licences_of_all_that_is_in_it(root: Path) -> None:
    text = (root / "usr/share/doc/steersman/NOTICE").read_text()
    names = {path.name for path in (root / "var/lib/dpkg/status.d").iterdir()}
    assert {"libc6", "nftables", "iptables"} <= names
    for name in names:
        assert f"  {name} " in text
        assert (root / "usr/share/doc" / name / "copyright").stat().st_size


def test_every_library_that_is_used_is_there(root: Path) -> None:
    """Each program and each compiled Python module finds what it is linked with."""
    binaries = [*root.glob("usr/sbin/*"), *root.glob("usr/bin/*"), *root.glob("usr/local/bin/*")]
    binaries += [*root.glob("usr/lib/python3*/**/*.so"), *root.glob("usr/lib/*/xtables/*.so")]
    loader = next(root.glob("usr/lib*/ld-linux-*")).relative_to(root)
    missing = []
    for path in binaries:
        if path.is_symlink() or path.read_bytes()[:4] != b"\x7fELF":
            continue
        command = ["chroot", str(root), f"/{loader}", "--list", f"/{path.relative_to(root)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "not found" in done.stdout + done.stderr:
            missing.append((path.name, done.stdout, done.stderr))
    assert missing == []


def test_list_of_contents_is_complete(built: Path, root: Path) -> None:
    document = json.loads((built / f"sbom-{ARCH}.spdx.json").read_text())
    assert document == json.loads((root / "usr/share/sbom/steersman.spdx.json").read_text())
    listed = {each["SPDXID"] for each in document["packages"]}
    assert len(listed) == len(document["packages"])
    assert {"SPDXRef-pypi-steersman", "SPDXRef-deb-nftables", "SPDXRef-deb-libc6"} <= listed
    folders = (root / "usr/lib/python3/dist-packages").glob("*.dist-info")
    found = sum(each.startswith("SPDXRef-pypi-") for each in listed)
    assert found == len(list(folders))
    contained = {each["relatedSpdxElement"] for each in document["relationships"]}
    assert contained == listed


def test_it_decodes_with_the_extension(root: Path) -> None:
    code = "from steersman.source import protobuf; print(protobuf.NATIVE)"
    argv = ["chroot", str(root), "/usr/bin/python3.11", "-I", "-c", code]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "True\n"


def test_it_is_an_image_for_pods_that_test_connectivity(root: Path) -> None:
    program, result = Path(pod.__file__).read_text(encoding="utf-8"), root / "tmp/result"
    argv = ["chroot", str(root), "python3", "-c", program, "ask", "[]", "0", "/tmp/result"]
    subprocess.run(argv, check=True, timeout=60)
    assert result.read_text() == "[]"
    result.unlink()


def test_it_runs_what_was_compiled_without_docstrings(root: Path) -> None:
    """They take 1 MB of each process; the root is read-only, so nothing is compiled later."""
    launcher = (root / "usr/local/bin/steersman").read_text().splitlines()[0]
    code = """
import asyncio, os, yaml, steersman.run.sync.sync as ours
print([module.__doc__ for module in (asyncio.base_events, yaml, ours)], ours.__cached__)
print(os.path.exists(ours.__cached__))
"""
    argv = ["chroot", str(root), *launcher.removeprefix("#!").split(), "-c", code]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split("\n")
    assert said[0].startswith("[None, None, None] "), said
    assert said[1] == "True", said


def test_nothing_of_this_machine_is_in_it(root: Path) -> None:
    for name in ("etc/apt", "bin/sh", "usr/bin/dpkg"):
        assert not (root / name).exists(), name
    for name in ("etc/hostname", "etc/resolv.conf"):  # empty: where a container had them mounted
        assert not (root / name).exists() or not (root / name).read_bytes(), name
    texts = [*root.glob("usr/local/bin/*"), *root.glob("usr/lib/python3/dist-packages/*-info/*")]
    assert not [
        path for path in texts if path.is_file() and str(ROOT).encode() in path.read_bytes()
    ]


@pytest.mark.parametrize("mode", sorted(RULES.keys() & SPECS.keys()))
def test_runs_as_the_chart_says(
    mode: str, root: Path, netns: str, api_server: str, tmp_path: Path
) -> None:
    """Settings by the init container, rules by the other one, with no more rights than given."""
    objects = chart(mode, api_server)
    (config,) = (each["data"] for each in objects if each["kind"] == "ConfigMap")
    (daemons,) = (each for each in objects if each["kind"] == "DaemonSet")
    pod = daemons["spec"]["template"]["spec"]
    files = {f"/var/lib/kube-proxy/{name}": text for name, text in config.items()}
    secrets = {f"{SECRETS}/token": "token", f"{SECRETS}/ca.crt": ""}
    prepare(root, files | secrets | {"/run/xtables.lock": ""})
    start = {"NODE_NAME": "node-a"}
    wanted, listing = RULES[mode]
    (first,) = pod["initContainers"]
    done = subprocess.run(
        argv(root, netns, first, start), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    log = tmp_path / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            argv(root, netns, pod["containers"][0], start), stderr=output, text=True
        ) as process,
    ):
        try:
            wait(process, log, lambda: wanted in inside(netns, *listing))
            wait(process, log, lambda: page(netns, READY) == "ok")
            assert page(netns, PROXY_MODE) == mode
            # What `kubectl exec` starts asks that process, and reads the kernel as it may.
            for question in ("services", "drift", "dump shop/web"):
                words = ["/usr/local/bin/steersman", *question.split()]
                command = {**pod["containers"][0], "command": words, "args": []}
                asked = subprocess.run(
                    argv(root, netns, command, start), capture_output=True, text=True, check=False
                )
                assert asked.returncode == 0, (question, asked.stdout, asked.stderr)
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert f"Uid:\t{65532 if mode == 'nftables' else 0}\t" in status
        finally:
            process.terminate()
        assert process.wait(60) == 0, log.read_text()
    if mode != "userspace":
        assert wanted in inside(netns, *listing)
    assert "no node ports on localhost" not in log.read_text()
    localhost = inside(netns, "sysctl", "-n", "net.ipv4.conf.all.route_localnet").strip()
    assert localhost == ("1" if mode == "iptables" else "0")
