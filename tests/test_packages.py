"""The packages: the sdist carries the compiled programs, and installs where no clang is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hatch_build

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "hatch_build.py", "README.md", "CHANGELOG.md", "LICENSE")
OBJECTS = {path.name for path in hatch_build.objects(Path())}
FOUND = "from steersman.modes.ebpf import loader; print(loader.FILE, loader.FILE.exists())"


def run(*argv: str, at: Path, path: str) -> str:
    full = [sys.executable, *argv]
    environment = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        full, cwd=at, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in which nothing is compiled."""
    place = tmp_path / "tree"
    ignored = shutil.ignore_patterns("*.o", "__pycache__")
    shutil.copytree(ROOT / "src", place / "src", ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, place)
    return place


def objects(names: list[str]) -> set[str]:
    return {Path(name).name for name in names if name.endswith(".o")}


@pytest.mark.skipif(not shutil.which("clang"), reason="the programs are compiled by clang")
@pytest.mark.skipif(not Path("/usr/include/bpf").exists(), reason="libbpf-dev is not installed")
def test_an_sdist_installs_without_clang(tree: Path, tmp_path: Path) -> None:
    run("-m", "hatchling", "build", "-t", "sdist", "-d", "out", at=tree, path=os.environ["PATH"])
    (sdist,) = (tree / "out").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert objects(archive.getnames()) == OBJECTS
    into = tmp_path / "installed"
    flags = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(into))
    run("-m", "pip", "install", *flags, str(sdist), at=tmp_path, path="/nowhere")
    code = f"import sys; sys.path.insert(0, {str(into)!r}); {FOUND}"
    where, there = run("-c", code, at=tmp_path, path="/nowhere").split()
    assert where.startswith(str(into))
    assert there == "True"
    assert {path.name for path in Path(where).parent.glob("*.o")} == OBJECTS


def test_a_checkout_without_clang_builds_without_programs(tree: Path) -> None:
    said = run("-m", "hatchling", "build", "-t", "wheel", "-d", "out", at=tree, path="/nowhere")
    assert "the ebpf mode is left out" in said
    (wheel,) = (tree / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not objects(archive.namelist())
        assert "steersman/modes/ebpf/probe.py" in archive.namelist()
