"""docs/doctor.md describes every check, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from steersman.model import codes
from steersman.operate.doctor import CHECKS

PAGE = Path(__file__).parents[4] / "docs" / "doctor.md"


def test_the_page_describes_every_check() -> None:
    rows = re.findall(r"^\| `(SM\d+)` `([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE)
    described = {name: code for code, name in rows}
    assert described == codes.CHECKS
    assert described.keys() == {check.name for check in CHECKS}


def test_every_description_is_complete() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        assert all(cells), row
