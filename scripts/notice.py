"""Collect the licences of everything that steersman ships with into NOTICE.

    python scripts/notice.py            write NOTICE
    python scripts/notice.py --check    exit 1 if it is not up to date
    python scripts/notice.py --image ROOT > FILE    with Debian's packages in a root filesystem

The wheel has files of others among its pages; the Debian package and the image also hold the Python
packages that it needs. The image adds Debian's packages, each with a copyright file of its own.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts import image_lock

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "src/steersman/ui/static"
HEAD = """\
steersman
Copyright The steersman authors

Licensed under the Apache License, Version 2.0; its full text is in the file LICENSE, on Debian in
/usr/share/common-licenses/Apache-2.0. The programs of the ebpf mode are licensed under
GPL-2.0-only OR Apache-2.0, at your choice.

This file names what others have written and steersman is shipped with, and has their licences.
`make notice` writes it.
"""


class Part(NamedTuple):
    """Something that is shipped: its name, version and licence, and the texts that come with it."""

    name: str
    version: str
    licence: str
    texts: tuple[str, ...]


def python_parts() -> list[Part]:
    """The Python packages that run, as they are installed here from the lock."""
    return [python_part(distribution(name)) for name in sorted(image_lock.runtime())]


def python_part(package: Distribution) -> Part:
    """One package.

    Raises:
        SystemExit: it comes without a text of its licence, or without saying which it is.
    """
    said = package.metadata.json
    kinds = [c.rpartition(" :: ")[2] for c in said.get("classifier", ()) if "License ::" in c]
    licence = said.get("license_expression") or said.get("license") or ", ".join(kinds)
    files = [
        file
        for file in package.files or ()
        if ".dist-info" in file.parts[0]
        and re.match(r"(licen[cs]e|copying|notice|authors)", file.name, re.IGNORECASE)
    ]
    texts = tuple(dict.fromkeys(file.read_text().strip() for file in sorted(files, key=str)))
    name = str(said["name"])
    if not texts or not licence:
        sys.exit(f"{name} {package.version} comes without a licence: name it in scripts/notice.py")
    return Part(name, package.version, str(licence).partition("\n")[0], texts)


def page_parts() -> list[Part]:
    """The scripts and styles of the pages."""
    found = {}
    for each in json.loads((STATIC / "VENDORED.json").read_text()):
        stem = each["file"].partition(".")[0].removesuffix("-ext")
        text = (STATIC / "licences" / f"{stem}.txt").read_text().strip()
        found[each["name"]] = Part(each["name"], each["version"], each["licence"], (text,))
    return list(found.values())


def debian_section(root: Path) -> str:
    """Debian's packages in the image.

    Raises:
        SystemExit: one of them lacks its copyright file.
    """
    lines = ["Debian packages, each with its copyright in /usr/share/doc/PACKAGE/copyright:", ""]
    for path in sorted((root / "var/lib/dpkg/status.d").iterdir()):
        copyright_file = root / "usr/share/doc" / path.name / "copyright"
        if not copyright_file.exists():
            sys.exit(f"{path.name} has no copyright file in the image")
        text = copyright_file.read_text(errors="replace")
        kinds = re.findall(r"^License: *(\S.*)$", text, re.MULTILINE)
        version = re.search(r"^Version: (.*)$", path.read_text(), re.MULTILINE)
        assert version
        licence = "; ".join(dict.fromkeys(kinds)) or "see its copyright file"
        lines.append(f"  {path.name} {version[1]}: {licence}")
    return "\n".join(lines) + "\n"


def section(title: str, parts: list[Part]) -> str:
    """A list of parts."""
    lines = [f"  {each.name} {each.version}: {each.licence}" for each in parts]
    return "\n".join([title, "", *lines, ""])


def texts(parts: list[Part]) -> str:
    """Every text of a licence once, with the names of those that come with it."""
    users: defaultdict[str, list[str]] = defaultdict(list)
    for each in parts:
        for text in each.texts:
            users[text].append(each.name)
    rule = "-" * 78
    return "\n".join(
        f"{rule}\n{', '.join(names)}\n{rule}\n\n{text}\n" for text, names in users.items()
    )


def notice(root: Path | None = None) -> str:
    """The whole text; with Debian's packages if a root filesystem is given."""
    pages, python = page_parts(), python_parts()
    parts = [
        HEAD,
        section("Parts of the pages (steersman/ui/static):", pages),
        section("Python packages, in the Debian package and the image:", python),
        *([debian_section(root)] if root else []),
        texts([*pages, *python]),
    ]
    return "\n".join(parts)


def main() -> None:
    """Write, check or print."""
    match sys.argv[1:]:
        case []:
            (ROOT / "NOTICE").write_text(notice())
        case ["--check"]:
            if (ROOT / "NOTICE").read_text() != notice():
                sys.exit("NOTICE is not up to date: run `make notice`")
        case ["--image", root]:
            print(notice(Path(root)), end="")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
