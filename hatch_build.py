"""Build hook: compiles the BPF programs and the decoder of protobuf.

The programs are one object each per byte order: bytecode, the same for every processor. A checkout
is compiled at each build, which fails without clang: a wheel without the mode would look complete.
An sdist has the objects, and is built as it is.

The decoder is an extension in C for CPython 3.11 and later (the limited API). Where it cannot be
compiled, the build says so and goes on: then the API server is asked for JSON.

The environment variable STEERSMAN_WHEEL says which wheel is built: "x86_64" or "aarch64", on either
of them, to be shipped (with glibc 2.17 or later; the build fails if the decoder cannot be
compiled); "any", without the decoder; otherwise one for this machine, to be installed on it.

`python hatch_build.py` only compiles.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # to compile, hatchling is not needed
    BuildHookInterface = object  # type: ignore[assignment, misc]

MODE = Path("src/steersman/modes/ebpf")
TARGETS = {"el": "bpfel", "eb": "bpfeb"}
# Source by the beginning of its objects' paths: the mode's programs, those that trace them, those
# that see connections fail, and those that watch a packet in any mode.
SOURCES = {
    MODE / "steersman": MODE / "c/steersman.bpf.c",
    MODE / "trace": MODE / "c/trace.bpf.c",
    MODE / "failures": MODE / "c/failures.bpf.c",
    Path("src/steersman/host/packet_watch"): Path("src/steersman/host/packet_watch.bpf.c"),
}
FLAGS = ("-g", "-O2", "-mcpu=v3", "-Wall", "-Werror")

DECODER = Path("src/steersman/source/_protobuf.c")
EXTENSION = DECODER.with_suffix(".abi3.so")
EXTENSION_FLAGS = ("-O2", "-s", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")

WITHOUT = "protobuf cannot be decoded, so the API server is asked for JSON"
WHEEL_FOR = "STEERSMAN_WHEEL"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Those with a wheel of their own, and their names in Debian."""
THIS_MACHINE = sysconfig.get_platform().rpartition("-")[2]  # os.uname is not on Windows


def objects(root: Path) -> list[Path]:
    """The objects, whether they are there or not."""
    return [root / f"{name}-{order}.o" for name in SOURCES for order in TARGETS]


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
            compile_object(root / source, target, root / f"{name}-{order}.o")


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


def extension_problem(machine: str = "") -> str:
    """Why the decoder cannot be compiled for a machine (this one otherwise); "" where it can."""
    include = Path(sysconfig.get_path("include"))
    missing = []
    if machine and shutil.which("clang") is None:
        missing.append("clang")
    if machine not in ("", THIS_MACHINE):
        missing += [] if shutil.which("ld.lld") else ["lld"]
        missing += (
            []
            if (cross(machine) / "include").exists()
            else [f"libc6-dev-{MACHINES[machine]}-cross"]
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "Python without a global lock does not have the limited API"
    if not (include / "Python.h").exists():
        return f"there is no Python.h in {include} (libpython3-dev on Debian)"
    if missing:
        return f"{' and '.join(missing)} missing (their names on Debian)"
    return "" if compiler() else "there is no C compiler"


def compiler() -> str | None:
    """The C compiler of this machine."""
    names = (os.environ.get("CC", ""), "clang", "gcc", "cc")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def cross(machine: str) -> Path:
    """Where Debian has the C library of another machine."""
    return Path(f"/usr/{machine}-linux-gnu")


def compile_extension(root: Path, out: Path | None = None, machine: str = "") -> str:
    """Compile the decoder, whole or not at all; return why it could not be compiled, or "".

    With a machine named it is always clang, so that a release is the same wherever it is built.
    """
    if problem := extension_problem(machine):
        return problem
    source, out = (root / DECODER).absolute(), (out or root / EXTENSION).absolute()
    part = out.with_name(f"{out.name}.{os.getpid()}")
    argv = ["clang" if machine else str(compiler()), *EXTENSION_FLAGS, "-o", str(part)]
    # The source is named relative to its folder, so that no path gets into the file.
    argv += [f"-I{sysconfig.get_path('include')}", source.name]
    with tempfile.TemporaryDirectory() as folder:
        if machine:
            argv += [f"--target={machine}-linux-gnu", "-nostdlib", "-lc"]
        if machine not in ("", THIS_MACHINE):
            # Debian's pyconfig.h includes one by the name of the machine. All have the same sizes.
            ours = Path("/usr/include", sysconfig.get_config_var("MULTIARCH") or "")
            Path(folder, f"{machine}-linux-gnu").symlink_to(ours)
            argv += ["-fuse-ld=lld", f"-L{cross(machine)}/lib"]
            argv += ["-isystem", f"{cross(machine)}/include", "-isystem", folder]
        try:
            subprocess.run(argv, cwd=source.parent, check=True)
            part.replace(out)
        except subprocess.CalledProcessError as error:
            return str(error)
        finally:
            part.unlink(missing_ok=True)
    return ""


def platform(extension: Path, machine: str) -> str:
    """The tag of a wheel with an extension, by the version of glibc that it asks for."""
    asked = re.findall(rb"\0GLIBC_2\.(\d+)", extension.read_bytes())
    return f"manylinux_2_{max(17, *map(int, asked))}_{machine}"


def platform_here() -> str:
    """The tag of a wheel that is installed where it is built.

    Not the machine of the kernel: it may be x86_64 while this Python and its compiler are i686.
    """
    from packaging.tags import platform_tags  # noqa: PLC0415 - a dependency of hatchling

    return next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """What hatchling calls."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the programs of a checkout and the decoder, and pack them."""
        self.pack_objects(version, build_data)
        machine = os.environ.get(WHEEL_FOR, "")
        if machine not in ("", "any", *MACHINES):
            raise SystemExit(f"{WHEEL_FOR}={machine} is none of {', '.join(MACHINES)} and any")
        if version == "editable" and (reason := compile_extension(Path(self.root))):
            self.app.display_warning(f"{WITHOUT}: {reason}")
        elif version != "editable" and machine != "any" and self.target_name == "wheel":
            self.pack_extension(machine, build_data)

    def pack_objects(self, version: str, build_data: dict[str, Any]) -> None:
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

    def pack_extension(self, machine: str, build_data: dict[str, Any]) -> None:
        """Compile the decoder, not into the tree, where that of this machine may be in use."""
        self.folder = tempfile.TemporaryDirectory()  # removed with this object
        out = Path(self.folder.name, EXTENSION.name)
        if reason := compile_extension(Path(self.root), out, machine):
            if machine:
                raise SystemExit(f"no wheel for {machine}: {reason}")
            self.app.display_warning(f"{WITHOUT}: {reason}")
            return
        tag = platform(out, machine) if machine else platform_here()
        build_data.setdefault("force_include", {})[str(out)] = str(EXTENSION.relative_to("src"))
        build_data |= {"pure_python": False, "tag": f"cp311-abi3-{tag}"}


if __name__ == "__main__":
    if reason := missing_tools():
        sys.exit(reason)
    compile_objects(Path(__file__).parent)
    if reason := compile_extension(Path(__file__).parent):
        print(f"{WITHOUT}: {reason}")
