"""Health (behaviour 13): of the proxy itself, and of the Services with a health check node port.

Kubelet and load balancers ask the proxy's own server (`/healthz`, `/livez`, and beyond upstream
`/readyz`). A load balancer in front of the nodes asks one server for each such Service whether this
node should get its traffic. `ProxyHealth` and `ServiceHealth` are the state and build the answers;
the rest serves them.

The proxy is healthy while no change waits for longer than twice the sync period: a sync that fails
makes it unhealthy in time, a quiet cluster does not.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from steersman.model.kube import Node
from steersman.model.names import Family, ObjectName
from steersman.model.times import rfc3339
from steersman.run.serve.connections import ListenError
from steersman.run.serve.http import Answer, App, Listening, Page, Request, application, listen

log = logging.getLogger(__name__)

DELETION_TAINT = "ToBeDeletedByClusterAutoscaler"
_JSON = "application/json"


class Moment(NamedTuple):
    """A point in time, on both clocks: the wall clock may be set, the steady one never is."""

    wall: int
    """Nanoseconds since 1970."""
    steady: float
    """Seconds since some fixed moment."""


NEVER = Moment(-62135596800 * 10**9, 0.0)
"""Go's zero time, as upstream prints it."""


def now() -> Moment:
    """Read both clocks."""
    return Moment(time.time_ns(), time.monotonic())


def eligible(node: Node | None) -> bool:
    """Return whether load balancers may send new traffic to this node: it is known and stays."""
    if node is None or node.metadata.deletion_timestamp:
        return False
    return all(taint.key != DELETION_TAINT for taint in node.spec.taints or ())


class ProxyHealth:
    """Whether the kernel follows the cluster, by the queued and finished syncs of each family."""

    def __init__(self, timeout: float) -> None:
        """Start healthy.

        Args:
            timeout: seconds that a change may stay queued; twice the sync period (behaviour 13).
        """
        self.timeout = timeout
        """May change while running."""
        self._updated: dict[Family, Moment] = {}
        self._queued: dict[Family, Moment] = {}
        """When the oldest change that waits was queued."""
        self.last_queued: dict[Family, Moment] = {}

    def queued(self, family: Family, now: Moment) -> None:
        """Record that a change waits to be synced; the oldest such moment counts."""
        self._queued.setdefault(family, now)
        self.last_queued[family] = now

    def updated(self, family: Family, now: Moment) -> None:
        """Record a successful sync: no earlier change waits any more."""
        self._queued.pop(family, None)
        self._updated[family] = now

    def waiting(self, now: Moment) -> float:
        """Return for how many seconds the oldest change has been waiting; 0 if none waits."""
        return max((now.steady - each.steady for each in self._queued.values()), default=0.0)

    def healthy(self, now: Moment) -> bool:
        """Return whether every family that was ever updated is healthy."""
        return all(self._healthy(family, now) for family in self._updated)

    def _healthy(self, family: Family, now: Moment) -> bool:
        queued = self._queued.get(family)
        return queued is None or now.steady - queued.steady < self.timeout

    def healthz(self, now: Moment, node: Node | None) -> Answer:
        """Answer `/healthz`: 200 if the kernel follows and this node stays."""
        return self._answer(now, eligible(node))

    def livez(self, now: Moment) -> Answer:
        """Answer `/livez`: 200 if the kernel follows."""
        return self._answer(now, None)

    def _answer(self, now: Moment, node_eligible: bool | None) -> Answer:
        healthy = self.healthy(now)
        good = healthy and node_eligible is not False
        # Upstream prints the current time while healthy, else the time of the last update.
        latest = now if good else max(self._updated.values(), default=NEVER)
        report: dict[str, object] = {
            "lastUpdated": rfc3339(latest.wall),
            "currentTime": rfc3339(now.wall),
        }
        if node_eligible is not None:
            report["nodeEligible"] = node_eligible
        report["healthy"] = healthy
        if self._updated:
            report["status"] = {
                family.kubernetes: {
                    "lastUpdated": rfc3339(self._updated[family].wall),
                    "healthy": self._healthy(family, now),
                }
                for family in sorted(self._updated)
            }
        return Answer(msgspec.json.encode(report), 200 if good else 503, _JSON)


def readyz(synced: bool) -> Answer:
    """Answer `/readyz` (beyond upstream): 200 once the first full sync reached the kernel."""
    if synced:
        return Answer("ok")
    return Answer("not ready: the first sync has not reached the kernel yet\n", 503)


