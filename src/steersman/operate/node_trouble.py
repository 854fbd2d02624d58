"""Nodes as they were last seen, and what is wrong with each of them. Pure.

`/` and `steersman nodes` show the troubles of a node in its row; `/problems` and `steersman
problems` put the same troubles of several nodes together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from steersman.model import codes
from steersman.model.drift import FIGHT_SECONDS, Drift
from steersman.model.findings import printable
from steersman.model.node_state import NodeState
from steersman.operate.answer import age_text
from steersman.operate.remedies import code_of_condition

Health: TypeAlias = Literal[
    "unreachable", "failing", "waiting", "disagrees", "drifted", "late", "findings", "ok"
]
HEALTHS: Final[Mapping[Health, str]] = {
    "unreachable": "cannot be asked",
    "failing": "the last sync failed, or the node is not healthy",
    "waiting": "has not synced yet",
    "disagrees": "serves something else than most nodes",
    "drifted": "another program changed its rules in the last 10 minutes",
    "late": "changes take long, or wait",
    "findings": "objects have errors",
    "ok": "all is well",
}
"""The worst thing about a node, worst first, and its meaning."""
_HEALTH_OF: Final[Mapping[str, Health]] = {
    "Waiting": "waiting",
    "NotSynced": "waiting",
    "Refused": "findings",
    "Errors": "findings",
}
"""The health that a condition means by its reason, if not "failing"."""
_SUMS: Final = frozenset({"Errors", "Refused"})
"""Reasons of conditions that only sum up what Findings and drift say."""
_LATE = 10.0
"""Seconds of lag from which a node counts as late."""

Level: TypeAlias = Literal["error", "warning", "unknown"]
"""How bad something is: traffic fails, some may fail, or it cannot be known."""


class SeenNode(msgspec.Struct, frozen=True, rename="camel"):
    """A node, and its last known state. Times are seconds since 1970 by our own clock."""

    name: str
    address: str
    """Where it is asked, for people."""
    state: NodeState | None = None
    """Its last state; None if it never answered."""
    received: float = 0.0
    """When that state came."""
    heard: float = 0.0
    """When it last sent anything; 0 for never."""
    problem: str = ""
    """Why it cannot be asked now; "" if it can."""
    since: float = 0.0
    """Since when it cannot be asked."""


class Disagreement(msgspec.Struct, frozen=True, rename="camel"):
    """Nodes that serve something else than most nodes."""

    nodes: tuple[str, ...]
    """They serve the same as each other."""
    reference: str
    """A node of the others, that one of them was compared with."""
    services: tuple[str, ...] = ()
    """The first Services that differ."""
    number: int = 0
    """Of all Services that differ."""
    problem: str = ""
    """Why they could not be compared."""


class NodeTrouble(NamedTuple):
    """Something that is wrong with one node as a whole."""

    health: Health
    level: Level
    code: str
    object: str
    """What is wrong: `Node`, `Rules`, `Condition Synced`."""
    text: str
    """In words that are the same on every node with this trouble."""
    details: tuple[str, ...]
    """What differs from node to node: numbers, ages, messages; the most important line first."""
    since: float = 0.0
    """Since when, in seconds since 1970; 0 if that is not known."""
    told: bool = False
    """Whether the Findings or the drift of the node say the same."""

    @property
    def sentence(self) -> str:
        """All of it on one line."""
        return f"{self.object.removeprefix('Condition ')} {self.text}: {self.details[0]}"


def troubles_of(node: SeenNode, now: float) -> Iterator[NodeTrouble]:
    """Yield what is wrong with a node, in no order.

    Args:
        node: as last seen.
        now: seconds since 1970 by our own clock.
    """
    state = node.state
    if node.problem or state is None:
        yield _unreachable(node, now)
    if state is None:
        return
    for each in state.conditions:
        # These follow from the drift, or from another condition.
        follows = each.reason == "Drift" or (each.status, each.reason) == ("Unknown", "SyncFailed")
        if each.status != "True" and not follows:
            yield NodeTrouble(
                _HEALTH_OF.get(each.reason, "failing"),
                "error" if each.status == "False" else "unknown",
                code_of_condition(each),
                f"Condition {each.type}",
                f"is {each.status}: {each.reason}",
                (each.message,),
                each.since,
                each.reason in _SUMS and bool(state.findings or state.drift),
            )
    yield from _rewritten(state)
    if state.lag_p99 is not None and state.lag_p99 >= _LATE:
        details = (f"{state.lag_p99:.0f} s until they are in force (99th percentile)",)
        yield NodeTrouble("late", "warning", codes.NOT_HEALTHY, "Changes", "take long", details)


def _unreachable(node: SeenNode, now: float) -> NodeTrouble:
    """Return the trouble of a node that cannot be asked, or has not answered yet."""
    last = f", last heard of {age_text(now - node.heard)} ago" if node.heard else ""
    details = (f"{node.problem or 'asked just now'}{last}",)
    text = "has not answered yet"
    if not node.problem:
        return NodeTrouble("waiting", "unknown", codes.UNREACHABLE, "Node", text, details)
    text = "cannot be reached" + ("; its last state is shown" if node.state else "")
    return NodeTrouble("unreachable", "error", codes.UNREACHABLE, "Node", text, details, node.since)


def _rewritten(state: NodeState) -> Iterator[NodeTrouble]:
    """Yield that other programs change rules; process IDs and counts are details."""
    fights = next((f for f in state.findings if f.code == codes.REWRITTEN_RULES), None)
    if fights is None and state.drift is None:
        return
    drift = state.drift or Drift(0.0, repaired_at=1.0)
    age = state.now - drift.at
    if fights is None and drift.repaired_at and age > FIGHT_SECONDS:
        return  # it was repaired long ago
    programs = sorted({printable(writer.program) for writer in drift.writers})
    who = " and ".join(programs) or "an unknown program"
    level: Level = "warning"
    if fights is not None and drift.repaired_at:
        text = f"are rewritten again and again by {who}"
        level = "error"
    elif drift.repaired_at:
        text = f"were changed by {who}; they are repaired"
    else:
        text, level = f"were changed by {who}; they are not repaired yet", "error"
    details = []
    if state.drift is not None:
        details = [f"{drift.what}, changed by {drift.who}, {age_text(age)} ago", *drift.examples]
    if fights is not None:
        details.append(fights.reason)
    code = codes.DRIFT if fights is None else codes.REWRITTEN_RULES
    yield NodeTrouble("drifted", level, code, "Rules", text, tuple(details), drift.at)
