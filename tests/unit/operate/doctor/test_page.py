"""docs/doctor.md describes every check, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from steersman.operate.doctor import CHECKS

PAGE = Path(__file__).parents[4] / "docs" / "doctor.md"


def test_the_page_describes_every_check() -> None:
    described = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(described) == sorted(check.name for check in CHECKS)


def test_every_description_is_complete() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        assert all(cells), row
