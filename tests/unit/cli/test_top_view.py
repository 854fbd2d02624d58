"""The live view of `steersman top` outlasts a process that restarts, also as another version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import pytest

from steersman.cli import top_view
from steersman.model.node_state import NodeState
from steersman.model.top import TopSample
from steersman.operate.answer import QuestionError, Style
from steersman.operate.top_model import Question, TopModel

FAILURES = [QuestionError("the answer is not understood"), ConnectionResetError("it has ended")]


class Terminal:
    """Draws into a list; quits once a screen shows the last of some texts, seen in this order."""

    size = (80, 24)

    def __init__(self, *texts: str) -> None:
        self.missing = list(texts)
        self._awake = asyncio.Event()

    def draw(self, lines: Sequence[Sequence[tuple[str, Style]]]) -> None:
        screen = "\n".join("".join(text for text, _ in line) for line in lines)
        while self.missing and self.missing[0] in screen:
            del self.missing[0]

    def wake(self) -> None:
        self._awake.set()

    async def keys(self) -> AsyncIterator[bytes]:
        while self.missing:
            await self._awake.wait()
            self._awake.clear()
            yield b""
        yield b"q"


@pytest.mark.parametrize("failure", FAILURES, ids=("another version", "gone"))
async def test_a_question_that_fails_is_asked_again(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal("up 10s", str(failure), "up 3s")
    asked = 0

    async def ask(_: Question) -> TopSample:
        nonlocal asked
        asked += 1
        if asked == 1:
            return TopSample(NodeState("node-a", "nftables", now=10.0))
        if str(failure) in terminal.missing:
            raise failure
        return TopSample(NodeState("node-a", "nftables", now=3.0))

    @contextmanager
    def full_screen() -> Iterator[Terminal]:
        yield terminal

    monkeypatch.setattr(top_view, "ask", ask)
    monkeypatch.setattr(top_view, "full_screen", full_screen)
    async with asyncio.timeout(60):
        await top_view.show_top(TopModel(), 0.01)
    assert not terminal.missing
