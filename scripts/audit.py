"""Known vulnerabilities of the locked packages, from a copy of an advisory database.

    python scripts/audit.py --database DIR

DIR holds advisories in the OSV format (JSON or YAML, in any folders below it), such as a clone of
PyPA's advisory database. Nothing is fetched. The exit code is 1 if a package of requirements.lock
is affected, and 2 if there is no database to ask.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

LOCK = Path(__file__).parents[1] / "requirements.lock"
_SUFFIXES = {".json", ".yaml", ".yml"}


class DatabaseError(ValueError):
    """There is no database, or an advisory in it cannot be read; the message says which."""


def locked(text: str) -> dict[str, Version]:
    """Return the versions in a lock file by canonical name."""
    found = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", text, re.MULTILINE)
    return {str(canonicalize_name(name)): Version(version) for name, version in found}


def advisories(database: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the advisories below a directory that are in force.

    Raises:
        DatabaseError: there are none, or one cannot be read.
    """
    paths = [path for path in sorted(database.rglob("*")) if path.suffix in _SUFFIXES]
    number = 0
    for path in paths:
        try:
            text = path.read_text()
            advisory = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise DatabaseError(f"{path}: {error}") from error
        if isinstance(advisory, dict) and "affected" in advisory:
            number += 1
            if not advisory.get("withdrawn"):
                yield advisory
    if not number:
        raise DatabaseError(f"{database} has no advisories in the OSV format")


def is_affected(version: Version, entry: Mapping[str, Any]) -> bool:
    """Return whether an `affected` entry of an advisory names a version, or has it in a range."""
    if str(version) in entry.get("versions", ()):
        return True
    return any(
        _contains(version, each.get("events", ()))
        for each in entry.get("ranges", ())
        if each.get("type") == "ECOSYSTEM"
    )


def _contains(version: Version, events: Any) -> bool:
    inside = False
    for event in events:  # in the order of versions, as the format demands
        (kind, text), *_ = event.items()
        try:
            at = Version("0" if text == "0" else text)
        except InvalidVersion:
            continue
        if kind == "introduced" and version >= at:
            inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            inside = False
    return inside


def affected(versions: Mapping[str, Version], database: Path) -> Iterator[str]:
    """Yield a line about each advisory that concerns a locked version. Raises as `advisories`."""
    for advisory in advisories(database):
        for entry in advisory["affected"]:
            package = entry.get("package", {})
            name = str(canonicalize_name(package.get("name", "")))
            if package.get("ecosystem") != "PyPI" or name not in versions:
                continue
            if is_affected(versions[name], entry):
                summary = advisory.get("summary") or advisory.get("details", "").strip()
                known = ", ".join([str(advisory.get("id")), *advisory.get("aliases", ())])
                yield f"{name} {versions[name]}: {known}: {summary.partition(chr(10))[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="audit", description=__doc__)
    parser.add_argument("--database", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    versions = locked(LOCK.read_text())
    try:
        lines = sorted(affected(versions, args.database))
    except DatabaseError as error:
        print(f"audit: nothing was checked: {error}", file=sys.stderr)
        return 2
    print("\n".join([*lines, f"{len(versions)} locked packages, {len(lines)} known problems"]))
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
