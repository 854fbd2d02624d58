"""Lay out Windows' Python 3.11 for Wine in build/windows, which tests/windows runs.

The wheel `panda3d` carries python.org's python311.dll with all extension modules, the standard
library's modules are those of a Python 3.11 of Linux, and packages are the locked wheels for
win_amd64. Everything that is downloaded is checked by its hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build" / "windows"
SOURCES = ROOT / "tests" / "windows" / "c"
PYTHON = (
    "panda3d==1.10.16 "
    "--hash=sha256:37acfb92655c4226879f95c988e2ef1449a53c54486d6c1ebc00e2772429af82"
)
PACKAGES = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "attrs", "colorama", "frozenlist", "h11"),
    *("hypothesis", "idna", "iniconfig", "jinja2", "markupsafe", "msgspec"),
    *("multidict", "packaging", "pluggy", "propcache", "pygments", "pytest"),
    *("pytest-asyncio", "pyyaml", "sortedcontainers", "typing-extensions", "yarl"),
)
_PRELOAD = "wineserver_preload"
COMPILER = "x86_64-w64-mingw32-gcc"
WINE = "wine64"


class MissingError(Exception):
    """Something that the layout needs cannot be had here."""


def wine() -> str:
    """Return the path of Wine; Debian's package wine64 leaves it out of PATH.

    Raises:
        MissingError: it is not installed.
    """
    found = shutil.which(WINE, path=f"{os.environ.get('PATH', '')}:/usr/lib/wine")
    if found is None:
        raise MissingError("Wine is not installed (apt-get install wine64)")
    return found


def lay_out() -> Path:
    """Make build/windows unless it is there; return the path of its python.exe.

    Raises:
        MissingError: Wine, the compiler, Python 3.11 or the wheels are missing.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    made_of = b"".join(path.read_bytes() for path in (Path(__file__), *sorted(SOURCES.iterdir())))
    wanted = hashlib.sha256(made_of + _locked().encode()).hexdigest()
    stamp = HOME / "stamp"
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes
        if not stamp.exists() or stamp.read_text() != wanted:
            wine()
            for name in ("python", "wine"):
                shutil.rmtree(HOME / name, ignore_errors=True)
            _standard_library(HOME / "python" / "Lib")
            _download(HOME / "python")
            _compile(HOME / "python")
            _prefix(HOME / "wine")
            stamp.write_text(wanted)
    return HOME / "python" / "python.exe"


def _locked() -> str:
    """Return the lines of requirements.lock for PACKAGES."""
    text = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^([\w.-]+)==.*(?:\n {4}--hash.*)*", text, re.MULTILINE)
    whole = re.finditer(r"^([\w.-]+)==.*(?:\n {4}--hash.*)*", text, re.MULTILINE)
    assert set(PACKAGES) <= set(entries), set(PACKAGES) - set(entries)
    return "\n".join(match[0] for match in whole if match[1] in PACKAGES) + "\n"


def _standard_library(folder: Path) -> None:
    """Copy the modules of a Python 3.11."""
    ask = "import sys, os; print(sys.version_info[:2] == (3, 11) and os.path.dirname(os.__file__))"
    for program in (sys.executable, "python3.11", "/usr/bin/python3"):
        if shutil.which(program) is None:
            continue
        asked = subprocess.run([program, "-c", ask], capture_output=True, text=True, check=False)
        found = Path(asked.stdout.strip())
        if (found / "os.py").exists():
            unwanted = ("site-packages", "dist-packages", "lib-dynload", "test", "__pycache__")
            shutil.copytree(found, folder, ignore=shutil.ignore_patterns(*unwanted, "*.so"))
            return
    raise MissingError("there is no Python 3.11, whose standard library is needed")


def _download(folder: Path) -> None:
    """Unpack Python's DLLs and the packages."""
    with TemporaryDirectory() as temporary:
        lock, wheels = Path(temporary, "lock"), Path(temporary, "wheels")
        lock.write_text(f"{PYTHON}\n{_locked()}")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        target = ["--platform=win_amd64", "--python-version=3.11", "--only-binary=:all:"]
        more = ["--no-deps", "--require-hashes", f"--requirement={lock}", f"--dest={wheels}"]
        done = subprocess.run([*pip, *target, *more], capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingError(f"the wheels cannot be downloaded: {done.stderr.strip()[-300:]}")
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                if wheel.name.startswith("panda3d"):
                    for name in archive.namelist():
                        if re.fullmatch(r"deploy_libs/[\w.-]+\.(dll|pyd)", name):
                            Path(folder, Path(name).name).write_bytes(archive.read(name))
                else:
                    archive.extractall(folder / "Lib" / "site-packages")


def _compile(folder: Path) -> None:
    """Compile the programs of tests/windows/c."""
    for source, compiler in (
        ("python", (COMPILER, "-municode")),
        ("netsh", (COMPILER, "-municode")),
        (_PRELOAD, ("clang", "-shared", "-fPIC")),
    ):
        suffix, more = (".exe", ("-lws2_32",)) if compiler[0] == COMPILER else (".so", ())
        target = folder / f"{source}{suffix}"
        words = [*compiler, "-O1", "-Wall", "-Werror", "-o", target, SOURCES / f"{source}.c", *more]
        try:
            subprocess.run(words, check=True)
        except FileNotFoundError:
            needed = f"{compiler[0]} (apt-get install clang gcc-mingw-w64-x86-64-win32)"
            raise MissingError(f"there is no {needed}") from None


def environment(prefix: Path) -> dict[str, str]:
    """Return the environment of Wine with a prefix: its registry and its drive C:."""
    # Wine runs a builtin netsh.exe that does nothing unless it is told to look for another one.
    return {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(prefix.parent),
        "WINEPREFIX": str(prefix),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "netsh.exe=n;mscoree=;mshtml=;winemenubuilder.exe=",
        "PYTHONPYCACHEPREFIX": str(HOME / "bytecode"),
        "LD_PRELOAD": str(HOME / "python" / f"{_PRELOAD}.so"),
    }


def _prefix(folder: Path) -> None:
    """Let Wine make its prefix, which takes half a minute; tests copy it."""
    environ = environment(folder)
    subprocess.run([wine(), "wineboot.exe", "--init"], env=environ, check=True, capture_output=True)
    server = Path(wine()).with_name("wineserver64")
    subprocess.run([server, "--wait"], env=environ, check=True)


def main() -> int:
    """Lay it out; a missing part is said, and no error."""
    try:
        print(f"windows: {lay_out()}")
    except MissingError as error:
        print(f"windows: not here: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
