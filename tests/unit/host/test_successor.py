"""A child process that does one thing after us."""

from __future__ import annotations

from pathlib import Path

from steersman.host.exec import Successor

CODE = "import sys; sys.stdin.read(); open(sys.argv[1], 'w').write(sys.argv[2])"


def test_it_works_when_we_end(tmp_path: Path) -> None:
    file = tmp_path / "done"
    successor = Successor(CODE, (str(file), "by a child"))
    assert not file.exists()  # it waits for the end of its input
    successor.finish(60)
    assert file.read_text() == "by a child"
