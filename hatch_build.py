"""Build hook: compiles the BPF programs of the ebpf mode, and the decoder of protobuf.

The programs are one object each per byte order: bytecode, the same for every processor. A checkout
is compiled at each build, which fails without clang: a wheel without the mode would look complete.
An sdist has the objects, and is built as it is.

The decoder is an extension in C for CPython 3.11 and later (the limited API). Where it cannot be
compiled, the build says so and goes on: then its twin in Python decodes (source/protobuf.py).

`python hatch_build.py` only compiles.
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
# Source by the first word of its objects: the mode's programs, those that trace them, and those
# that see connections fail.
SOURCES = {
    "steersman": "steersman.bpf.c",
    "trace": "trace.bpf.c",
    "failures": "failures.bpf.c",
}
FLAGS = ("-g", "-O2", "-mcpu=v3", "-Wall", "-Werror")

DECODER = Path("src/steersman/source/_protobuf.c")
EXTENSION = DECODER.with_suffix(".abi3.so")
EXTENSION_FLAGS = ("-O2", "-s", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")


def objects(root: Path) -> list[Path]:
    """The objects, whether they are there or not."""
    return [root / MODE / f"{name}-{order}.o" for name in SOURCES for order in TARGETS]


def missing_tools() -> str:
    """Why nothing can be compiled here; "" where it can."""
    tools = [tool for tool in ("clang", "llvm-strip") if shutil.which(tool) is None]
    if not tools:
        return ""
    return (
        f"{' and '.join(tools)} missing: the programs of the ebpf mode cannot be compiled. Install "
        "clang, llvm and libbpf-dev (their names on Debian), or take the wheel or the sdist."
    )


def compile_objects(root: Path) -> None:
    """Compile them all with clang.

    Raises:
        subprocess.CalledProcessError: clang found an error, or misses headers (libbpf-dev); it
            has printed which.
    """
    for name, source in SOURCES.items():
        for order, target in TARGETS.items():
            out = root / MODE / f"{name}-{order}.o"
            compile_object(root / MODE / "c" / source, target, out)


def compile_object(source: Path, target: str, out: Path) -> None:
    """Compile a source for one target of clang, whole or not at all."""
    multiarch = sysconfig.get_config_var("MULTIARCH")
    include = [f"-I/usr/include/{multiarch}"] if multiarch else []
    part = out.absolute().with_name(f"{out.name}.{os.getpid()}")
    # BTF has the paths of the sources: those of this machine stay out, so that objects are equal.
    argv = ["clang", "-target", target, *FLAGS, "-fdebug-compilation-dir=c", *include, "-c"]
    try:
        subprocess.run([*argv, "-o", str(part), source.name], cwd=source.parent, check=True)
        subprocess.run(["llvm-strip", "-g", str(part)], check=True)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def compile_extension(root: Path) -> str:
    """Compile the decoder, whole or not at all; return why it could not be compiled, or ""."""
    include = sysconfig.get_path("include")
    names = [os.environ.get("CC", ""), "clang", "gcc", "cc"]
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    problem = ""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        problem = "Python without a global lock does not have the limited API"
    elif compiler is None:
        problem = "there is no C compiler"
    elif not Path(include, "Python.h").exists():
        problem = f"there is no Python.h in {include} (python3-dev on Debian)"
    else:
        # The source is named relative to its folder, so that no path gets into the file.
        source, out = (root / DECODER).absolute(), (root / EXTENSION).absolute()
        part = out.with_name(f"{out.name}.{os.getpid()}")
        argv = [compiler, *EXTENSION_FLAGS, f"-I{include}", "-o", str(part), source.name]
        try:
            subprocess.run(argv, cwd=source.parent, check=True)
            part.replace(out)
        except subprocess.CalledProcessError as error:
            problem = f"{error}"
        finally:
            part.unlink(missing_ok=True)
    return problem and f"protobuf is decoded in Python, which takes five times as long: {problem}"


class BpfBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """What hatchling calls."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the programs of a checkout, and pack the objects."""
        root = Path(self.root)
        build_data.setdefault("artifacts", []).extend(
            f"/{path.relative_to(root)}" for path in objects(root)
        )
        if (root / "PKG-INFO").exists() and all(path.exists() for path in objects(root)):
            return
        problem = missing_tools()
        try:
            if not problem:
                compile_objects(root)
        except subprocess.CalledProcessError as error:
            problem = f"clang could not compile the programs of the ebpf mode: {error}"
        if problem and version != "editable":
            raise SystemExit(problem)
        if problem:  # a developer may work on other modes; this one says what it lacks
            self.app.display_warning(problem)
        if version == "editable" and (reason := compile_extension(root)):
            self.app.display_warning(reason)


if __name__ == "__main__":
    if reason := missing_tools():
        sys.exit(reason)
    compile_objects(Path(__file__).parent)
    if reason := compile_extension(Path(__file__).parent):
        print(reason)
