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
    """Parameters of the policy, in seconds if nothing else is said.

    Each is a field of `steersman.failover` of the configuration (config/types.py), too.
    """

    probes: int = 3
    """Probes that must fail for a silent endpoint."""
    most_probes: int = 20
    """The same at most, if probes of living endpoints fail, too."""
    probe_interval: float = 0.3
    """Between two probes of a silent endpoint."""
    refused_probes: int = 2
    """Probes that must be refused for an endpoint that refuses."""
    refused_interval: float = 0.1
    """Between two probes of an endpoint that refuses."""
    doubt: float = 60.0
    """Time after a suspicion that was wrong in which more probes must fail."""
    rest: float = 0.5
    """Least time between two suspicions of one endpoint; doubled while they lead to nothing."""
    longest_rest: float = 8.0
    """The most that it is doubled to."""
    silent_connects: int = 3
    """Silent connects for an ejection without confirmation, if successes are counted; at most
    MOST_SILENT_CONNECTS."""
    silent_window: float = 3.0
    """Time within which they count together."""
    quiet: float = 1.5
    """Time without any answer that such an ejection takes."""
    confirmed_share: float = 0.9
    """Largest ejected share of a pool; one endpoint may always be ejected."""
    unconfirmed_share: float = 0.5
    """The same, if ejections are not confirmed."""
    panic_share: float = 1.0
    """Share of a pool that is down from which on the whole pool is used."""
    hold: float = 10.0
    """Time of the first ejection; doubled with each that follows."""
    longest_hold: float = 300.0
    """The most that it is doubled to."""
    forgiveness: float = 120.0
    """Time without an ejection after which the next one counts as the first."""
    return_interval: float = 1.0
    """Between two probes after the hold."""
    most_suspects: int = 256
    """Endpoints that are confirmed at the same time; others wait."""
    first_probes: int = 10
    """New endpoints that are probed together."""
    first_interval: float = 0.2
    """Between two such groups."""
    check_interval: float = 10.0
    """Between two checks of an endpoint whose Service asks for them, and names no interval."""
    check_failures: int = 3
    """Checks in a row that fail before an ejection."""
    check_successes: int = 1
    """Checks in a row that succeed before the return."""
    check_timeout: float = 1.0
    """Time that a check may take."""
    most_checks: int = 64
    """Checks that run at the same time."""


MOST_SILENT_CONNECTS = 8
"""Silent connects of an endpoint that the policy remembers."""


class Check(msgspec.Struct, frozen=True):
    """What a Service asks for by annotation: its endpoints are checked, with traffic or without."""

    path: str = ""
    """Path for a request by HTTP; "" if a connection is enough."""
    interval: float = 0.0
    """Seconds; 0 for the default of Settings, as below."""
    failures: int = 0
    successes: int = 0


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
