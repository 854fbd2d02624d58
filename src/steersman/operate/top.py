"""`steersman top` as an answer, and what its screen asks the running process for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from urllib.parse import urlencode

import msgspec

from steersman.model.top import TopSample
from steersman.operate.answer import Answer, Block, Line, Table
from steersman.operate.client import Client, understood
from steersman.operate.top_model import COLUMNS, Question, summary

_APART = 1.0  # seconds between two questions, until connections were counted twice
_PATIENCE = 30.0  # seconds for that; the process counts less often where it takes long


class Top(Answer, frozen=True, kw_only=True):
    """One screen of `steersman top`."""

    sample: TopSample

    def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002 - every column fits
        """Yield the summary and the table."""
        for line in summary(self.sample, time.time()):
            yield Line("".join(text for text, _ in line).rstrip())
        titles = ("SERVICE", *(column.title for column in COLUMNS))
        rows = [(row.name, *(column.text(row) for column in COLUMNS)) for row in self.sample.rows]
        yield Table(titles, rows, empty="no Services")
        if (more := self.sample.matching - len(rows)) > 0:
            yield Line(f"{more} more", "dim")


async def ask(question: Question, client: Client | None = None) -> TopSample:
    """Ask the running process of this network namespace for a sample.

    Raises:
        NotRunningError: no steersman process runs here.
        QuestionError: it does not answer.
    """
    path = f"/top?{urlencode(question._asdict())}"
    data = await asyncio.to_thread((client or Client()).get, path)
    with understood():
        return msgspec.msgpack.decode(data, type=TopSample)


async def top_once(question: Question, client: Client | None = None) -> Top:
    """Return one screen, with rates over a second or more; raises as `ask`."""
    longest = time.monotonic() + _PATIENCE
    sample = await ask(question, client)
    while sample.counted and not (sample.interval or sample.problem):
        if time.monotonic() > longest:
            break
        await asyncio.sleep(_APART)
        sample = await ask(question, client)
    source = f"the running process (pid {sample.status.pid}, {sample.status.mode} mode)"
    return Top(source=source, sample=sample)
