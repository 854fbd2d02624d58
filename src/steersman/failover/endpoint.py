"""What the policy of failover remembers of an endpoint, and how much it doubts it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil, log
from typing import Any

from msgspec import Struct, field

from steersman.failover import tuning
from steersman.failover.states import NEVER, Healthy, State, ejection_of
from steersman.model.failover import Backend, Ejection


class Endpoint(Struct, eq=False):
    """A served endpoint: its state, and what outlives a state."""

    backend: Backend
    node: str
    pools: set[Any] = field(default_factory=set)
    """Those that it is a member of; none if it has gone."""
    state: State = Healthy()
    probes: int = 0
    """Its probes that are under way, whatever for."""
    answered_at: float = NEVER
    """When it last answered a probe or a client."""
    probed_at: float = NEVER
    """When it last answered a probe."""
    clients: tuple[str, ...] = ()
    """Up to two addresses whose connections failed since it last answered."""
    silent: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.SILENT_CONNECTS))
    """When connections of clients were silent since it last answered."""
    fruitless: int = 0
    """Series since the last answer that failed, and led to no ejection."""
    cleared_at: float = NEVER
    """When a suspicion last turned out to be wrong."""
    misses: int = 0
    """Probes that had failed then."""
    strikes: int = 0
    """Ejections in a row."""
    returned_at: float = NEVER
    """When the last ejection ended by an answer."""

    @property
    def ejection(self) -> Ejection | None:
        """The ejection that its state has."""
        return ejection_of(self.state)


def probes_needed(
    now: float, endpoint: Endpoint, pools: Iterable[Sequence[Endpoint]], probes: int
) -> int:
    """Return how many probes must fail, so that a living endpoint hardly ever fails all.

    Living endpoints of the same pools fail some, too, if packets are lost or if they have more
    connections than they can accept. If half of those that answered lately did, no number is
    enough, and the result is 0: an ejection would move load to endpoints that have too much.

    Args:
        probes: the number if nothing speaks for more.
    """
    since = now - tuning.DOUBT
    misses = answers = 0
    for members in pools:
        living = [
            each
            for each in members
            if each.answered_at > since and not each.ejection and each is not endpoint
            # One that has failed whole series since may be dead: nobody knows.
            if not each.fruitless
        ]
        cleared = [each.misses for each in living if each.cleared_at > since]
        if len(living) > 1 and 2 * sum(map(bool, cleared)) >= len(living):
            return 0
        misses, answers = misses + sum(cleared), answers + len(cleared)
    count = probes * (2 if endpoint.cleared_at > since else 1)
    if misses:
        count = max(count, ceil(log(tuning.WRONG) / log(misses / (misses + answers))))
    return min(count, max(probes, tuning.MOST_PROBES))
