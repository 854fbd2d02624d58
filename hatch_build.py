"""Build hook: compiles the BPF programs of the ebpf mode, one object each per byte order.

Without clang objects that are there already (those of an sdist) are packed as they are; where there
are none either, the mode's `probe()` says so on the machine. `python hatch_build.py` only compiles.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # to compile, hatchling is not needed
    BuildHookInterface = object  # type: ignore[assignment, misc]

MODE = Path("src/steersman/modes/ebpf")
TARGETS = {"el": "bpfel", "eb": "bpfeb"}
# Source by the first word of its objects: the mode's programs, and those that trace them.
SOURCES = {"steersman": "steersman.bpf.c", "trace": "trace.bpf.c"}
FLAGS = ("-g", "-O2", "-mcpu=v3", "-Wall", "-Werror")


def objects(root: Path) -> list[Path]:
    """The objects, whether they are there or not."""
    return [root / MODE / f"{name}-{order}.o" for name in SOURCES for order in TARGETS]


def compile_objects(root: Path) -> None:
    """Compile them all with clang.

    Raises:
        subprocess.CalledProcessError: clang found an error, or misses headers (libbpf-dev).
    """
    for name, source in SOURCES.items():
        for order, target in TARGETS.items():
            out = root / MODE / f"{name}-{order}.o"
            compile_object(root / MODE / "c" / source, target, out)


def compile_object(source: Path, target: str, out: Path) -> None:
    """Compile a source for one target of clang, whole or not at all."""
    multiarch = sysconfig.get_config_var("MULTIARCH")
    include = [f"-I/usr/include/{multiarch}"] if multiarch else []
    part = out.with_name(f"{out.name}.{os.getpid()}")
    place = f"-ffile-prefix-map={source.parent}=c"
    argv = ["clang", "-target", target, *FLAGS, place, *include, "-c", "-o", str(part)]
    try:
        subprocess.run([*argv, str(source)], check=True)
        if shutil.which("llvm-strip"):
            subprocess.run(["llvm-strip", "-g", str(part)], check=True)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


class BpfBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """What hatchling calls."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile where that is possible, and pack what is there."""
        root = Path(self.root)
        if shutil.which("clang"):
            try:
                compile_objects(root)
            except subprocess.CalledProcessError as error:
                self.app.display_warning(f"the ebpf mode is not compiled: {error}")
        found = [path for path in objects(root) if path.exists()]
        if not found:
            self.app.display_warning("no clang and no compiled object: the ebpf mode is left out")
        build_data.setdefault("artifacts", []).extend(f"/{p.relative_to(root)}" for p in found)


if __name__ == "__main__":
    if not shutil.which("clang"):
        sys.exit("clang is missing (Debian: clang, llvm and libbpf-dev)")
    compile_objects(Path(__file__).parent)
