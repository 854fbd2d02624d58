"""`steersman top` as an answer, and what its screen asks the running process for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import msgspec

from steersman.model.plan import FrontendKind
from steersman.model.top import TopSample
from steersman.operate.answer import Answer, Block, Line, Table
from steersman.operate.client import Client, understood
from steersman.operate.load import world_of_process
from steersman.operate.status import last_sync
from steersman.operate.top_model import COLUMNS, Question, duration, summary
from steersman.run.process.canary import Target, dial

COPIED = ("mode", "node", "services", "servicePorts", "findings", "findingCounts")
"""Fields of the state that a sample also has itself."""
_APART = 1.0  # seconds between two questions, until connections were counted twice
_PATIENCE = 30.0  # seconds for that; the process counts less often where it takes long


class Top(Answer, frozen=True, kw_only=True):
    """One screen of `steersman top`."""

    sample: TopSample

    @property
    def data(self) -> Any:
        """The answer as JSON types, with the state of the process also by its earlier names."""
        data, state = msgspec.to_builtins(self), self.sample.status
        sample, fields = data["sample"], data["sample"]["status"]
        fields["synced"] = last_sync(state)
        sample |= {name: fields[name] for name in COPIED}
        sample["drift"], drift = state.repairs, state.drift
        sample["lastDrift"] = f"{drift.what}, by {drift.who}" if drift else ""
        sample["lastDriftAt"] = drift.at if drift else 0.0
        return data

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


async def dial_service(service: str, client: Client | None = None) -> str:
    """Connect to a Service once from this network namespace; return what happened as a sentence.

    Args:
        service: NAMESPACE/NAME.
        client: reaches the running process.
    """
    world = await world_of_process(client)
    for key, plan in world.plan.services.items():
        if str(key.name.object_name) != service or key.name.protocol != "TCP":
            continue
        for frontend in plan.frontends:
            if frontend.kind is FrontendKind.CLUSTER_IP:
                target = Target(str(key), frontend.address, frontend.port)
                began = time.perf_counter()
                wrong = await dial(target)
                took = duration(time.perf_counter() - began)
                return f"{target}: {wrong or 'connected'} after {took}, from this machine"
    return f"{service} has no cluster IP with a TCP port to connect to"
