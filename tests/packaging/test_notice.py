"""NOTICE has the licences of all that is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import image_lock, notice
from tests.packaging.artefacts import ROOT


def test_notice_is_up_to_date() -> None:
    assert (ROOT / "NOTICE").read_text() == notice.notice(), "run `make notice`"


def test_every_package_and_every_part_of_the_pages_is_named_with_a_text() -> None:
    text = (ROOT / "NOTICE").read_text().lower()
    vendored = json.loads((notice.STATIC / "VENDORED.json").read_text())
    versions = {each["name"]: each["version"] for each in vendored}
    locked = image_lock.entries((ROOT / "requirements.lock").read_text())
    versions |= {
        name: locked[name].split("==")[1].split()[0].rstrip("\\") for name in image_lock.runtime()
    }
    for name, version in versions.items():
        assert any(f"  {each} {version}:" in text for each in (name, name.replace("-", "_"))), name
    for path in (notice.STATIC / "licences").iterdir():
        assert path.read_text().strip().lower() in text, path


def test_a_package_of_debian_without_copyright_is_an_error(tmp_path: Path) -> None:
    status = tmp_path / "var/lib/dpkg/status.d"
    status.mkdir(parents=True)
    (status / "libc6").write_text("Package: libc6\nVersion: 2.36\n")
    with pytest.raises(SystemExit, match="libc6 has no copyright"):
        notice.debian_section(tmp_path)
    doc = tmp_path / "usr/share/doc/libc6"
    doc.mkdir(parents=True)
    (doc / "copyright").write_text("Files: *\nLicense: LGPL-2.1+\n text\n")
    assert "  libc6 2.36: LGPL-2.1+" in notice.debian_section(tmp_path)
