"""The states of an endpoint, what each knows, and which one may follow which.

    Healthy --a client fails--> Waiting --a place is free--> Suspect --its probes fail--> Ejected
       ^                                        (an answer: Healthy)                     |     ^
       |                                                            after the hold, a probe    |
       |                                                                                 v     |
       +--------------------------------it answers--------------------------------- Returning -+

Beside this circle there are three states. Presumed: clients show that it is down, so it is ejected
while its probes go on. FailedCheck: a check ejected it, so only a check ends this. NodeDead: an
endpoint of UDP on a node that seems to be dead; it follows the others of its node.

Rule 1: a state is a value that has all that is known of it, so what belongs to two states at a time
cannot be written down. What outlives a state is in endpoint.py.
Rule 2: `Policy._enter` makes every change of state, and `TRANSITIONS` has all that may happen.
Rule 3: every state is left without help of others. A state that waits for probes owns them: it ends
when all have been reported, or some time after they should have been (tuning.PATIENCE). A lost
probe proves nothing: the endpoint is as healthy, or as ejected, as before. A state that waits for
time says when (`due_of`); a place becomes free as Suspect ends; checks go on for ever; and NodeDead
ends with the last TCP endpoint of the node that is down, however that ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from msgspec import Struct

from steersman.model.failover import Ejection

NEVER: Final = float("-inf")


class Series(Struct, frozen=True):
    """The probes that confirm or clear a suspicion."""

    began: float
    ends: float
    """When probes that have not answered count as failed."""
    count: int
    """Number of its probes."""
    left: int
    """Probes that have not started."""
    due: float
    """When the next probe starts; after the last one, when the series ends."""
    refusals: int = 0


class Healthy(Struct, frozen=True):
    """It gets connections, and nothing speaks against that."""

    tried_at: float = NEVER
    """When its last series ended; it has a rest before the next one."""


class Waiting(Struct, frozen=True):
    """It is suspect, and waits for its probes to begin."""


class Suspect(Struct, frozen=True):
    """It is being confirmed by probes, and gets connections meanwhile."""

    series: Series


class Presumed(Struct, frozen=True):
    """The same, but clients have shown so much that it is ejected already."""

    series: Series
    ejection: Ejection


class Ejected(Struct, frozen=True):
    """It gets no connections, until it answers a probe after the hold."""

    ejection: Ejection
    suspected_at: float
    """When the series began that ejected it."""
    due: float
    """When it is probed next."""


class Returning(Struct, frozen=True):
    """It is ejected, and the probe for its return is under way."""

    ejection: Ejection
    suspected_at: float
    due: float
    """When the probe counts as lost."""


class FailedCheck(Struct, frozen=True):
    """Its checks fail."""

    ejection: Ejection


class NodeDead(Struct, frozen=True):
    """An endpoint of UDP whose node seems to be dead."""

    ejection: Ejection


State: TypeAlias = (
    Healthy | Waiting | Suspect | Presumed | Ejected | Returning | FailedCheck | NodeDead
)

TRANSITIONS: Final[Mapping[type[State], frozenset[type[State]]]] = {
    Healthy: frozenset(
        {
            Waiting,  # a client's connection failed, or an endpoint of its node is down
            FailedCheck,
            NodeDead,
        }
    ),
    Waiting: frozenset(
        {
            Suspect,  # a place is free
            Healthy,  # it answered; or, here and below, Kubernetes says something new about it
            FailedCheck,
            NodeDead,
        }
    ),
    Suspect: frozenset(
        {
            Suspect,  # the next probe, or a refusal
            Presumed,  # clients, and a probe, show that it is down
            Ejected,  # all probes failed, while others answered
            Healthy,  # it answered; or all probes failed, and so may the others; or one was lost
            FailedCheck,
            NodeDead,
        }
    ),
    Presumed: frozenset(
        {
            Presumed,  # the next probe, or a refusal
            Ejected,  # confirmed; or not confirmed and not cleared
            Healthy,  # it answered
        }
    ),
    Ejected: frozenset(
        {
            Returning,  # the hold is over
            Waiting,  # see Policy._reconsider
            Healthy,  # a client is answered, and probes had not confirmed the ejection
            NodeDead,
        }
    ),
    Returning: frozenset(
        {
            Ejected,  # the probe failed, or was lost
            Healthy,  # it answered
            Waiting,  # see Policy._reconsider
            NodeDead,
        }
    ),
    FailedCheck: frozenset(
        {
            Healthy,  # its checks pass, and the hold is over
            Waiting,  # see Policy._reconsider
        }
    ),
    NodeDead: frozenset(
        {
            Healthy,  # an endpoint of the node answers, or none of it is down any more
        }
    ),
}


def ejection_of(state: State) -> Ejection | None:
    """Return the ejection that is part of a state."""
    match state:
        case Healthy() | Waiting() | Suspect():
            return None
        case _:
            return state.ejection


def suspected_at(state: State) -> float:
    """Return when the suspicion began that led to an ejection; NEVER if none did."""
    match state:
        case Ejected() | Returning():
            return state.suspected_at
        case Suspect() | Presumed():
            return state.series.began
        case _:
            return NEVER


def due_of(state: State) -> float | None:
    """Return when time changes a state, or something in it."""
    match state:
        case Suspect() | Presumed():
            return state.series.due
        case Ejected() | Returning():
            return state.due
        case _:
            return None
