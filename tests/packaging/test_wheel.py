"""Wheels and the sdist: complete, the same at every build, and installed without network."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import zipfile
from email.parser import Parser
from functools import partial
from hashlib import sha256
from pathlib import Path

import packaging.tags
import pytest

import hatch_build
from scripts.runtime_tree import MINORS, download
from steersman import __version__
from tests.packaging.artefacts import (
    MACHINE,
    checkout,
    distributions,
    hatch,
    interpreter,
    needs_clang,
    needs_cross,
    packages,
    run,
    unpack_sdist,
)

NAME = f"steersman-{__version__}"
PLAIN = f"{NAME}-py3-none-any.whl"
COMPILED = {each: f"{NAME}-cp311-abi3-manylinux_2_17_{each}.whl" for each in hatch_build.MACHINES}
EXTENSION = str(hatch_build.EXTENSION.relative_to("src"))
OBJECTS = {path.name for path in hatch_build.objects(Path())}
FOUND = "from steersman.modes.ebpf import loader; print(loader.FILE, loader.FILE.exists())"
NATIVE = "from steersman.source import protobuf; print(protobuf.NATIVE)"
STABLE = re.compile(r"_?Py[A-Za-z_]+|mem(cmp|cpy|move|set)|bcmp|strlen|__stack_chk_fail")
"""What the extension may take from elsewhere: Python, and the oldest functions of the C library."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distributions(tmp_path_factory)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def objects(names: list[str]) -> set[str]:
    return {Path(name).name for name in names if name.endswith(".o")}


@needs_clang
@pytest.mark.parametrize(
    "name", [PLAIN, *(pytest.param(n, marks=needs_cross) for n in COMPILED.values())]
)
def test_a_wheel_is_complete(name: str, built: Path) -> None:
    with zipfile.ZipFile(built / name) as archive:
        names = archive.namelist()
        info = f"{NAME}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        wheel = Parser().parsestr(archive.read(f"{info}/WHEEL").decode())
        record = archive.read(f"{info}/RECORD").decode()
    assert objects(names) == OBJECTS
    assert "steersman/py.typed" in names
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= set(names)
    assert [each for each in names if each.endswith(".pyc") or "/tests/" in each] == []
    listed = {each.rpartition(" ")[2] for each in metadata.get_all("Classifier", ())}
    assert {f"3.{minor}" for minor in MINORS} <= listed

    assert f"{NAME}-{wheel['Tag']}.whl" == name
    assert wheel["Root-Is-Purelib"] == str(name == PLAIN).lower()
    compiled = [each for each in names if each.endswith(".so")]
    assert compiled == ([] if name == PLAIN else [EXTENSION])
    assert {line.split(",")[0] for line in record.splitlines()} == set(names)


@needs_cross
@pytest.mark.parametrize("machine", COMPILED)
def test_an_extension_needs_no_more_than_its_tag_promises(
    machine: str, built: Path, tmp_path: Path
) -> None:
    """It runs on its machine, with the first CPython and the first C library that are named."""
    with zipfile.ZipFile(built / COMPILED[machine]) as archive:
        path = archive.extract(EXTENSION, tmp_path)
    assert not re.search(rb"(/[\w.-]+){3}", Path(path).read_bytes()), "paths of the machine"
    said = run("llvm-readelf", "--file-header", "--needed-libs", "--dyn-syms", path)
    (kind,) = re.findall(r"Machine: +(.+)", said)
    assert kind == {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}[machine]
    assert re.findall(r"NeededLibraries \[(.*?)\]", said, re.DOTALL) == ["\n  libc.so.6\n"]
    taken = re.findall(r" UND (\S+)", said)
    assert len(taken) > 10
    assert [each for each in taken if not STABLE.fullmatch(each.partition("@")[0])] == []
    versions = re.findall(r"@GLIBC_2\.(\d+)", said)
    assert all(int(each) <= 17 for each in versions), said
    offered = re.findall(r" DEFAULT +\d+ (\w+)$", said, re.MULTILINE)
    assert offered == ["PyInit__protobuf"]


def test_a_wheel_is_for_the_c_library_that_its_extension_asks_for(tmp_path: Path) -> None:
    extension = tmp_path / "extension.so"
    for asked, tag in (
        (b"\0libc.so.6\0GLIBC_2.2.5\0", "manylinux_2_17_x86_64"),
        (b"\0GLIBC_2.38\0GLIBC_2.4\0", "manylinux_2_38_x86_64"),
    ):
        extension.write_bytes(asked)
        assert hatch_build.platform(extension, "x86_64") == tag


def test_a_python_of_32_bits_on_a_kernel_of_64_gets_a_wheel_of_32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hatch_build.platform_here() == f"linux_{MACHINE}"
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "linux-x86_64")
    bits = partial(packaging.tags._linux_platforms, is_32bit=True)
    monkeypatch.setattr(packaging.tags, "_linux_platforms", bits)
    assert hatch_build.platform_here() == "linux_i686"


@needs_clang
def test_an_sdist_without_a_compiler_gives_the_plain_wheel_and_says_so(
    built: Path, tmp_path: Path
) -> None:
    place = unpack_sdist(built, tmp_path)
    assert {path.name for path in hatch_build.objects(place) if path.exists()} == OBJECTS
    said = hatch(place, "wheel", tmp_path, path="/nowhere")
    assert f"{hatch_build.WITHOUT}: there is no " in said
    assert (tmp_path / PLAIN).read_bytes() == (built / PLAIN).read_bytes()


