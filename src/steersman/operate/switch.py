"""Switch the mode of the running process (run/process/switching.py does it; this is the client)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import msgspec

from steersman.model.switch import SwitchRequest, SwitchResult, SwitchStep
from steersman.operate.answer import Answer, Block, Line, QuestionError, Style
from steersman.operate.client import Client, understood

_SILENCE = 600.0
"""Seconds without a step after which the process counts as unresponsive."""
_GOOD = ("switched", "checked", "unchanged")
_STYLES: dict[str, Style] = {"ok": "good", "note": "warn", "failed": "bad"}


class Switched(Answer, frozen=True, kw_only=True):
    """What a switch did, step by step, and how it ended."""

    result: SwitchResult
    steps: tuple[SwitchStep, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if the mode is switched, or could be (`--dry-run`); 1 if not."""
        return 0 if self.result.outcome in _GOOD else 1

    def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002 - there is nothing more
        """Yield the steps, and the outcome."""
        yield from map(step_line, self.steps)
        result = self.result
        if result.dials:
            text = f"{result.dials} new connections tried meanwhile, {result.failed_dials} failed"
            yield Line(text, "warn" if result.failed_dials else "")
        style: Style = "bad" if self.exit_code else "good"
        yield Line(f"{result.text} ({result.seconds:.1f} s)", style)


def step_line(step: SwitchStep) -> Line:
    """Return a step as a line."""
    return Line(f"{step.at:7.2f} s  {step.name:<8} {step.text}", _STYLES[step.state])


async def switch(
    request: SwitchRequest,
    tell: Callable[[SwitchStep], None] = lambda _: None,
    client: Client | None = None,
) -> Switched:
    """Switch the mode of the running process of this network namespace.

    Args:
        request: the mode, and how.
        tell: called with each step as soon as it is done.
        client: reaches the process; None for the usual one.

    Raises:
        NotRunningError: no steersman process runs here.
        QuestionError: another switch is under way, or the process ended meanwhile.
    """
    client = client or Client(timeout=_SILENCE)
    lines = client.post("/switch", msgspec.to_builtins(request))
    steps: list[SwitchStep] = []
    while (line := await asyncio.to_thread(next, lines, None)) is not None:
        if "outcome" in line:
            with understood():
                result = msgspec.convert(line, SwitchResult)
            source = f"the running process, in {result.mode} mode"
            return Switched(source=source, result=result, steps=tuple(steps))
        if "error" in line:
            raise QuestionError(str(line["error"]))
        with understood():
            steps.append(msgspec.convert(line, SwitchStep))
        tell(steps[-1])
    raise QuestionError(
        "the process ended during the switch; when it starts again it serves in the configured "
        "mode, and removes what the other one left"
    )
