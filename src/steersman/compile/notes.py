"""What several readers of Kubernetes objects share: collecting Findings, numbers, protocols."""

from __future__ import annotations

from collections.abc import Mapping

from steersman.model.kube import ObjectMeta
from steersman.model.names import Protocol
from steersman.model.plan import Finding, Severity

MAX_PORT = 65535
PROTOCOLS: Mapping[str | None, Protocol] = {
    None: Protocol.TCP,
    "": Protocol.TCP,
    **{protocol.value: protocol for protocol in Protocol},
}
"""By their spelling in objects; TCP where absent."""


class Notes:
    """Collects Findings about one object while it is read, in order and each once."""

    __slots__ = ("_findings", "_kind", "_meta")

    def __init__(self, kind: str, meta: ObjectMeta | None = None) -> None:
        self._kind = kind
        self._meta = meta
        self._findings: dict[Finding, None] = {}

    def add(self, field: str, reason: str, severity: Severity = Severity.WARNING) -> None:
        """Note what is wrong with a field, and what to do about it."""
        name = f"{self._kind} {self._meta.object_name}" if self._meta else self._kind
        self._findings[Finding(name, field, reason, severity)] = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was noted."""
        return tuple(self._findings)


def port_number(field: str, number: int, notes: Notes) -> int:
    """Return a port number, 0 where it is none."""
    if 0 <= number <= MAX_PORT:
        return number
    notes.add(field, f"{number} must be 1 to {MAX_PORT}; ignored")
    return 0
