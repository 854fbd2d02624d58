"""What differs in the kernel from what the running process wrote, and who changed it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec

from steersman.model.drift import Drift, DriftState
from steersman.operate.answer import Answer, Block, Line, Table
from steersman.operate.client import Client, understood


class DriftAnswer(Answer, frozen=True, kw_only=True):
    """The drift of a running process."""

    state: DriftState

    @property
    def exit_code(self) -> int:
        """1 if something differs now, or keeps being changed."""
        return int(self.state.differs is not None or bool(self.state.fight))

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield what differs now, then the repairs."""
        state = self.state
        if state.differs is None:
            text = f"the kernel has all {state.objects} objects as the process wrote them"
            yield Line(text, "good")
        else:
            yield Line(f"{state.differs.what} differ from what the process wrote", "bad")
            yield from _lines(state.differs)
            yield Line("the next comparison repairs them", "dim")
        if state.fight:
            yield Line(state.fight, "bad")
        since = _clock(state.started, state.at)
        if not state.repairs:
            yield Line(f"no change by another program was found since {since}")
            return
        rows = [
            (
                _clock(each.at, state.at),
                each.what,
                each.who,
                f"{each.repaired_at - each.at:.3f} s",
            )
            for each in reversed(state.repairs)
        ]
        shown = "" if state.repaired == len(rows) else f", the last {len(rows)} of them"
        title = f"{state.repaired} repairs since {since}{shown}"
        yield Table(("FOUND", "WHAT", "CHANGED BY", "REPAIRED AFTER"), rows, title)
        if wide:
            for each in reversed(state.repairs):
                yield Line(f"repair of {_clock(each.at, state.at)}", "title")
                yield from _lines(each)


def _lines(drift: Drift) -> Iterator[Line]:
    for line in drift.examples:
        yield Line(line, indent=2)
    if (more := drift.objects - len(drift.examples)) > 0:
        yield Line(f"and {more} more objects; --lines shows more", "dim", indent=2)


def _clock(at: float, now: float) -> str:
    """Return a time of day of this machine, with the date if it is not today's."""
    when, today = time.localtime(at), time.localtime(now)
    day = "%Y-%m-%d " if when[:3] != today[:3] else ""
    return time.strftime(f"{day}%H:%M:%S", when)


async def find_drift(client: Client | None = None, *, lines: int = 10) -> DriftAnswer:
    """Let the running process compare the kernel with what it wrote.

    Args:
        client: asks the process.
        lines: lines of the kernel's objects that the answer has at most.

    Raises:
        NotRunningError: no steersman process runs in this network namespace.
        QuestionError: it does not answer, or the kernel cannot be read now.
    """
    data = await asyncio.to_thread((client or Client()).get, f"/drift?lines={lines}")
    with understood():
        state = msgspec.json.decode(data, type=DriftState)
    return DriftAnswer(source=f"the running process ({state.mode} mode)", state=state)
