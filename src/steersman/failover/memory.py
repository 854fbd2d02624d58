"""What the policy of failover remembers of an endpoint."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from steersman.model.failover import MOST_SILENT_CONNECTS, Ejection


class Series(msgspec.Struct):
    """The probes that confirm or clear a suspicion."""

    began: float
    ends: float
    """When probes that have not answered count as failed."""
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
    pending: int = 0
    """Other probes that are under way."""
    answered_at: float = float("-inf")
    """When it last answered a probe or a client."""
    answers_probes: bool = False
    clients: tuple[str, ...] = ()
    """Up to two addresses whose connections failed since it last answered."""
    cleared_at: float = float("-inf")
    """When a suspicion last turned out to be wrong."""
    tried_at: float = float("-inf")
    """When its last series ended."""
    silent: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=MOST_SILENT_CONNECTS))
    strikes: int = 0
    returned_at: float = float("-inf")
