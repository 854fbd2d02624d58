"""Print the part of requirements.lock that the program needs to run, hashes and all."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).parents[1] / "requirements.lock"
PYPROJECT = LOCK.with_name("pyproject.toml")


def needed(requirements: Iterable[str], extras: Iterable[str], seen: set[str]) -> set[str]:
    """Names of all packages that are required, directly or not, without tools of developers."""
    for text in requirements:
        requirement = Requirement(text)
        environments = [{"extra": extra} for extra in ("", *extras)]
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate(each) for each in environments):
            continue
        name = canonicalize_name(requirement.name)
        if name not in seen:
            seen.add(name)
            needed(requires(name) or (), requirement.extras, seen)
    return seen


def entries(text: str) -> dict[str, str]:
    """The lock's entries by the names of their packages."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    named = (block for block in blocks if "==" in block)
    return {str(canonicalize_name(block.partition("==")[0])): block for block in named}


def runtime() -> set[str]:
    """Names of all packages that steersman needs to run."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    return needed(project["dependencies"], (), set())


def text() -> str:
    """The entries of what steersman needs."""
    locked = entries(LOCK.read_text())
    return "".join(locked[name] for name in sorted(runtime()))


if __name__ == "__main__":
    print(text(), end="")
