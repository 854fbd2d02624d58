"""Failover: observations of endpoints, probes, and ejections."""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from steersman.model.names import Protocol


class Backend(NamedTuple):
    """An endpoint, as clients are sent to it."""

    ip: str
    port: int
    protocol: Protocol


class Observation(enum.StrEnum):
    """What happened to a connection, or to a probe."""

    ANSWERED = "answered"
    SILENT = "silent"
    """No answer to a SYN before it is sent again (1 s), to a dial of our proxy in 0.25 s, or to a
    probe within its timeout."""
    REFUSED = "refused"
    """A TCP reset, or ICMP port unreachable."""
    UNREACHABLE = "unreachable"
    """ICMP host or network unreachable."""
    UNHEALTHY = "unhealthy"
    """An answer to a check by HTTP that is no success."""


class Settings(msgspec.Struct, frozen=True):
    """What depends on the cluster, in seconds if nothing else is said.

    Each is a field of `steersman.failover` of the configuration (config/types.py), too. The other
    numbers are in failover/tuning.py.
    """

    probes: int = 3
    """Probes that must fail for a silent endpoint; more if probes of living ones fail, too."""
    confirmed_share: float = 0.9
    """Largest ejected share of a pool; one endpoint may always be ejected."""
    hold: float = 10.0
    """Time of the first ejection; doubled with each that follows."""
    longest_hold: float = 300.0
    """The most that it is doubled to."""
    check_interval: float = 10.0
    """Between two checks of an endpoint whose Service asks for them, and names no interval."""
    check_timeout: float = 1.0
    """Time that a check may take."""


class Check(msgspec.Struct, frozen=True):
    """What a Service asks for by annotation: its endpoints are checked, with traffic or without."""

    path: str = ""
    """Path for a request by HTTP; "" if a connection is enough."""
    interval: float = 0.0
    """Seconds; 0 for that of Settings."""
    failures: int = 3
    """Checks in a row that fail before an ejection."""
    successes: int = 1
    """Checks in a row that succeed before the return."""


class Probe(NamedTuple):
    """A connection that the node shall open, and close at once."""

    backend: Backend
    timeout: float
    """Seconds."""
    path: str = ""
    """Path of a request by HTTP that must succeed; "" for none."""
    check: bool = False
    """Whether it is one of the checks that a Service asks for."""


class Ejection(msgspec.Struct, frozen=True):
    """An endpoint that gets no new connections; times are those of the policy's caller."""

    backend: Backend
    reason: Observation
    since: float
    until: float
    """When the first probe for its return runs."""
    strikes: int
    """Number of ejections in a row, this one included."""
    confirmed: bool = True
    node: str = ""
    """Its node, if the whole node seems to be dead; "" otherwise."""

    @property
    def why(self) -> str:
        """The reason for people; `since` and `until` are seconds since 1970."""
        since, until = (
            f"{datetime.fromtimestamp(at, UTC):%H:%M:%S}" for at in (self.since, self.until)
        )
        reason = f"node {self.node} seems to be dead" if self.node else _REASONS[self.reason]
        return f"{reason} since {since} UTC; this node tries it again from {until}"


_REASONS = {
    Observation.SILENT: "it has not answered connections",
    Observation.REFUSED: "it has refused connections",
    Observation.UNREACHABLE: "it has been unreachable",
    Observation.UNHEALTHY: "it has answered checks with an error",
}
