"""Answers of the health servers (behaviour 13): pure state; run/health_server.py serves them.

Two servers: the proxy's own (`/healthz`, `/livez`, and beyond upstream `/readyz`), and one for each
Service with a health check node port, which a load balancer in front of the nodes asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from steersman.model.kube import Node
from steersman.model.names import Family, ObjectName
from steersman.run.http import Answer

DELETION_TAINT = "ToBeDeletedByClusterAutoscaler"
_JSON = "application/json"


class Moment(NamedTuple):
    """A point in time, on both clocks: the one on the wall may be set, the other never is."""

    wall: int
    """Nanoseconds since 1970."""
    steady: float
    """Seconds since some fixed moment."""


NEVER = Moment(-62135596800 * 10**9, 0.0)
"""Go's zero time, which is what upstream prints for it."""


def rfc3339(nanoseconds: int) -> str:
    """Print a time in UTC as Go does: with the fraction's trailing zeros cut off."""
    seconds, fraction = divmod(nanoseconds, 10**9)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S").rjust(19, "0")
    return f"{text}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"


def eligible(node: Node | None) -> bool:
    """Whether load balancers may send new traffic to this node: it is known and it stays."""
    if node is None or node.metadata.deletion_timestamp:
        return False
    return all(taint.key != DELETION_TAINT for taint in node.spec.taints or ())


class _FamilyStatus(msgspec.Struct, frozen=True, rename="camel"):
    last_updated: str
    healthy: bool


class _Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    last_updated: str
    current_time: str
    node_eligible: bool | None = None
    healthy: bool
    status: dict[str, _FamilyStatus] = {}


class ProxyHealth:
    """Whether the kernel follows the cluster: told of queued and finished syncs by family."""

    def __init__(self, timeout: float) -> None:
        """Start healthy.

        Args:
            timeout: seconds that a change may stay queued; twice the sync period (behaviour 13).
        """
        self.timeout = timeout
        """As given; it may change while running."""
        self._updated: dict[Family, Moment] = {}
        self._queued: dict[Family, Moment] = {}

    def queued(self, family: Family, now: Moment) -> None:
        """Note that something is to be synced; the oldest such moment counts."""
        self._queued.setdefault(family, now)

    def updated(self, family: Family, now: Moment) -> None:
        """Note a successful sync: nothing of before it is queued any more."""
        self._queued.pop(family, None)
        self._updated[family] = now

    def healthy(self, now: Moment) -> bool:
        """Whether every family is healthy; one that was never updated is not judged."""
        return all(self._healthy(family, now) for family in self._updated)

    def _healthy(self, family: Family, now: Moment) -> bool:
        queued = self._queued.get(family)
        return queued is None or now.steady - queued.steady < self.timeout

    def healthz(self, now: Moment, node: Node | None) -> Answer:
        """Answer `/healthz`: 200 if the kernel follows and this node is to stay."""
        return self._answer(now, eligible(node))

    def livez(self, now: Moment) -> Answer:
        """Answer `/livez`: 200 if the kernel follows."""
        return self._answer(now, None)

    def _answer(self, now: Moment, node_eligible: bool | None) -> Answer:
        healthy = self.healthy(now)
        good = healthy and node_eligible is not False
        latest = now if good else max(self._updated.values(), default=NEVER)
        status = {
            family.kubernetes: _FamilyStatus(
                rfc3339(self._updated[family].wall), self._healthy(family, now)
            )
            for family in sorted(self._updated)
        }
        report = _Report(
            last_updated=rfc3339(latest.wall),
            current_time=rfc3339(now.wall),
            node_eligible=node_eligible,
            healthy=healthy,
            status=status,
        )
        return Answer(msgspec.json.encode(report), 200 if good else 503, _JSON)


def readyz(synced: bool, reason: str = "") -> Answer:
    """Answer `/readyz` (beyond upstream): 200 once the first full sync reached the kernel."""
    if synced:
        return Answer("ok")
    return Answer(f"not ready: {reason or 'the first sync has not reached the kernel yet'}\n", 503)


class PortChange(NamedTuple):
    """What to do to listen on the right ports."""

    close: dict[ObjectName, int]
    open: dict[ObjectName, int]


class ServiceHealth:
    """How many local endpoints each Service with a health check node port has."""

    def __init__(self) -> None:
        self._ports: dict[ObjectName, int] = {}
        self._counts: dict[ObjectName, int] = {}

    @property
    def ports(self) -> Mapping[ObjectName, int]:
        """The ports that are to be listened on."""
        return self._ports

    def sync_services(self, ports: Mapping[ObjectName, int]) -> PortChange:
        """Take the ports wanted from now on. A port that is new or changed starts at count 0."""
        close = {n: port for n, port in self._ports.items() if ports.get(n) != port}
        opened = {n: port for n, port in ports.items() if self._ports.get(n) != port}
        self._ports = dict(ports)
        for name in (*close, *opened):
            self._counts.pop(name, None)
        return PortChange(close, opened)

    def sync_endpoints(self, counts: Mapping[ObjectName, int]) -> None:
        """Take the counts of ready local endpoints; a Service not in it has none."""
        self._counts = {name: counts.get(name, 0) for name in self._ports}

    def answer(self, name: ObjectName, proxy_healthy: bool) -> Answer:
        """Answer any request on a Service's port: 200 if this node should get its traffic."""
        count = self._counts.get(name, 0)
        body = {
            "service": {"namespace": name.namespace, "name": name.name},
            "localEndpoints": count,
            "serviceProxyHealthy": proxy_healthy,
        }
        text = msgspec.json.format(msgspec.json.encode(body), indent=2).decode()
        good = count > 0 and proxy_healthy
        weight = {"X-Load-Balancing-Endpoint-Weight": str(count)}
        return Answer(_with_tabs(text), 200 if good else 503, _JSON, more_headers=weight)


def _with_tabs(text: str) -> str:
    """Indent JSON by tabs, as upstream does; no string in JSON spans lines."""
    return re.sub("^ +", lambda spaces: "\t" * (len(spaces[0]) // 2), text, flags=re.MULTILINE)
