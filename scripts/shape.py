"""The size of the code in figures: of modules and functions, fragments, comments.

    python scripts/shape.py                of the package
    python scripts/shape.py --source DIR   of another tree
    python scripts/shape.py --once DIR     of a folder, and its private functions that are used once

They have no limits: judge them by reading. Rules of the layout: tests/test_architecture.py.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Module(NamedTuple):
    """A file of the package."""

    name: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


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
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="another tree than src")
    parser.add_argument("--once", type=Path, help="a folder whose fragments are listed")
    arguments = parser.parse_args()
    modules = read(arguments.source or arguments.once or ROOT / "src")
    if arguments.once:
        for module in modules:
            for function in used_once(module):
                print(f"{module.name}:{function.lineno} {function.name} ({body_lines(function)})")
    for name, value in figures(modules).items():
        print(f"{name:40} {value:>8}")


if __name__ == "__main__":
    main()
