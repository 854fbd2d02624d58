"""Feature gates: the few of Kubernetes v1.36 that have an effect here.

Clusters often share one list of gates among all components, so all others are accepted, with a
warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple


class Gate(NamedTuple):
    """A feature gate of v1.36."""

    default: bool
    all_of_stage: str = ""
    """The gate that sets all of its stage; "" if none does."""

    @property
    def stage(self) -> str:
        """Its stage as in upstream's metrics."""
        return self.all_of_stage.removeprefix("All").upper() or "DEPRECATED"


GATES: Final[Mapping[str, Gate]] = {
    "AllowServiceExternalIPs": Gate(default=True),
    "ComponentFlagz": Gate(default=True, all_of_stage="AllBeta"),
    "ComponentStatusz": Gate(default=True, all_of_stage="AllBeta"),
    "LoggingAlphaOptions": Gate(default=False, all_of_stage="AllAlpha"),
}


def enabled(gates: Mapping[str, bool], name: str) -> bool:
    """Return whether a feature is on: by its gate, by that of its stage, or by default."""
    gate = GATES[name]
    return gates.get(name, gates.get(gate.all_of_stage, gate.default))


def gate_warnings(gates: Mapping[str, bool]) -> Iterator[str]:
    """Yield a sentence for each gate without effect, sorted."""
    for name in sorted(gates):
        if name not in GATES and name not in ("AllAlpha", "AllBeta"):
            yield f"feature gate {name} has no effect here{suggest(name, GATES)}"


def suggest(word: str, choices: Mapping[str, object]) -> str:
    """Return ` (did you mean X?)` if a choice is close to the word, else ""."""
    import difflib  # noqa: PLC0415 - 150 kB, for mistakes only

    close = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
