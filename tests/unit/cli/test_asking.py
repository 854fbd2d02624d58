"""Commands that only ask: help, the version, and the state of the running process."""

from __future__ import annotations

import pytest

from steersman import __version__
from steersman.cli.main import main
from steersman.run.process import mode_transition


@pytest.mark.parametrize("command", [["cleanup"], ["status"], ["config", "show"], ["explain"]])
@pytest.mark.parametrize("flag", ["--help", "-h", "--version"])
def test_who_asks_for_help_or_the_version_gets_only_that(
    command: list[str],
    flag: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    monkeypatch.setattr(mode_transition, "clean_up", done.append)
    assert main([*command, flag]) == 0
    out, err = capsys.readouterr()
    asked = f"steersman {__version__}\n" if flag == "--version" else "Usage: steersman "
    assert (out.startswith(asked), err, done) == (True, "", [])
