"""References lead to sections of docs/behaviour.md and to nothing outside of the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXTS = (".py", ".md", ".c", ".h", ".sh", ".yaml")
OUTSIDE = re.compile(r"\b(?:SPEC|STYLE) \d[\d.]*")
"""References to documents that are not part of this repository."""
REFERENCE = re.compile(
    r"\bbehaviour(?:\.md`?,)? (\d+(?:\.\d+)*(?:(?:, | and |-)\d+(?:\.\d+)*)*)", re.I
)
SECTION = re.compile(r"^#+ (\d+(?:\.\d+)*)\.? ", re.MULTILINE)


def files(*places: str) -> Iterator[tuple[str, str]]:
    """Name and text of the files below some directories (or of files)."""
    for place in places:
        top = ROOT / place
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and (path == top or path.suffix in TEXTS):
                yield str(path.relative_to(ROOT)), path.read_text()


def everything() -> Iterator[tuple[str, str]]:
    return files("src", "tests", "benchmarks", "docs", "Makefile", "README.md", "CONTRIBUTING.md")


def test_no_file_refers_to_documents_outside_the_repository() -> None:
    found = [f"{name}: {hit}" for name, text in everything() for hit in OUTSIDE.findall(text)]
    assert not found, "refer to a section of docs/behaviour.md:\n" + "\n".join(found)


def test_references_name_sections_that_exist() -> None:
    sections = set(SECTION.findall((ROOT / "docs" / "behaviour.md").read_text()))
    missing = [
        f"{name}: behaviour {number}"
        for name, text in everything()
        for numbers in REFERENCE.findall(text)
        for number in re.findall(r"[\d.]+", numbers)
        if number not in sections
    ]
    assert sections, "docs/behaviour.md has numbered sections"
    assert not missing, "no such section:\n" + "\n".join(missing)
