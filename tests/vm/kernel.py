"""A stock Debian kernel: fetched and unpacked into a cache, never installed."""

from __future__ import annotations

import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("STEERSMAN_VM_CACHE", Path.home() / ".cache/steersman-vm"))
"""Outside the repository; kernels stay there."""
DEFAULT = os.environ.get("STEERSMAN_VM_KERNEL", "linux-image-amd64")
"""Debian package of the kernel: a second version can be chosen."""
_COMPRESSED = re.compile(r"\.ko(\.xz)?$")


class MachineError(Exception):
    """The machine cannot run here; the message names the missing package and how to get it."""


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel."""

    tree: Path
    release: str

    @property
    def image(self) -> Path:
        """What the machine boots."""
        return self.tree / f"boot/vmlinuz-{self.release}"

    @property
    def modules(self) -> Path:
        """Its modules, with their index."""
        return self.tree / f"lib/modules/{self.release}"

    def closure(self, names: Sequence[str]) -> list[tuple[str, bytes]]:
        """Modules with all that they need, in loading order: name and contents."""
        needs, builtin = self._index()
        order: dict[str, None] = {}
        for name in names:
            if name not in needs and name not in builtin:
                raise MachineError(f"kernel {self.release} has no module {name}; choose another")
            file, before = needs.get(name, ("", []))
            order.update(dict.fromkeys([*reversed(before), file] if file else []))
        return [(_module(file), self._load(file)) for file in order]

    def _index(self) -> tuple[dict[str, tuple[str, list[str]]], set[str]]:
        lines = (self.modules / "modules.dep").read_text().splitlines()
        rows = [line.partition(":") for line in lines]
        needs = {_module(file): (file, before.split()) for file, _, before in rows}
        return needs, set(map(_module, (self.modules / "modules.builtin").read_text().split()))

    def _load(self, file: str) -> bytes:
        data = (self.modules / file).read_bytes()
        return lzma.decompress(data) if file.endswith(".xz") else data


def _module(file: str) -> str:
    return _COMPRESSED.sub("", Path(file).name).replace("-", "_")


def find_kernel(package: str = DEFAULT) -> Kernel:
    """Return a kernel by its Debian package, from the cache or fetched.

    Raises:
        MachineError: it cannot be had.
    """
    wanted = _concrete(package)
    tree = CACHE / wanted
    if not (tree / "complete").exists():
        _fetch(wanted, tree)
    (release,) = (path.name for path in (tree / "lib/modules").iterdir())
    return Kernel(tree, release)


def _concrete(package: str) -> str:
    """Follow a package like linux-image-amd64 to the one that has the kernel."""
    done = _run(["apt-cache", "depends", "--no-recommends", "--no-suggests", package])
    found = re.search(r"Depends: (linux-image-\d\S+)", done)
    return found[1] if found else package


def _fetch(package: str, tree: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        work = Path(name)
        _run(["apt-get", "-o", "APT::Sandbox::User=root", "download", package], work)
        (archive,) = work.glob("*.deb")
        _run(["dpkg-deb", "-x", str(archive), str(work / "tree")])
        for modules in (work / "tree/lib/modules").iterdir():
            _run(["depmod", "-b", str(work / "tree"), modules.name])
        (work / "tree/complete").touch()
        shutil.rmtree(tree, ignore_errors=True)
        (work / "tree").rename(tree)


def _run(argv: list[str], directory: Path | None = None) -> str:
    try:
        done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise MachineError(f"{argv[0]} is not here; a Debian system is needed") from None
    except subprocess.CalledProcessError as error:
        raise MachineError(f"{' '.join(argv)}: {error.stderr.strip()}") from None
    return done.stdout
