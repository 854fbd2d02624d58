"""The shape of the code in figures: sizes, fragments, comments, cycles, names of modes, words.

    python scripts/shape.py            print the figures; exit 1 if one is beyond its limit
    python scripts/shape.py --source DIR   of another tree, without limits
    python scripts/shape.py --once DIR     figures of a folder, and its private functions used once

Only what the layout promises has a limit. Sizes and fragments are shown, to be judged by reading.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MODES = ("iptables", "nftables", "ipvs", "ebpf", "userspace", "winuserspace")
FORBIDDEN = re.compile(
    r"\b(what is|whom|anew|likewise|be told|is told|are told|mended|in vain)\b", re.IGNORECASE
)
BANNER = re.compile(r"^ *# ?([-=~#*])\1.*$", re.MULTILINE)
"""A comment that divides a module: then it is two."""
LIMITS = {
    "banners": 0,
    "cycles of imports": 0,
    "imports between modes": 0,
    "lines outside modes/ that name a mode": 0,
    "references to SPEC or STYLE": 0,
}


class Module(NamedTuple):
    """A file of the package."""

    name: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def mode(self) -> str:
        """The mode whose folder it is in; "" outside of them."""
        parts = self.name.split(".")
        return parts[2] if len(parts) > 3 and parts[1] == "modes" else ""


def read(source: Path) -> list[Module]:
    """Return the modules of a tree, without empty ones."""
    modules = []
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        if text.strip():
            modules.append(Module(name, text, ast.parse(text)))
    return modules


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a module, methods and nested ones too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function's body without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def docstring_lines(module: Module) -> int:
    """Count lines of docstrings, those under attributes included."""
    return sum(
        (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def comment_lines(module: Module) -> int:
    """Count lines that have a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def used_once(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the private functions of a module that are used once."""
    uses = Counter(re.findall(r"\b_\w+\b", module.text))
    return [
        function
        for function in functions(module)
        if function.name.startswith("_")
        and not function.name.endswith("__")
        and uses[function.name] == 2
    ]


def imported(module: Module) -> set[str]:
    """Return the modules that a module imports when it is imported."""
    found = set()
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def cycles(modules: list[Module]) -> int:
    """Count the modules that import themselves, however indirectly."""
    graph = {module.name: imported(module) for module in modules}
    graph = {name: {other for other in others if other in graph} for name, others in graph.items()}
    count = 0
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph[name]
        count += start in seen
    return count


def between_modes(modules: list[Module]) -> int:
    """Count imports of one mode by another."""
    count = 0
    for module in modules:
        for name in imported(module):
            parts = name.split(".")
            other = parts[2] if len(parts) > 2 and parts[:2] == ["steersman", "modes"] else ""
            count += other in MODES and module.mode in MODES and other != module.mode
    return count


_IPTABLES = "steersman.netfilter.iptables"  # named after the tool


def mode_names(modules: list[Module]) -> int:
    """Count lines outside modes/ that name a mode in an identifier or a string.

    Docstrings are not counted, nor config/ (upstream's flags and sections of the document are named
    after modes), netfilter/ (iptables and nftables are the names of its tools), and cli/commands/
    (texts for users, with examples).
    """
    name = re.compile(rf"(?<![\w/-])(?:{'|'.join(MODES)})(?![\w-])")
    count = 0
    for module in modules:
        folders = (["modes"], ["config"], ["netfilter"])
        if module.name.split(".")[1:2] in folders or ".cli.commands." in module.name:
            continue
        docstrings = {
            node.value.lineno
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
        kinds = (tokenize.NAME, tokenize.STRING)
        lines = {
            t.start[0]
            for t in tokens
            if t.type in kinds and name.search(t.string) and _IPTABLES not in t.line
        }
        count += len(lines - docstrings)
    return count


def figures(modules: list[Module]) -> dict[str, float]:
    """Return all figures by name."""
    lines = sum(module.lines for module in modules)
    sizes = [body_lines(function) for module in modules for function in functions(module)]
    once = sum(len(used_once(module)) for module in modules)
    return {
        "modules": len(modules),
        "lines": lines,
        "median module, lines": median(module.lines for module in modules),
        "longest module, lines": max(module.lines for module in modules),
        "median function, lines": median(sizes),
        "longest function, lines": max(sizes),
        "functions per 1,000 lines": round(1000 * len(sizes) / lines, 1),
        "private functions used once, %": round(100 * once / len(sizes), 1),
        "comments, % of lines": round(100 * sum(map(comment_lines, modules)) / lines, 1),
        "docstrings, % of lines": round(100 * sum(map(docstring_lines, modules)) / lines, 1),
        "cycles of imports": cycles(modules),
        "imports between modes": between_modes(modules),
        "lines outside modes/ that name a mode": mode_names(modules),
        "forbidden words": sum(len(FORBIDDEN.findall(module.text)) for module in modules),
        "banners": sum(len(BANNER.findall(module.text)) for module in modules),
        "references to SPEC or STYLE": sum(
            len(re.findall(r"\b(?:SPEC|STYLE) \d", module.text)) for module in modules
        ),
    }


def main() -> int:
    """Print the figures; return 1 if one is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="another tree than src, without limits")
    parser.add_argument("--once", type=Path, help="a folder whose fragments are listed")
    arguments = parser.parse_args()
    source = arguments.source or arguments.once
    modules = read(source or ROOT / "src")
    if arguments.once:
        for module in modules:
            for function in used_once(module):
                print(f"{module.name}:{function.lineno} {function.name} ({body_lines(function)})")
    beyond = 0
    for name, value in figures(modules).items():
        limit = None if source else LIMITS.get(name)
        bound = "" if limit is None else f"at most {limit}"
        print(f"{name:40} {value:>8}   {bound}".rstrip())
        beyond += limit is not None and value > limit
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
