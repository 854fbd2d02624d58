"""Tell everyone about drift: the log, metrics, an Event about the node, and a Finding.

The Finding stays as long as drift is not repaired, or keeps coming back: two programs that rewrite
the rules of each other. All of it is bounded, however fast the other program is.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from steersman.model import codes
from steersman.model.drift import Drift, fight
from steersman.model.findings import Finding, Severity
from steersman.run.observe.events import Recorder
from steersman.run.observe.metrics import Metrics
from steersman.run.sync.state import SyncReport
from steersman.source.store import Store

log = logging.getLogger(__name__)

_REMEMBERED = 32
_QUIET = 60.0
"""Seconds between two log lines, and two texts of the Finding, while another program goes on."""


class DriftLog:
    """What other programs changed, and what was done about it."""

    def __init__(
        self,
        store: Store,
        recorder: Recorder,
        metrics: Metrics,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._metrics = metrics
        self._wall = wall
        self.repairs: deque[Drift] = deque(maxlen=_REMEMBERED)
        """What was repaired, oldest first."""
        self.repaired = 0
        """How often drift was repaired."""
        self.not_repaired: Drift | None = None
        """What the last sync found and could not repair."""
        self._unlogged = 0
        self._logged_at = float("-inf")
        self._found_at = float("-inf")

    def observe(self, report: SyncReport) -> None:
        """Take the drift that a successful sync repaired, if there was any."""
        self.not_repaired = None
        self._metrics.drift_pending_since().set(0)
        if (drift := report.drift) is not None:
            self.repairs.append(drift)
            self.repaired += 1
            metrics = self._metrics
            metrics.drift_repairs().inc()
            metrics.drift_objects().inc(drift.objects)
            self._tell(drift, "repaired")
        self._report()

    def unrepaired(self, drift: Drift) -> None:
        """Take the drift that a failed sync found; it is retried."""
        self._metrics.drift_pending_since().set(drift.at)
        if self.not_repaired != drift:
            self.not_repaired = drift
            self._tell(drift, "not repaired yet, retrying")
        self._report()

    @property
    def summary(self) -> tuple[int, Drift | None]:
        """The number of repairs so far, and the last drift, be it repaired or not."""
        return self.repaired, self.not_repaired or next(reversed(self.repairs), None)

    def _tell(self, drift: Drift, outcome: str) -> None:
        self._metrics.drift_last().set(drift.at)
        # The text of an Event has no number, so that the recorder drops repetitions.
        programs = sorted({writer.program for writer in drift.writers})
        who = ", ".join(programs) or "an unknown program"
        note = f"rules of Services were changed by {who}: {outcome} [{codes.DRIFT}]"
        self._recorder.node("Warning", "RulesChangedByOthers", "CompareRules", note)
        if drift.at - self._logged_at < _QUIET:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} more such changes were not logged" if self._unlogged else ""
        self._unlogged, self._logged_at = 0, drift.at
        example = f", such as {drift.examples[0]}" if drift.examples else ""
        text = "drift: %s%s, changed by %s: %s%s"
        log.warning(text, drift.what, example, drift.who, outcome, more)

    def _report(self) -> None:
        now = self._wall()
        if (drift := self.not_repaired) is not None:
            text = f"{drift.what}, changed by {drift.who}; they are not repaired yet, see the log"
            error = Finding("the node", "rules", text, Severity.ERROR, codes.REWRITTEN_RULES)
            self._store.report("drift", (error,))
            return
        text = fight(self.repairs, now)
        if text and now - self._found_at < _QUIET:
            return  # the numbers in the text change all the time
        self._found_at = now if text else float("-inf")
        found = (Finding("the node", "rules", text, code=codes.REWRITTEN_RULES),) if text else ()
        self._store.report("drift", found)
