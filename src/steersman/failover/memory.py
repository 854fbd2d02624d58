"""What the policy of failover remembers of an endpoint, and how much it doubts it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil, log
from typing import Any

import msgspec

from steersman.model.failover import MOST_SILENT_CONNECTS, Ejection, Settings


class Series(msgspec.Struct):
    """The probes that confirm or clear a suspicion."""

    began: float
    ends: float
    """When probes that have not answered count as failed."""
    count: int
    """Number of its probes."""
    left: int
    """Probes that have not started."""
    next_at: float
    refusals: int = 0


class Known(msgspec.Struct):
    """An endpoint that was observed, or is served, and all that is remembered of it."""

    node: str
    pools: set[Any]
    series: Series | None = None
    waits: bool = False
    """Whether it waits for its series to begin."""
    fruitless: int = 0
    """Series since the last answer that failed, and led to no ejection."""
    suspected_at: float = float("-inf")
    """When its last series began."""
    ejection: Ejection | None = None
    returning: bool = False
    """Whether a probe for its return is under way."""
    by_check: bool = False
    """Whether a check ejected it, so that a check ends this."""
    pending: int = 0
    """Other probes that are under way."""
    answered_at: float = float("-inf")
    """When it last answered a probe or a client."""
    probed_at: float = float("-inf")
    """When it last answered a probe."""
    clients: tuple[str, ...] = ()
    """Up to two addresses whose connections failed since it last answered."""
    cleared_at: float = float("-inf")
    """When a suspicion last turned out to be wrong."""
    misses: int = 0
    """Probes that had failed then."""
    tried_at: float = float("-inf")
    """When its last series ended."""
    silent: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=MOST_SILENT_CONNECTS))
    strikes: int = 0
    returned_at: float = float("-inf")


_WRONG = 1e-6
"""Probability with which a living endpoint may fail all probes of a series."""


def probes_needed(
    now: float, found: Known, pools: Iterable[Sequence[Known]], settings: Settings
) -> int:
    """Return how many probes must fail, so that a living endpoint hardly ever fails all.

    Living endpoints of the same pools fail some, too, if packets are lost or if they have more
    connections than they can accept. If half of those that answered lately did, no number is
    enough, and the result is 0: an ejection would move load to endpoints that have too much.

    Args:
        now: the time.
        found: the endpoint.
        pools: the members of its pools.
        settings: parameters of the policy.
    """
    since = now - settings.doubt
    misses = answers = 0
    for members in pools:
        living = [
            each
            for each in members
            if each.answered_at > since and not each.ejection and each is not found
            # One that has failed whole series since may be dead: nobody knows.
            if not each.fruitless
        ]
        cleared = [each.misses for each in living if each.cleared_at > since]
        if len(living) > 1 and 2 * sum(map(bool, cleared)) >= len(living):
            return 0
        misses, answers = misses + sum(cleared), answers + len(cleared)
    count = settings.probes * (2 if found.cleared_at > since else 1)
    if misses:
        count = max(count, ceil(log(_WRONG) / log(misses / (misses + answers))))
    return min(count, max(settings.probes, settings.most_probes))
