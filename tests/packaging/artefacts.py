"""Artefacts that several tests need, and the interpreters that they are for."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import hatch_build

ROOT = Path(__file__).parents[2]

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


def until(process: subprocess.Popen[bytes], log: Path, true: Callable[[], bool]) -> None:
    """Wait for a condition while a process runs; fail with its log."""
    deadline = time.monotonic() + 60
    while not true():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
