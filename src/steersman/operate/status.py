"""Answer `steersman status`: the state of the running process; wait until all is well."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from steersman.model.findings import Finding, Severity, printable
from steersman.model.node_state import Condition, NodeState
from steersman.operate.answer import (
    Answer,
    Block,
    Cell,
    Line,
    QuestionError,
    Style,
    Table,
    age_text,
    known_time,
)
from steersman.operate.client import Client, NotRunningError
from steersman.operate.process_lines import process_lines
from steersman.run.process.instance import Holder, running

_PATIENCE = 5.0  # seconds for an answer, which takes milliseconds
_PAUSE = 0.5  # seconds between two questions while waiting
_MOST_FINDINGS = 12
"""Findings on the screen."""
PRINTED = (
    *("node", "mode", "variant", "version", "pid", "revision", "owes", "healthy", "waiting"),
    *("failure", "services", "endpointSlices", "servicePorts", "objects", "findings"),
    *("troubled", "troubleCounts"),
)
"""Fields of the state that are printed as they are."""
_STYLES: dict[str, Style] = {"True": "good", "False": "bad", "Unknown": "warn"}


class Status(Answer, frozen=True, kw_only=True, rename="camel"):
    """The state of the running process of this node."""

    conditions: tuple[Condition, ...]
    state: NodeState | None = None
    """As the process describes itself; None if it cannot be reached."""
    now: float
    """When it was asked, in seconds since 1970."""

    @property
    def exit_code(self) -> int:
        """0 if every condition is True."""
        return int(any(condition.status != "True" for condition in self.conditions))

    @property
    def data(self) -> Any:
        """The answer as JSON types, times in RFC 3339."""
        conditions = [
            {**msgspec.to_builtins(each), "since": known_time(each.since)}
            for each in self.conditions
        ]
        out: dict[str, Any] = {"source": self.source, "conditions": conditions}
        if (state := self.state) is not None:
            fields = msgspec.to_builtins(state)
            out |= {name: fields[name] for name in PRINTED}
            listed = Counter(finding.severity for finding in state.findings)
            out["unlisted"] = msgspec.to_builtins(Counter(state.finding_counts) - listed)
            # Absolute times: with --watch, only a change is printed.
            connection = out["connection"] = fields["source"]
            quiet = connection.pop("quietSeconds")
            connection["lastEvent"] = known_time(0.0 if quiet is None else state.now - quiet)
            out["started"] = known_time(state.started)
            out["synced"] = None
            if state.synced_at:
                out["synced"] = {
                    "at": known_time(state.synced_at),
                    "reason": state.sync_reason,
                    "phases": dict(state.phases),
                    "refused": state.refused,
                }
        return out

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield a summary, the conditions, and the first problems of objects (all if `wide`)."""
        if self.state is not None:
            yield from process_lines(self.state, self.state.now)
        rows: list[list[Cell]] = [
            [
                each.type,
                (each.status, _STYLES[each.status]),
                age_text(self.now - each.since) if each.since else "-",
                *([each.reason] if wide else []),
                each.message,
            ]
            for each in self.conditions
        ]
        columns = ["CONDITION", "STATUS", "SINCE", *(["REASON"] if wide else []), "MESSAGE"]
        yield Table(columns, rows)
        findings: tuple[Finding, ...] = ()
        if self.state is not None:
            findings = (*self.state.findings, *self.state.troubled)
        shown = findings if wide else findings[:_MOST_FINDINGS]
        for each in shown:
            style: Style = "bad" if each.severity is Severity.ERROR else "warn"
            yield Line(f"{each.severity}: {printable(str(each))}", style, hang=2)
        if more := len(findings) - len(shown):
            yield Line(f"and {more} more; see steersman status -o wide")


async def ask_status(
    client: Client | None = None, holder: Callable[[], Holder | None] = running
) -> Status:
    """Ask the running process of this network namespace how it is.

    Args:
        client: asks it.
        holder: returns who holds the lock of this node, if anyone.

    Returns:
        Its status; if it cannot be reached, one whose condition Running says why.
    """
    now = time.time()
    try:
        data = await asyncio.to_thread((client or Client(timeout=_PATIENCE)).get, "/status")
        state = msgspec.json.decode(data, type=NodeState)
    except (QuestionError, msgspec.DecodeError) as error:
        # The lock is a table of the kernel: it tells also of a process that is stopped or hangs.
        found = await asyncio.to_thread(holder)
        if found is not None:
            message = f"an instance runs ({found}), but cannot be asked: {error}"
            condition = Condition("Running", "Unknown", "Unreachable", message, found.since)
        elif isinstance(error, NotRunningError):
            message = "no steersman runs in this network namespace"
            condition = Condition("Running", "False", "NotRunning", message)
        else:
            condition = Condition("Running", "Unknown", "Unreachable", str(error))
        return Status(conditions=(condition,), now=now)
    source = f"the running process (pid {state.pid}, {state.mode} mode)"
    alive = Condition("Running", "True", "Answers", "the process answers", state.started)
    return Status(source=source, conditions=(alive, *state.conditions), state=state, now=state.now)


async def wait_for_status(
    seconds: float,
    ask: Callable[[], Awaitable[Status]] = ask_status,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Status:
    """Ask until every condition is True, and return the last status.

    Args:
        seconds: how long to wait; 0 for ever.
        ask: asks once.
        sleep: waits between two questions.
        clock: seconds that only go forward.
    """
    end = clock() + seconds
    while (status := await ask()).exit_code and (not seconds or clock() < end):
        await sleep(_PAUSE)
    return status
