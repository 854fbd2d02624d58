"""The shape of the program: its imports, its pure modules, and the words that modes never use."""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from steersman.modes.specs import SPECS

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "steersman"
TESTS = Path(__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
LAYERS: dict[str, set[str]] = {
    # a part of the package and the parts that it may import, beside itself
    "model": set(),
    "host": {"model"},
    "source": {"model", "host"},  # credentials may come from a program: host/exec.py
    "compile": {"model"},
    "proxy": {"model", "host", "failover"},
    "netfilter": {"model", "host", "failover"},
    "modes": {"model", "host", "proxy", "netfilter", "failover"},
    "config": {"model", "host", "modes"},  # of modes only the rows: specs.py
    "run": {
        "model",
        "host",
        "source",
        "compile",
        "proxy",
        "netfilter",
        "modes",
        "config",
        "failover",
    },
    "operate": {
        "model",
        "host",
        "source",
        "compile",
        "proxy",
        "netfilter",
        "modes",
        "config",
        "run",
    },
    "ui": {"model", "host", "source", "compile", "modes", "config", "run", "operate"},
    "failover": {"model"},
    "cli": {"model", "host", "compile", "modes", "config", "run", "source", "operate", "ui"},
    "__main__": {"cli"},
}
PURE_PATTERNS: list[str] = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["tool"][
    "steersman"
]["pure"]
PURE = {path for pattern in PURE_PATTERNS for path in PACKAGE.glob(pattern)}
IMPURE = {"asyncio", "logging", "os", "subprocess", "time", "random"}
POLICY_WORDS = re.compile(
    r"(?<![a-z])(ready|readiness|terminating|zones?|traffic_?polic(y|ies))(?![a-z])"
)


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of the modules that a file imports, wherever in it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def ours(path: Path) -> set[str]:
    """Parts of the package that a file imports (of the package itself: its version)."""
    names = [name.split(".") for name in imports(path)]
    found = {name[1] for name in names if name[0] == "steersman" and len(name) > 1}
    return found - {"__version__"}


@cache
def files_of(path: Path) -> frozenset[Path]:
    """Files of the package that a file imports itself."""
    files = {SOURCE / f"{name.replace('.', '/')}.py" for name in imports(path)}
    return frozenset(file for file in files if file.is_file())


def needs(path: Path, seen: set[Path]) -> set[Path]:
    """A file and all files of the package that it imports, directly or not."""
    if path not in seen:
        seen.add(path)
        for file in files_of(path):
            needs(file, seen)
    return seen


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Identifiers, strings and comments of a file, split where camelCase is, in lower case."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in {tokenize.NAME, tokenize.STRING, tokenize.COMMENT}:
                text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", token.string).lower()
                yield token.start[0], text


def wrong(find: Callable[[Path], Any], paths: Iterable[Path] = MODULES) -> dict[str, Any]:
    """Return the modules in which something is found, by name, each with its finds."""
    return {relative(path): found for path in paths if (found := find(path))}


def test_no_module_needs_itself() -> None:
    """However indirectly, and be the import at the top, in a function, or for types only."""
    assert not wrong(
        lambda path: [relative(each) for each in needs(path, set()) if path in files_of(each)]
    )


def test_every_part_has_its_place() -> None:
    assert {part_of(path) for path in MODULES} - {"__init__"} <= LAYERS.keys()


def test_imports_point_one_way() -> None:
    parts = [path for path in MODULES if part_of(path) != "__init__"]
    assert not wrong(lambda path: ours(path) - LAYERS[part_of(path)] - {part_of(path)}, parts)


def test_the_configuration_knows_only_the_rows_of_modes() -> None:
    def other_than_rows(path: Path) -> list[str]:
        found = [name for name in imports(path) if name.startswith("steersman.modes")]
        return [name for name in found if not name.startswith("steersman.modes.specs")]

    assert not wrong(other_than_rows, [path for path in MODULES if part_of(path) == "config"])


def test_pure_modules_know_no_world() -> None:
    def impure(path: Path) -> list[tuple[str, str]]:
        return [
            (relative(needed), name)
            for needed in needs(path, set())
            for name in imports(needed)
            if name.split(".")[0] in IMPURE
        ]

    assert not wrong(impure, PURE)


@pytest.mark.parametrize("pattern", PURE_PATTERNS)
def test_patterns_of_pure_modules_match(pattern: str) -> None:
    assert list(PACKAGE.glob(pattern))


VIOLATIONS = {
    "upwards": ("model", "import steersman.run.sync.sync"),
    "upwards by name": ("compile", "from steersman import modes"),
    "in a function": ("compile", "def f():\n    from steersman.host import exec"),
    "sideways": ("compile", "from steersman.source.store import Store"),
    "of the whole package": ("host", "from steersman import run, __version__"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violations_are_seen(name: str, tmp_path: Path) -> None:
    part, text = VIOLATIONS[name]
    (tmp_path / "module.py").write_text(text)
    assert not ours(tmp_path / "module.py") <= LAYERS[part] | {part}


@pytest.mark.parametrize(
    "text", ["import os.path", "from asyncio import sleep", "if 1:\n    import logging"]
)
def test_impurity_is_seen(text: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(text)
    assert {name.split(".")[0] for name in imports(tmp_path / "module.py")} & IMPURE


def test_modes_never_speak_of_policy() -> None:
    def spoken(path: Path) -> list[str]:
        return [f"line {line}: {hit[0]}" for line, text in words(path) if (hit := policy(text))]

    assert not wrong(spoken, [path for path in MODULES if part_of(path) in {"modes", "proxy"}])


MODE_NAMES = tuple(SPECS)
NAMES_OF_MODES = re.compile(rf"(?<![\w/-])({'|'.join(MODE_NAMES)})(?![\w-])")
MAY_NAME_MODES = {
    "config": "upstream's flags and sections of the document are named after modes",
    "netfilter": "the tool iptables",
    "modes": "",
}
TEXTS = PACKAGE / "cli" / "commands"
"""Texts and examples for users name modes; the rule is about code."""


def names_of_modes(path: Path) -> Iterator[str]:
    """Lines whose identifiers or strings, docstrings aside, name a mode."""
    text = path.read_text()
    if not NAMES_OF_MODES.search(text):
        return
    tree = ast.parse(text)
    docstrings = {
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            kinds = {tokenize.NAME, tokenize.STRING}
            code = token.type in kinds and token.start[0] not in docstrings
            tool = "steersman.netfilter.iptables" in token.line
            if code and not tool and NAMES_OF_MODES.search(token.string):
                yield f"line {token.start[0]}: {token.string}"


def test_only_modes_name_a_mode() -> None:
    others = [
        path for path in MODULES if part_of(path) not in MAY_NAME_MODES and path.parent != TEXTS
    ]
    found = wrong(lambda path: list(names_of_modes(path)), others)
    assert not found, "ask the row of the mode: modes/specs.py"


def imported_modes(path: Path) -> set[str]:
    """Names of modes whose modules a file imports."""
    names = [name.split(".") for name in imports(path)]
    found = {name[2] for name in names if len(name) > 2 and name[:2] == ["steersman", "modes"]}
    return {name for name in found if (PACKAGE / "modes" / name).is_dir()}


def test_no_mode_is_imported_by_another_one() -> None:
    def others(path: Path) -> set[str]:
        own = {path.parent.name} if path.parent.parent == PACKAGE / "modes" else set[str]()
        return imported_modes(path) - own

    assert not wrong(others), "put what modes share into netfilter/ or proxy/"


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("from steersman.modes.ipvs.objects import DEVICE", {"ipvs"}),
        ("from steersman.modes.ebpf import layout", {"ebpf"}),
        ("from steersman.modes.base import Mode", set()),
    ],
)
def test_imports_of_modes_are_found(text: str, modes: set[str], tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(text)
    assert imported_modes(tmp_path / "module.py") == modes


@pytest.mark.parametrize("text", ['mode = "ipvs"', "from steersman.modes import ebpf"])
def test_names_of_modes_are_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(text)
    assert list(names_of_modes(tmp_path / "module.py"))


@pytest.mark.parametrize("text", ['"""For ipvs."""', 'run("iptables-restore")', "an_ipvs_flag = 1"])
def test_other_names_are_not_of_modes(text: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(text)
    assert list(names_of_modes(tmp_path / "module.py")) == []


def policy(text: str) -> re.Match[str] | None:
    return POLICY_WORDS.search(text)


@pytest.mark.parametrize("text", ["is ready", "external_traffic_policy", "zone", "_ready", "zones"])
def test_policy_words_are_found(text: str) -> None:
    assert policy(text)


@pytest.mark.parametrize("text", ["already", "readyz", "horizonal", "determinating", "policy"])
def test_other_words_are_not(text: str) -> None:
    assert not policy(text)


LAYOUTS = {"nftables": "layout.py", "ebpf": "layout.py"}
"""Modes whose keys and values are packed bytes, and the module that knows the offsets in them."""
PACKED = {"key", "value", "endpoint", "member", "client", "start", "content"}
"""Names of variables that hold packed bytes."""


def offsets(tree: ast.AST) -> list[str]:
    """Return where a module indexes or slices packed bytes."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id in PACKED
    ]


def test_offsets_of_keys_are_spelled_in_one_module() -> None:
    parts = [path for path in MODULES if path.parent.name in LAYOUTS]
    others = [path for path in parts if path.name != LAYOUTS[path.parent.name]]
    assert others
    assert not wrong(lambda path: offsets(ast.parse(path.read_text())), others)


@pytest.mark.parametrize("text", ["key[0]", "key[2:-4]", "found = {k: value[:4] for k in x}"])
def test_offsets_are_found(text: str) -> None:
    assert offsets(ast.parse(text))


@pytest.mark.parametrize("text", ["keys[0]", "key: dict[int, str]", "words[key]", "kind_of(key)"])
def test_other_subscripts_are_not(text: str) -> None:
    assert not offsets(ast.parse(text))


BANNER = re.compile(r"^ *# ?([-=~#*])\1.*$", re.MULTILINE)


def test_a_module_tells_one_story() -> None:
    """A comment that divides a module is the seam of two."""
    assert not wrong(lambda path: [banner[0] for banner in BANNER.finditer(path.read_text())])


@pytest.mark.parametrize(
    ("text", "is_banner"),
    [
        ("x = 1\n# -- Reading -------\n", True),
        ("    # ---- writing\n", True),
        ("# a comment -- and more\n", False),
    ],
)
def test_banners_are_found(text: str, is_banner: bool) -> None:
    assert bool(BANNER.search(text)) is is_banner


def test_only_host_starts_processes_and_opens_netlink() -> None:
    def starts(path: Path) -> bool:
        names = {name.split(".")[0] for name in imports(path)}
        return "subprocess" in names or "create_subprocess" in path.read_text()

    assert wrong(starts).keys() == {"host/exec.py"}
    assert not wrong(
        lambda path: "AF_NETLINK" in path.read_text(),
        [path for path in MODULES if part_of(path) != "host"],
    )


def test_tests_import_no_test_module() -> None:
    """Shared helpers are in tests/support."""
    found = {
        path.name: name
        for path in TESTS.rglob("*.py")
        if "test_" in path.read_text().replace("def test_", "")
        for name in imports(path)
        if re.search(r"^tests\b.*\.test_\w+", name)
    }
    assert not found


READMES = sorted(PACKAGE.rglob("README.md"))


def files_named(readme: Path) -> set[str]:
    return set(re.findall(r"`([\w./-]+\.(?:py|h|c))`", readme.read_text()))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_readmes_name_files_that_exist(readme: Path) -> None:
    files = [f"/{p.relative_to(SOURCE.parent)}" for p in (*PACKAGE.rglob("*"), *TESTS.rglob("*"))]
    gone = {n for n in files_named(readme) if not any(f.endswith(f"/{n}") for f in files)}
    assert not gone


MODE_READMES = [path for path in READMES if path.parent.parent.name == "modes"]


@pytest.mark.parametrize("readme", MODE_READMES, ids=lambda path: path.parent.name)
def test_the_readme_of_a_mode_names_its_modules(readme: Path) -> None:
    modules = {path.name for path in readme.parent.glob("[!_]*.py")}
    assert not modules - files_named(readme)
