"""Runs commands on nodes, and remembers what it found for the page of all problems."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from steersman.model.command_run import RunLine, RunRequest
from steersman.operate.answer import Answer, QuestionError
from steersman.operate.client import understood
from steersman.operate.doctor.check import Diagnosis
from steersman.operate.doctor.result import CheckResult
from steersman.operate.problems import LEVELS, DoctorResult
from steersman.ui.fleet import Fleet
from steersman.ui.sampling import keep

AnswerT = TypeVar("AnswerT", bound=Answer)

_REMEMBERED = 100
"""Runs; what an older one found may be wrong by now."""
_SECONDS = 3600.0
_MOST_RESULTS, _MOST_LINES, _LONGEST = 40, 12, 500
"""Results of a run, lines of evidence of a result, and their characters."""


class DoctorRuns:
    """The last run of each question on each node. Bounded, and forgotten after an hour."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        """Start without runs.

        Args:
            wall: seconds since 1970.
        """
        self._wall = wall
        self._runs: OrderedDict[tuple[str, str], tuple[float, tuple[DoctorResult, ...]]]
        self._runs = OrderedDict()

    def note(self, node: str, question: str, diagnosis: Diagnosis) -> None:
        """Remember a run, in place of an earlier one of the same question.

        Args:
            node: where it ran.
            question: what was asked, such as `shop/web`; "" for the node.
            diagnosis: the answer.
        """
        now = self._wall()
        bad = [each for each in diagnosis.results if each.verdict.value in LEVELS]
        results = tuple(
            DoctorResult(node, question, now, _bounded(each)) for each in bad[:_MOST_RESULTS]
        )
        keep(self._runs, (node, question), (now, results), _REMEMBERED)

    @property
    def results(self) -> tuple[DoctorResult, ...]:
        """What was found and may still be so."""
        since = self._wall() - _SECONDS
        return tuple(each for at, found in self._runs.values() if at > since for each in found)

    def __len__(self) -> int:
        since = self._wall() - _SECONDS
        return sum(at > since for at, _ in self._runs.values())


def _bounded(result: CheckResult) -> CheckResult:
    """Return a result with as much evidence as is kept."""
    evidence = tuple(line[:_LONGEST] for line in result.evidence[:_MOST_LINES])
    return msgspec.structs.replace(result, evidence=evidence)


async def run_on(
    fleet: Fleet, node: str, command: str, words: Sequence[str], made: type[AnswerT]
) -> AnswerT:
    """Run a command on a node, and return its answer, of the given class.

    Raises:
        QuestionError: it cannot be run; the message says why.
    """
    last = RunLine()
    request = msgspec.to_builtins(RunRequest(command, tuple(words)))
    async for line in fleet.post(node, "/run", request):
        with understood(f"node {node}"):
            last = msgspec.convert(line, RunLine)
    if last.answer is None:
        raise QuestionError(last.error or f"node {node} ended without an answer")
    with understood(f"node {node}"):
        return msgspec.convert(last.answer, made)
