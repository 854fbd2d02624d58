"""Unpack steersman's wheel and the locked wheels of what it needs into one directory.

    python scripts/runtime_tree.py DIRECTORY [--machine aarch64] [--minor 11 --minor 13]
                                   [--wheels FOLDER]

The Debian package and the image have that directory on their Python's path. Compiled modules carry
the version of Python in their names, and all else is the same in the wheels of each version, so one
directory serves several. Nothing of it runs here: it may be for another machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


import hatch_build
from scripts import image_lock

ROOT = Path(__file__).parents[1]
MINORS = (11, 12, 13, 14)
"""CPython 3.x for which every dependency has a wheel."""

SOURCES = {".c", ".h", ".hash", ".pxd", ".pxi", ".pyi", ".pyx", ".typed"}
"""What only compilers and type checkers read; ours are kept."""


def download(minor: int, machine: str, into: Path) -> None:
    """Download the locked wheels of what steersman needs, with their hashes checked."""
    lock = into / "requirements.txt"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text(image_lock.text())
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--implementation", "cp"]
    argv += ["--python-version", f"3.{minor}", "--dest", str(into), "-r", str(lock)]
    for glibc in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        argv += ["--platform", f"{glibc}_{machine}"]
    subprocess.run(argv, check=True)


def build_wheel(into: Path, machine: str) -> Path:
    """Build our own wheel for a machine, with the packages of this environment.

    Where the decoder cannot be compiled for the machine, a line says so, and JSON is asked for.
    """
    kind = machine
    if reason := hatch_build.extension_problem(machine):
        print(f"{machine}: {hatch_build.WITHOUT}: {reason}", file=sys.stderr)
        kind = "any"
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
    environment = os.environ | {hatch_build.WHEEL_FOR: kind}
    subprocess.run(argv, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
    (wheel,) = into.glob("steersman-*.whl")
    return wheel


def find_wheel(folder: Path, machine: str) -> Path:
    """Return our own wheel for a machine, of those in a folder."""
    found = list(folder.glob(f"steersman-*_{machine}.whl"))
    if len(found) != 1:
        sys.exit(
            f"{folder} has {len(found)} wheels of steersman for {machine}, and has to have one"
        )
    return found[0]


def unpack(wheel: Path, into: Path) -> None:
    """Unpack a wheel, without what nothing reads when it runs.

    RECORD goes: it has hashes of files before they were stripped.
    """
    ours = wheel.name.startswith("steersman-")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = Path(name)
            if path.name == "RECORD" or path.parts[0].endswith(".data"):
                continue
            if not ours and path.suffix in SOURCES:
                continue
            archive.extract(name, into)


def main() -> None:
    """Fill the directory, which must not exist."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--machine", default=os.uname().machine)
    parser.add_argument("--minor", type=int, action="append")
    parser.add_argument("--wheels", type=Path, help="a folder with ours; built otherwise")
    given = parser.parse_args()
    if shutil.which("llvm-strip") is None:
        sys.exit("llvm-strip is missing (Debian: llvm)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for minor in given.minor or MINORS:
            download(minor, given.machine, folder)
        given.directory.mkdir(parents=True)
        if given.wheels:
            own = find_wheel(given.wheels, given.machine)
        else:
            own = build_wheel(folder / "own", given.machine)
        for wheel in (own, *sorted(folder.glob("*.whl"))):
            unpack(wheel, given.directory)
    compiled = sorted(map(str, given.directory.rglob("*.so")))
    subprocess.run(["llvm-strip", "--strip-unneeded", *compiled], check=True)
    for path in given.directory.rglob("*"):  # whatever the umask
        path.chmod(0o755 if path.is_dir() else 0o644)


if __name__ == "__main__":
    main()
