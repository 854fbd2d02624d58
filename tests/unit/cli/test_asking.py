"""Commands that only ask: help, the version, and the state of the running process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from steersman import __version__
from steersman.cli.command import Command
from steersman.cli.main import ask, main
from steersman.config import Parsed
from steersman.operate.answer import Answer, Block, Line
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("services", "-o", "xml"), "give one of text, wide, json, yaml"),
        (("nodes", "--sort=size"), "give one of health, name, sync, lag, findings, cpu, memory"),
        (("top", "--once", "--sort", "size"), "give one of rate, connections, failures"),
        (("problems", "--severity=fatal"), "give one of error, warning, unknown"),
        (("config", "show", "-o", "text"), "give one of yaml, json"),
        (("drift", "--lines=-3"), "'-3' is not between 0 and"),
        (("connections", "shop/web", "--limit", "x"), "'x' is not a whole number"),
    ],
)
def test_a_value_that_a_flag_cannot_have_is_an_error_of_usage(
    words: Sequence[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


@pytest.mark.parametrize(
    ("word", "hint"),
    [("servces", "did you mean services?"), ("frobnicate", "steersman --help lists them all")],
)
def test_an_unknown_command_is_an_error_of_usage(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"steersman: unknown command '{word}'; {hint}\n"


def test_nothing_makes_the_repr_of_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """That of 5,000 Services takes half a second."""
    made: list[str] = []

    class Large(Answer, frozen=True, kw_only=True):
        def __repr__(self) -> str:
            made.append("repr")
            return ""

        def blocks(self, wide: bool) -> Iterator[Block]:
            yield Line("5,000 Services")

    async def answer(_: Parsed) -> Answer:
        return Large()

    command = Command(name="large", summary="say", answer=answer, takes=frozenset())
    assert ask(command, []) == 0
    assert capsys.readouterr().out == "5,000 Services\n"
    assert made == []
