"""What happens on the node of the churn bench, each kind of it in a thread of its own."""

from __future__ import annotations

import heapq
import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from benchmarks import world
from benchmarks.churn_place import Place, Wire

PODS_A_SECOND = 5
POD_SERVICES = 10
"""Services that the pods belong to, beside their endpoints that stay."""
_READY, _STOPPING, _GONE = 0.5, 2.0, 2.5
"""Seconds of a pod's life: ready, terminating, gone. It is not ready at first."""
_HEALTH, _SCRAPE = 0.1, 15.0
_STEP, _CALM = 0.001, 0.005
_PATIENCE = 5.0
_FRESH = 0.1
"""Seconds for which a change is looked for at every step."""
_LOST = 10.0


def steady(number: int, probed: bool) -> list[str]:
    """The endpoints of a Service at first: three, or one if the answer must name it."""
    return world.pods(number)[: 1 if probed else world.ENDPOINTS]


def slice_of(number: int, addresses: list[str], pods: dict[str, str] | None = None) -> Any:
    """An EndpointSlice with endpoints elsewhere and pods of this node in some state."""
    made = json.loads(world.endpoint_slice(number, addresses))
    made["kind"] = "EndpointSlice"
    when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    made["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": when}
    for address, state in (pods or {}).items():
        conditions = {
            "ready": state == "ready",
            "serving": state == "ready",
            "terminating": state == "terminating",
        }
        target = {"kind": "Pod", "namespace": "bench", "name": f"pod-{address}"}
        made["endpoints"].append(
            {
                "addresses": [address],
                "conditions": conditions,
                "nodeName": world.NODE,
                "targetRef": target,
            }
        )
    return made


class Server:
    """The API server's door for tests: one connection, one write at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)

    def write(self, obj: Any) -> float:
        """Add or change an object; when the server had it, before it told anybody."""
        body = json.dumps({"op": "update", "object": obj})
        self._connection.request("POST", "/__control__", body)
        answer = json.loads(self._connection.getresponse().read())
        return float(answer["time"])


@dataclass
class Seen:
    """What was measured."""

    writes: int = 0
    latencies: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    unhealthy: int = 0
    scrapes: list[float] = field(default_factory=list)
    page: bytes = b""


class Prober:
    """Finds out when a change is in force: connects until one is led to the new endpoint."""

    def __init__(self, place: Place, seen: Seen) -> None:
        self._place, self._seen = place, seen
        self._news = threading.Condition()
        self._awaited: dict[str, tuple[str, float]] = {}
        """By new endpoint: the Service's address, and when the API server had it."""

    def expect(self, service: str, endpoint: str, since: float) -> None:
        with self._news:
            self._awaited[endpoint] = service, since
            self._news.notify()

    def idle(self) -> bool:
        """Whether every change was seen."""
        return not self._awaited

    def run(self, stop: threading.Event) -> None:
        wire = Wire(self._place)
        for turn in itertools.count():
            with self._news:
                while not self._awaited and not stop.is_set():
                    self._news.wait(0.1)
                waiting = list(self._awaited.items())
            if stop.is_set():
                break
            self._look(wire, waiting, turn)
        wire.close()

    def _look(self, wire: Wire, waiting: list[tuple[str, tuple[str, float]]], turn: int) -> None:
        now = time.monotonic()
        for _, (service, since) in waiting:
            if now - since < _FRESH or turn % 10 == 0:
                wire.connect(service)
        for endpoint in wire.arrived(_STEP):
            found = self._awaited.get(endpoint)
            if found is not None:
                self._in_force(*found, time.monotonic())
        for endpoint, (_, since) in waiting:
            if endpoint in self._awaited and now - since > _LOST:
                self._seen.latencies.append(_LOST)
                del self._awaited[endpoint]

    def _in_force(self, service: str, since: float, now: float) -> None:
        """Note that a change was seen, and with it all earlier ones of the same Service."""
        for endpoint, (other, when) in list(self._awaited.items()):
            if other == service and when <= since:
                self._seen.latencies.append(now - when)
                del self._awaited[endpoint]


