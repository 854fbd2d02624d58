"""Artefacts that several tests need, and the interpreters that they are for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import hatch_build
from scripts import image_lock

ROOT = Path(__file__).parents[2]
MINORS = (11, 12, 13, 14)
"""CPython 3.x for which there is a wheel of every dependency."""

needs_clang = pytest.mark.skipif(
    bool(hatch_build.missing_tools()) or not Path("/usr/include/bpf").exists(),
    reason="clang, llvm or libbpf-dev is missing",
)


def run(*argv: str | Path, at: Path = ROOT, path: str = "", status: int = 0, **more: str) -> str:
    """Return what a program prints, which must end with a status; `path` becomes its PATH."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}
    environment["PATH"] = path or environment["PATH"]
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        argv, cwd=at, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def checkout(place: Path) -> Path:
    """Copy what the repository has, as a clone: nothing compiled, nothing ignored by git."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, names):
        source = ROOT / name
        if source.is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place / name)
    return place


def interpreter(minor: int) -> str | None:
    """CPython 3.MINOR of this machine: on the PATH, or one of pyenv's."""
    name = f"python3.{minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for path in (shutil.which(name), *sorted(pyenv.glob(f"3.{minor}.*/bin/{name}"))):
        if (
            path
            and not subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode
        ):
            return str(path)
    return None


def download(minor: int, machine: str, into: Path) -> Path:
    """Download the locked wheels of what steersman needs, for an interpreter and a machine."""
    into.mkdir(parents=True, exist_ok=True)
    (into / "requirements.txt").write_text(runtime_lock())
    platforms = [
        f"--platform=manylinux_2_28_{machine}",
        f"--platform=manylinux_2_17_{machine}",
        f"--platform=manylinux2014_{machine}",
    ]
    run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
        *("--only-binary", ":all:", "--implementation", "cp", "--python-version", f"3.{minor}"),
        *platforms,
        *("--dest", str(into), "-r", str(into / "requirements.txt")),
    )
    return into


@cache
def runtime_lock() -> str:
    """The lock without tools of developers."""
    return image_lock.text()
