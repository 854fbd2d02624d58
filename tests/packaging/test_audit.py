"""The check of the lock against a database of advisories, with small databases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from scripts import audit
from tests.packaging.artefacts import ROOT

LOCKED = audit.locked(audit.LOCK.read_text())


def advisory(name: str = "aiohttp", *events: dict[str, str], **more: Any) -> dict[str, Any]:
    ranges = [{"type": "ECOSYSTEM", "events": list(events)}]
    package = {"package": {"name": name, "ecosystem": "PyPI"}, "ranges": ranges}
    return {"id": "PYSEC-1", "summary": "a hole", "affected": [package], **more}


def run(database: Path) -> tuple[int, str]:
    argv = [sys.executable, "scripts/audit.py", f"--database={database}"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_lock_is_read() -> None:
    assert LOCKED["aiohttp"] >= Version("3.11")
    assert len(LOCKED) > 20


def test_a_vulnerable_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.json").write_text(json.dumps(advisory("AioHTTP", {"introduced": "0"})))
    (tmp_path / "2.yaml").write_text(yaml.safe_dump(advisory("not-ours", {"introduced": "0"})))
    code, text = run(tmp_path)
    assert code == 1
    assert f"aiohttp {LOCKED['aiohttp']}: PYSEC-1: a hole" in text
    assert "1 known problems" in text


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([{"introduced": "0"}, {"fixed": "1.0"}], False),
        ([{"introduced": "0"}, {"fixed": "2.0"}], True),
        ([{"introduced": "2.0"}], False),
        ([{"introduced": "0"}, {"last_affected": "1.5"}], True),
        ([{"introduced": "0"}, {"last_affected": "1.4"}], False),
        ([{"introduced": "0"}, {"fixed": "1"}, {"introduced": "1.5"}, {"fixed": "1.6"}], True),
        ([{"introduced": "no version"}], False),
    ],
)
def test_ranges(events: list[dict[str, str]], expected: bool) -> None:
    [entry] = advisory("x", *events)["affected"]
    assert audit.is_affected(Version("1.5"), entry) is expected


def test_versions_are_listed_and_other_ranges_are_left_out() -> None:
    entry = {"versions": ["1.5"], "ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}
    assert audit.is_affected(Version("1.5"), entry)
    assert not audit.is_affected(Version("1.6"), entry)


def test_a_withdrawn_advisory_does_not_count(tmp_path: Path) -> None:
    text = json.dumps(advisory("aiohttp", {"introduced": "0"}, withdrawn="2026-01-01T00:00:00Z"))
    (tmp_path / "1.json").write_text(text)
    assert run(tmp_path)[0] == 0


def test_without_a_database_nothing_is_called_safe(tmp_path: Path) -> None:
    reason = f"{tmp_path} has no advisories in the OSV format"
    assert run(tmp_path) == (2, f"audit: nothing was checked: {reason}\n")
    (tmp_path / "1.json").write_text("{")
    code, text = run(tmp_path)
    assert (code, "1.json" in text) == (2, True)