class ServiceHealth:
    """Number of local endpoints of each Service with a health check node port."""

    def __init__(self) -> None:
        self._ports: dict[ObjectName, int] = {}
        self._counts: dict[ObjectName, int] = {}

    def sync_services(self, ports: Mapping[ObjectName, int]) -> None:
        """Set the ports to listen on. A port that is new or changed starts at count 0."""
        self._counts = {n: c for n, c in self._counts.items() if ports.get(n) == self._ports[n]}
        self._ports = dict(ports)

    def sync_endpoints(self, counts: Mapping[ObjectName, int]) -> None:
        """Set the counts of ready local endpoints; a Service that is missing has none."""
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
        # Indent by tabs, as upstream does; no string in JSON spans lines.
        text = re.sub("^ +", lambda m: "\t" * (len(m[0]) // 2), text, flags=re.MULTILINE)
        good = count > 0 and proxy_healthy
        weight = {"X-Load-Balancing-Endpoint-Weight": str(count)}
        return Answer(text, 200 if good else 503, _JSON, more_headers=weight)


def proxy_health_app(
    health: ProxyHealth,
    node: Callable[[], Node | None],
    *,
    ready: Callable[[], bool] = lambda: True,
    count: Callable[[str, int], None] = lambda _path, _status: None,
    clock: Callable[[], Moment] = now,
) -> App:
    """Return the application of `healthzBindAddress`."""

    def counted(name: str, answer: Callable[[], Answer]) -> Page:
        def page(_: Request) -> Answer:
            made = answer()
            count(name, made.status)
            return made

        return page

    return application(
        {
            "/healthz": counted("healthz", lambda: health.healthz(clock(), node())),
            "/livez": counted("livez", lambda: health.livez(clock())),
            "/readyz": lambda _: readyz(ready()),
        }
    )


class ServiceHealthServers:
    """Listens on the health check node ports of Services, in one or both families."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        proxy_healthy: Callable[[], bool],
        on_failure: Callable[[ObjectName, int, str], None] = lambda *_: None,
    ) -> None:
        """Create it; nothing listens before `sync`.

        Args:
            addresses: returns the addresses to listen on: the unspecified ones, or this node's
                addresses that serve node ports.
            proxy_healthy: returns whether the kernel follows the cluster.
            on_failure: called with a Service, its port that cannot be listened on, and the error;
                for the Event FailedToStartServiceHealthcheck.
        """
        self._state = ServiceHealth()
        self._addresses = addresses
        self._proxy_healthy = proxy_healthy
        self._on_failure = on_failure
        self._running: dict[tuple[ObjectName, int, str], Listening] = {}
        self._failures: dict[tuple[ObjectName, int, str], str] = {}
        """The logged errors: syncs come many times a second, and log the same error once."""

    @property
    def failing(self) -> bool:
        """Whether some port could not be listened on at the last `sync`."""
        return bool(self._failures)

    async def sync(self, ports: Mapping[ObjectName, int], counts: Mapping[ObjectName, int]) -> None:
        """Listen on the wanted ports, and serve the counts of ready local endpoints.

        A port that cannot be listened on is reported, and retried by the next call.
        """
        self._state.sync_services(ports)
        # Close first: a port may move from one Service to another.
        addresses = self._addresses()
        wanted = {(name, port, at) for name, port in ports.items() for at in addresses}
        await self._close(key for key in self._running if key not in wanted)
        self._failures = {key: why for key, why in self._failures.items() if key in wanted}
        for key in sorted(wanted - self._running.keys()):
            await self._open(*key)
        self._state.sync_endpoints(counts)

    async def close(self) -> None:
        """Stop listening."""
        await self._close(self._running)

    async def _close(self, keys: Iterable[tuple[ObjectName, int, str]]) -> None:
        servers = [self._running.pop(key) for key in list(keys)]
        await asyncio.gather(*(server.close() for server in servers))

    async def _open(self, name: ObjectName, port: int, address: str) -> None:
        app = App(lambda _: self._state.answer(name, self._proxy_healthy()))
        try:
            server = await listen(app, address, port)
        except ListenError as error:
            why, before = str(error.strerror), self._failures.get((name, port, address))
            self._failures[name, port, address] = why
            if why != before:
                log.error("health check of %s: cannot %s", name, why)
            self._on_failure(name, port, why)
        else:
            self._failures.pop((name, port, address), None)
            self._running[name, port, address] = server
