"""`--watch`: the answers that are printed; failures after the first one end nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from steersman.cli.command import Command
from steersman.cli.main import ask
from steersman.config import Parsed
from steersman.operate.answer import Answer, Block, Line, QuestionError


class Said(Answer, frozen=True, kw_only=True):
    word: str

    @property
    def exit_code(self) -> int:
        return int(self.word == "bad")

    def blocks(self, wide: bool) -> Iterator[Block]:
        yield Line(self.word)


def watching(*words: str | Exception) -> Command:
    """A command that answers so, one after the other, until it is interrupted."""
    left = iter(words)

    async def answer(_: Parsed) -> Answer:
        match next(left, KeyboardInterrupt()):
            case str() as word:
                return Said(word=word)
            case error:
                raise error

    return Command(name="said", summary="say", answer=answer, watch=True, takes=frozenset())


def watched(output: str, *words: str | Exception) -> int:
    return ask(watching(*words), ["--watch", "--interval=1ms", f"--output={output}"])


def test_only_what_differs_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert watched("text", "good", "good", "bad", "good", "bad", "bad") == 1
    assert capsys.readouterr().out.split() == ["good", "bad", "good", "bad"]


def test_each_answer_is_a_line_of_json_or_a_document_of_yaml(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = [{"source": "", "word": "good"}, {"source": "", "word": "bad"}]
    assert watched("json", "good", "bad") == 1
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
    assert watched("yaml", "good", "bad") == 1
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == expected


def test_a_restart_of_the_process_is_outlasted(capsys: pytest.CaptureFixture[str]) -> None:
    gone = QuestionError("no steersman runs in this network namespace")
    assert watched("text", "good", gone, gone, TimeoutError("late"), "bad", gone, "good") == 0
    out, err = capsys.readouterr()
    assert out.split() == ["good", "bad", "good"]
    text = f"steersman said: {gone}"
    assert err.splitlines() == [text, "steersman said: late", text]


def test_a_question_that_never_had_an_answer_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert watched("text", QuestionError("there is no Service shop/gone")) == 2
    assert capsys.readouterr() == ("", "steersman said: there is no Service shop/gone\n")