class Writer:
    """Changes the world: endpoints that move, and pods that come and go."""

    def __init__(
        self,
        services: int,
        probed: int,
        changes: float,
        *,
        server: Server,
        place: Place,
        prober: Prober,
        seen: Seen,
    ) -> None:
        """Take how large the world is, and how many changes a second beside those of pods."""
        self._plain, self._services = services - probed, services
        self._changes = changes
        self._server, self._place, self._prober, self._seen = server, place, prober, seen
        self._serial = itertools.count(1)
        self._pods: list[dict[str, str]] = [{} for _ in range(POD_SERVICES)]
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._random = random.Random(13)

    def run(self, stop: threading.Event) -> None:
        now = time.monotonic()
        self._at(now, self._pod)
        if self._changes:
            self._at(now, self._change)
        while not stop.wait(max(0.0, self._due[0][0] - time.monotonic())):
            when, _, what = heapq.heappop(self._due)
            what(when)

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (when, next(self._serial), what))

    def _write(self, obj: Any) -> float:
        self._seen.writes += 1
        return self._server.write(obj)

    def _change(self, when: float) -> None:
        """Replace an endpoint; every second one is of a Service that is watched."""
        self._at(when + self._random.uniform(0.5, 1.5) / self._changes, self._change)
        serial = next(self._serial)
        fresh = world.pod_ip(1_000_000 + serial)
        if serial % 2 and self._changes > 1:
            number = self._random.randrange(POD_SERVICES, self._plain)
            self._write(slice_of(number, [*world.pods(number)[:-1], fresh]))
            return
        number = self._random.randrange(self._plain, self._services)
        since = self._write(slice_of(number, [fresh]))
        self._prober.expect(world.cluster_ip(number), fresh, since)

    def _pod(self, when: float) -> None:
        self._at(when + self._random.uniform(0.5, 1.5) / PODS_A_SECOND, self._pod)
        number = next(self._serial)
        address = world.pod_ip(2_000_000 + number)
        self._place.start_pod(number, address)
        self._pod_is(number, address, "starting")
        for after, state in ((_READY, "ready"), (_STOPPING, "terminating"), (_GONE, "")):
            self._at(when + after, partial(self._pod_is, number, address, state))

    def _pod_is(self, number: int, address: str, state: str, _when: float = 0.0) -> None:
        service = number % POD_SERVICES
        pods = self._pods[service]
        if state:
            pods[address] = state
        else:
            del pods[address]
            self._place.stop_pod(number)
        self._write(slice_of(service, world.pods(service), pods))


def ask(port: int, path: str) -> tuple[int, bytes]:
    """A request on a connection of its own, as kubelet's."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={"Connection": "close", "Accept": "*/*"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def poll_health(stop: threading.Event, seen: Seen, port: int) -> None:
    """Ask for /healthz ten times a second; a request that takes longer delays no other's count."""
    due = time.monotonic()
    while not stop.wait(max(0.0, due - time.monotonic())):
        begun = time.perf_counter()
        try:
            status, _ = ask(port, "/healthz")
        except OSError:
            status = 0
        seen.health.append(time.perf_counter() - begun)
        seen.unhealthy += status != 200
        due = max(due + _HEALTH, time.monotonic())


def scrape(stop: threading.Event, seen: Seen, port: int) -> None:
    """Fetch /metrics as Prometheus does."""
    while not stop.wait(_SCRAPE / 2 if not seen.scrapes else _SCRAPE):
        begun = time.perf_counter()
        _, seen.page = ask(port, "/metrics")
        seen.scrapes.append(time.perf_counter() - begun)


def wait_reachable(place: Place, service: str, endpoint: str, alive: Callable[[], bool]) -> None:
    """Return when connections to a Service are led to an endpoint."""

    def look() -> None:
        wire = Wire(place)
        while alive():
            wire.connect(service)
            if endpoint in wire.arrived(0.05):
                break
        wire.close()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if not alive():
        raise RuntimeError("the process that is measured has ended")
