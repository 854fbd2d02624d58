"""The object that a Finding is about, and the codes of conditions (model/codes.py)."""

from __future__ import annotations

import re
from typing import NamedTuple

from steersman.model import codes
from steersman.model.findings import Finding
from steersman.model.node_state import Condition

_OBJECT = re.compile(r"(Service|EndpointSlice|Endpoints) ([^/\s]+)/(\S+)")
_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_CONDITIONS = {
    ("Synced", "Waiting"): codes.WAITING,
    ("Synced", "SyncFailed"): codes.SYNC_FAILED,
    ("KernelMatches", "Refused"): codes.SYNC_FAILED,
    ("KernelMatches", "Drift"): codes.SYNC_FAILED,
    ("KernelMatches", "SyncFailed"): codes.SYNC_FAILED,
    ("KernelMatches", "NotSynced"): codes.SYNC_FAILED,
    ("SourceConnected", "NotConnected"): codes.NOT_CONNECTED,
    ("Healthy", "Late"): codes.NOT_HEALTHY,
}
"""Codes of conditions that are not True, by type and reason."""


class About(NamedTuple):
    """The Kubernetes object that a Finding is about."""

    kind: str
    namespace: str
    name: str

    @property
    def service(self) -> str:
        """The Service as `namespace/name`; "" if it is another object."""
        return f"{self.namespace}/{self.name}" if self.kind == "Service" else ""

    @property
    def command(self) -> str:
        """A command that shows the object; "" if its name cannot be that of an object."""
        if not (_DNS_NAME.fullmatch(self.namespace) and _DNS_NAME.fullmatch(self.name)):
            return ""  # nobody should copy such text into a shell
        return f"kubectl -n {self.namespace} get {self.kind.lower()} {self.name} -o yaml"


def about(finding: Finding) -> About | None:
    """Return the Kubernetes object that a Finding is about, None if it is none with a namespace."""
    found = _OBJECT.fullmatch(finding.object)
    return About(*found.groups()) if found else None


def code_of_condition(condition: Condition) -> str:
    """Return the code of a condition that is not True."""
    return _CONDITIONS.get((condition.type, condition.reason), codes.OTHER_CONDITION)
