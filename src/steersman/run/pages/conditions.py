"""The conditions of the running process, as those of a Kubernetes object. Pure.

Synced            the first sync reached the kernel, and the last one did not fail
SourceConnected   the API server (or the manifests) is read
KernelMatches     the kernel has what the plan says, as of the last sync or comparison
NoFindings        no object has an error; warnings are no error
Healthy           no change waits for longer than health allows: the answer of `/healthz`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from steersman.model.findings import Severity, clipped, printable
from steersman.model.node_state import Condition, NodeState

_LONGEST = 300  # characters of an error in a message


class ConditionLog:
    """The conditions as of the last call of `update`, and since when each has its status."""

    def __init__(self, started: float) -> None:
        self._now: dict[str, Condition] = {}
        self._started = started

    def update(self, state: NodeState) -> tuple[Condition, ...]:
        """Judge the process now, and return the conditions."""
        for each in judge(state):
            before = self._now.get(each.type)
            since = state.now if before else self._started
            if before and before.status == each.status:
                since = before.since
            self._now[each.type] = replace(each, since=since)
        return tuple(self._now.values())


def judge(state: NodeState) -> Iterator[Condition]:  # noqa: PLR0912 - branches for each condition
    """Yield every condition of a process."""
    failure = clipped(printable(state.failure), _LONGEST)
    # Synced
    if state.waiting:
        yield Condition("Synced", "False", "Waiting", f"waiting for {state.waiting}")
    elif failure:
        yield Condition("Synced", "False", "SyncFailed", f"{failure}; it is tried again")
    else:
        pending = "changes wait for the next sync" if state.owes else "all changes are in force"
        yield Condition("Synced", "True", "UpToDate", pending)
    # SourceConnected
    source = state.source
    if source.kind == "manifests":
        yield Condition("SourceConnected", "True", "Manifests", "manifests are watched")
    elif source.connected:
        yield Condition("SourceConnected", "True", "Connected", source.server)
    else:
        errors = ", ".join(f"{count} {why}" for why, count in sorted(source.errors.items()))
        message = f"{source.server} is not reached" + (f" (so far: {errors})" if errors else "")
        yield Condition("SourceConnected", "False", "NotConnected", message)
    # KernelMatches
    if not state.synced_at:
        message = "no sync has reached the kernel yet"
        yield Condition("KernelMatches", "Unknown", "NotSynced", message)
    elif state.refused:
        number = state.refused
        message = f"the kernel refuses the rules of {number} owner{'s' * (number != 1)}"
        yield Condition("KernelMatches", "False", "Refused", f"{message}; see the Findings")
    elif (drift := state.drift) is not None and not drift.repaired_at:
        message = f"other programs changed it: {drift.what}, by {drift.who}"
        yield Condition("KernelMatches", "False", "Drift", message)
    elif failure:
        yield Condition("KernelMatches", "Unknown", "SyncFailed", "parts may be missing")
    else:
        message = f"{state.objects} kernel objects are in force"
        yield Condition("KernelMatches", "True", "Matches", message)
    # NoFindings
    counts = state.finding_counts
    message = count_words(counts)
    if state.findings:
        message += f", such as: {clipped(printable(str(state.findings[0])), _LONGEST)}"
    if counts.get(Severity.ERROR):
        yield Condition("NoFindings", "False", "Errors", message)
    else:
        reason = "Warnings" if counts.get(Severity.WARNING) else "NoFindings"
        yield Condition("NoFindings", "True", reason, message)
    # Healthy
    if state.healthy:
        yield Condition("Healthy", "True", "InTime", "no change waits for too long")
    else:
        message = "a change waits for longer than twice the sync period"
        yield Condition("Healthy", "False", "Late", message)


def count_words(counts: Mapping[Severity, int]) -> str:
    """Return numbers of Findings in words: `2 errors, 1 warning`."""
    kinds = (Severity.ERROR, Severity.WARNING)
    parts = [f"{n} {kind}{'s' * (n != 1)}" for kind in kinds if (n := counts.get(kind, 0))]
    return ", ".join(parts) or "no Findings"


def trouble_words(state: NodeState) -> str:
    """Count the Services that clients cannot use here, in words; "" if there are none."""
    number, errors = sum(state.trouble_counts.values()), state.trouble_counts.get(Severity.ERROR, 0)
    if not number:
        return ""
    return f"{number} Service{'s' * (number != 1)}, {errors} without any endpoint"
