"""The wheel and the sdist: complete, the same at every build, and installed without network."""

from __future__ import annotations

import os
import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from hashlib import sha256
from pathlib import Path

import pytest

import hatch_build
from scripts.runtime_tree import MINORS, download
from steersman import __version__
from tests.packaging.artefacts import (
    checkout,
    interpreter,
    needs_clang,
    run,
)

OBJECTS = {path.name for path in hatch_build.objects(Path())}
FOUND = "from steersman.modes.ebpf import loader; print(loader.FILE, loader.FILE.exists())"


def hatch(at: Path, what: str, out: Path, path: str = "", status: int = 0) -> str:
    return run(
        *(sys.executable, "-m", "hatchling", "build", "-t", what, "-d", out),
        at=at,
        path=path,
        status=status,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def built(tree: Path) -> Path:
    """The folder with a wheel and an sdist of a clone."""
    out = tree / "dist"
    hatch(tree, "sdist", out)
    hatch(tree, "wheel", out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (found,) = built.glob("*.tar.gz")
    return found


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def objects(names: list[str]) -> set[str]:
    return {Path(name).name for name in names if name.endswith(".o")}


@needs_clang
def test_the_wheel_is_for_every_machine_and_has_the_programs_of_ebpf(wheel: Path) -> None:
    assert wheel.name == f"steersman-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"steersman-{__version__}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert objects(names) == OBJECTS
    assert "steersman/py.typed" in names
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= set(names)
    assert [name for name in names if name.endswith(".pyc") or "/tests/" in name] == []
    listed = {each.rpartition(" ")[2] for each in metadata.get_all("Classifier", ())}
    assert {f"3.{minor}" for minor in MINORS} <= listed


@needs_clang
def test_an_sdist_builds_the_same_wheel_without_clang(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        assert objects(archive.getnames()) == OBJECTS
        archive.extractall(tmp_path, filter="data")
    hatch(tmp_path / f"steersman-{__version__}", "wheel", tmp_path, path="/nowhere")
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


@needs_clang
def test_a_second_build_gives_the_same_files(built: Path, tmp_path: Path) -> None:
    again = checkout(tmp_path / "elsewhere")
    (again / hatch_build.MODE / "trace-el.o.4711").touch()  # of a build that still compiles
    hatch(again, "sdist", again / "dist")
    hatch(again, "wheel", again / "dist")
    assert digests(again / "dist") == digests(built)


def test_a_build_without_clang_fails_and_says_what_is_missing(tmp_path: Path) -> None:
    place = checkout(tmp_path)
    said = hatch(place, "wheel", place / "dist", path="/nowhere", status=1)
    assert "clang and llvm-strip missing" in said
    assert "libbpf-dev" in said
    assert not list(place.glob("dist/*"))


@needs_clang
def test_a_program_that_does_not_compile_fails_the_build(tmp_path: Path) -> None:
    place = checkout(tmp_path)
    (place / hatch_build.MODE / "c" / "trace.bpf.c").write_text("int broken(\n")
    said = hatch(place, "wheel", place / "dist", status=1)
    assert "could not compile" in said
    assert "trace.bpf.c" in said


@needs_clang
@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("minor", MINORS)
def test_the_wheel_installs_without_network_and_runs(
    minor: int, wheel: Path, tmp_path: Path
) -> None:
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"there is no CPython 3.{minor} here")
    packages = tmp_path / "packages"
    download(minor, os.uname().machine, packages)
    place = tmp_path / "venv"
    run(python, "-m", "venv", "--without-pip", place)
    run(
        *(sys.executable, "-m", "pip", "--isolated", "--python", place / "bin" / "python"),
        *("install", "--quiet", "--no-compile", "--no-index", "--find-links", packages, wheel),
        PIP_CONFIG_FILE=os.devnull,
    )
    steersman = place / "bin" / "steersman"

    def says(*words: str) -> str:
        return run(steersman, *words, at=tmp_path, path="/usr/bin:/bin")

    assert __version__ in says("version")
    assert __version__ in run(place / "bin" / "kube-proxy", "--version", at=tmp_path)
    assert re.match(r"\.TH STEERSMAN 1", says("man").replace('"', ""))
    for shell in ("bash", "zsh", "fish"):
        assert "__complete" in says("completion", shell)
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    asked = says("services", "--manifests", str(manifests), "--hostname-override", "node-a")
    assert "Service" in asked
    where, there = run(place / "bin" / "python", "-c", FOUND, at=tmp_path).split()
    assert where.startswith(str(place))
    assert there == "True"


@pytest.mark.parametrize("minor", [MINORS[0], MINORS[-1]])
def test_every_dependency_has_a_wheel_for_aarch64(minor: int, tmp_path: Path) -> None:
    download(minor, "aarch64", tmp_path)
    assert list(tmp_path.glob("*aarch64.whl"))
