"""Another mode where the one that was asked for cannot run here; always said, never silent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from steersman.model.findings import Finding, Severity
from steersman.modes.base import Mode, Support
from steersman.modes.specs import spec_of
from steersman.run.events import Recorder
from steersman.run.metrics import Metrics
from steersman.source.store import Store

log = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """The mode that runs."""

    mode: Mode
    wanted: str
    """The mode that was asked for."""
    missing: tuple[str, ...] = ()
    """What stands in its way, a sentence each; () where it runs."""

    @property
    def sentence(self) -> str:
        """What happened, for people."""
        why = " ".join(self.missing)
        return f"mode {self.wanted} cannot run here; {self.mode.name} serves instead. {why}"


async def choose(wanted: Mode, make: Callable[[str], Mode], *, strict: bool) -> Chosen | Support:
    """Return the mode to run: the wanted one, or what stands in for it.

    Args:
        wanted: the mode that was asked for.
        make: builds a mode by its name.
        strict: nothing may stand in.

    Returns:
        The mode, or what is missing where none can run.
    """
    support = await wanted.probe()
    if support.usable:
        for sentence in support.missing:
            log.warning("%s", sentence)
        return Chosen(wanted, wanted.name)
    name = spec_of(wanted.name).fallback
    if strict or not name:
        return support
    other = make(name)
    second = await other.probe()
    if not second.usable:
        return Support(usable=False, missing=(*support.missing, *second.missing))
    return Chosen(other, wanted.name, support.missing)


def tell(chosen: Chosen, recorder: Recorder, store: Store, metrics: Metrics) -> None:
    """Say that another mode serves: a Warning Event, a Finding and a metric; nothing otherwise."""
    if not chosen.missing:
        return
    recorder.node("Warning", "ModeFallback", "StartKubeProxy", chosen.sentence)
    store.report("mode", (Finding("the node", "mode", chosen.sentence, Severity.ERROR),))
    metrics.mode_fallback(chosen.wanted, chosen.mode.name).set(1)
