"""Artefacts that several tests need, and the interpreters that they are for."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import hatch_build
from scripts.runtime_tree import MINORS, download, find_wheel
from steersman import __version__

ROOT = Path(__file__).parents[2]

needs_clang = pytest.mark.skipif(
    bool(hatch_build.missing_tools()) or not Path("/usr/include/bpf").exists(),
    reason="clang, llvm or libbpf-dev is missing",
)

needs_cross = pytest.mark.skipif(
    any(map(hatch_build.extension_problem, hatch_build.MACHINES)),
    reason="the extension cannot be compiled for both machines: `FULL=1 make test` as root"
    " installs the tools",
)
MACHINE = os.uname().machine


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


def hatch(at: Path, what: str, out: Path, wheel: str = "", path: str = "", status: int = 0) -> str:
    """Build an sdist or a wheel of a tree; `wheel` says for which machine."""
    argv = (sys.executable, "-m", "hatchling", "build", "-t", what, "-d", out)
    return run(*argv, at=at, path=path, status=status, **{hatch_build.WHEEL_FOR: wheel})


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the processes of a test run share; the first that asks makes it."""
    top = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top = top.parent
    place = top / f"shared-{name}"
    with (top / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=top) as part:
                made = Path(part, name)
                made.mkdir()
                make(made)
                made.rename(place)
    return place


def distributions(factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist of this tree, and of it a wheel for each machine that can be."""
    return shared(factory, "distributions", build_all)


def build_all(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hatch(checkout(Path(folder)), "sdist", out)
        unpacked = unpack_sdist(out, Path(folder, "unpacked"))
        for machine in hatch_build.MACHINES:
            if not hatch_build.extension_problem(machine):
                hatch(unpacked, "wheel", out, machine)
        hatch(unpacked, "wheel", out, "any")


def unpack_sdist(distributions: Path, place: Path) -> Path:
    name = f"steersman-{__version__}"
    with tarfile.open(distributions / f"{name}.tar.gz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 or later
        archive.extractall(place)
    return place / name


def packages(factory: pytest.TempPathFactory) -> Path:
    """The folder with the locked wheels of all dependencies, for this machine and each Python."""

    def make(place: Path) -> None:
        for minor in MINORS:
            download(minor, MACHINE, place)

    return shared(factory, "packages", make)


def own_wheel(factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip would take here."""
    built = distributions(factory)
    if hatch_build.extension_problem(MACHINE):
        return next(built.glob("*-any.whl"))
    return find_wheel(built, MACHINE)


def ready_made(factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for the scripts of the image and of the Debian package, which then build no wheel.

    They also download none.
    """
    given = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages(factory))}
    if not hatch_build.extension_problem(MACHINE):
        given["WHEELS"] = str(distributions(factory))
    return given


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