@needs_clang
def test_an_sdist_with_a_compiler_gives_a_wheel_for_this_machine(
    built: Path, tmp_path: Path
) -> None:
    if reason := hatch_build.extension_problem():
        pytest.skip(reason)
    place = unpack_sdist(built, tmp_path)
    hatch(place, "wheel", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"{NAME}-cp311-abi3-linux_{MACHINE}.whl"
    assert not (place / hatch_build.EXTENSION).exists()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {NATIVE}"
    assert run(sys.executable, "-c", f"{code}; print(protobuf.__file__)", at=tmp_path).split() == [
        "True",
        str(tmp_path / "site/steersman/source/protobuf.py"),
    ]


@needs_clang
def test_a_source_that_does_not_compile_gives_the_plain_wheel(built: Path, tmp_path: Path) -> None:
    place = unpack_sdist(built, tmp_path)
    (place / hatch_build.DECODER).write_text("int broken(\n")
    assert hatch_build.WITHOUT in hatch(place, "wheel", tmp_path / "dist")
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [PLAIN]


@needs_clang
@pytest.mark.parametrize(
    ("wheel", "path", "reason"),
    [
        ("aarch64", "/nowhere", "no wheel for aarch64: clang"),
        ("sparc", "", "STEERSMAN_WHEEL=sparc is none of x86_64, aarch64 and any"),
    ],
)
def test_a_wheel_that_was_asked_for_is_built_or_it_fails(
    wheel: str, path: str, reason: str, built: Path, tmp_path: Path
) -> None:
    place = unpack_sdist(built, tmp_path)
    assert reason in hatch(place, "wheel", tmp_path / "dist", wheel, path=path, status=1)
    assert not list(tmp_path.glob("dist/*"))


@needs_clang
@needs_cross
def test_a_second_build_gives_the_same_files(built: Path, tmp_path: Path) -> None:
    again = checkout(tmp_path / "elsewhere")
    (again / hatch_build.MODE / "trace-el.o.4711").touch()  # of a build that still compiles
    hatch(again, "sdist", again / "dist")
    hatch(again, "wheel", again / "dist", "x86_64")  # that of `built` is of the sdist
    hatch(unpack_sdist(again / "dist", tmp_path), "wheel", again / "dist", "aarch64")
    assert digests(again / "dist").items() < digests(built).items()


def test_a_build_without_clang_fails_and_says_what_is_missing(tmp_path: Path) -> None:
    place = checkout(tmp_path)
    said = hatch(place, "wheel", place / "dist", path="/nowhere", status=1)
    assert "clang and llvm-strip missing" in said
    assert "libbpf-dev" in said
    assert not list(place.glob("dist/*"))


@needs_clang
def test_a_program_that_does_not_compile_fails_the_build(tmp_path: Path) -> None:
    place = checkout(tmp_path)
    (place / hatch_build.MODE / "c" / "trace.bpf.c").write_text("int broken(\n")
    said = hatch(place, "wheel", place / "dist", status=1)
    assert "could not compile" in said
    assert "trace.bpf.c" in said


@needs_clang
@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("minor", MINORS)
def test_the_best_wheel_installs_without_network_and_runs(
    minor: int, built: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"there is no CPython 3.{minor} here")
    place = tmp_path / "venv"
    run(python, "-m", "venv", "--without-pip", place)

    def install(*words: str | Path) -> None:
        run(
            *(sys.executable, "-m", "pip", "--isolated", "--python", place / "bin" / "python"),
            *("install", "--quiet", "--no-compile", "--no-index", *words),
            PIP_CONFIG_FILE=os.devnull,
        )

    def says(*words: str) -> str:
        return run(place / "bin" / "steersman", *words, at=tmp_path, path="/usr/bin:/bin")

    links = ("--find-links", packages(tmp_path_factory), "--find-links", built)
    install(*links, "--only-binary", ":all:", f"steersman=={__version__}")
    native = not hatch_build.extension_problem(MACHINE)
    assert run(place / "bin" / "python", "-c", NATIVE, at=tmp_path).split() == [str(native)]
    assert __version__ in says("version")
    assert __version__ in run(place / "bin" / "kube-proxy", "--version", at=tmp_path)
    assert re.match(r"\.TH STEERSMAN 1", says("man").replace('"', ""))
    for shell in ("bash", "zsh", "fish"):
        assert "__complete" in says("completion", shell)
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    asked = says("services", "--manifests", str(manifests), "--hostname-override", "node-a")
    assert "Service" in asked
    where, there = run(place / "bin" / "python", "-c", FOUND, at=tmp_path).split()
    assert where.startswith(str(place))
    assert there == "True"

    if minor == MINORS[0]:  # a machine for which there is no other wheel
        install("--no-deps", "--force-reinstall", built / PLAIN)
        assert run(place / "bin" / "python", "-c", NATIVE, at=tmp_path).split() == ["False"]
        assert __version__ in says("version")


@pytest.mark.parametrize("minor", [MINORS[0], MINORS[-1]])
def test_every_dependency_has_a_wheel_for_aarch64(minor: int, tmp_path: Path) -> None:
    download(minor, "aarch64", tmp_path)
    assert list(tmp_path.glob("*aarch64.whl"))
