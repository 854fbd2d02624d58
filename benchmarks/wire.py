"""What reading an API server costs: bytes on the wire, and CPU until objects are in the Store.

Bytes are counted by a relay between the program's own source and the test API server, whose
messages in protobuf equal a real server's byte by byte (tests/e2e/test_recordings.py). The
yardstick is upstream's way: protobuf, and the first lists as a stream (WatchList), which is never
compressed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable

from benchmarks import world
from benchmarks.figures import Figure, figure, interleaved
from steersman.model.findings import Finding
from steersman.source.apiserver import ApiServerSource
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.objects import decode_object
from steersman.source.store import Store
from steersman.source.wire import decode_event, splitter_for
from tests.support.apiserver import protobuf
from tests.support.apiserver.server import ApiServer
from tests.support.apiserver.world import Object

JSON = "application/json"
BOTH = f"{protobuf.CONTENT_TYPE},{JSON}"


def service(number: int) -> Object:
    """A Service as a controller and the API server complete it."""
    found: Object = json.loads(world.service(number))
    found["metadata"] |= _written_by("kube-controller-manager", "spec")
    return {"kind": "Service", **found}


def endpoint_slice(number: int, shift: int = 0) -> Object:
    found: Object = json.loads(world.endpoint_slice(number, world.pods(number, shift)))
    owner: Object = {"apiVersion": "v1", "kind": "Service", "name": f"service-{number}"}
    owner |= {"uid": f"00000000-0000-0000-0001-{number:012}", "controller": True}
    meta = found["metadata"]
    meta["labels"]["endpointslice.kubernetes.io/managed-by"] = "endpointslice-controller.k8s.io"
    meta |= {
        "generateName": f"service-{number}-",
        "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"},
        "ownerReferences": [owner | {"blockOwnerDeletion": True}],
        **_written_by("kube-controller-manager", "endpoints"),
    }
    for index, endpoint in enumerate(found["endpoints"]):
        endpoint["zone"] = f"zone-{index}"
        endpoint["targetRef"]["uid"] = f"00000000-0000-0000-0002-{number * 3 + index:012}"
    return {"kind": "EndpointSlice", **found}


def _written_by(manager: str, field: str) -> Object:
    fields = {"f:metadata": {"f:labels": {".": {}, "f:app": {}}}, f"f:{field}": {"f:ports": {}}}
    entry: Object = {"manager": manager, "operation": "Update", "apiVersion": "v1"}
    entry |= {"time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": fields}
    return {"managedFields": [entry]}


class Relay:
    """Forwards connections to a server, and counts the bytes that the server sends."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sent = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._port)

        async def forward() -> None:
            while data := await reader.read(1 << 16):
                requests.write(data)

        task = asyncio.create_task(forward())
        try:
            while data := await answers.read(1 << 16):
                self.sent += len(data)
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            task.cancel()
            writer.close()
            requests.close()


async def count(server: ApiServer, accepted: str, *, stream: bool) -> float:
    """Return the bytes of a start."""
    relay = Relay(int(server.url.rpartition(":")[2]))
    between = await asyncio.start_server(relay, "127.0.0.1", 0)
    access = ClusterAccess(
        servers=(f"http://127.0.0.1:{between.sockets[0].getsockname()[1]}",), accepted=accepted
    )
    store = Store(world.NODE)
    source = ApiServerSource(access, world.NODE, watch_list=stream)
    task = asyncio.create_task(source.run(store))
    try:
        while not (store.synced and source.stats.connected):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.05)
        return float(relay.sent)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        between.close()


async def _start(services: int) -> list[Figure]:
    objects = [each for n in range(services) for each in (service(n), endpoint_slice(n))]
    async with ApiServer(objects) as server:
        ours = await count(server, BOTH, stream=False)
        upstream = await count(server, BOTH, stream=True)
        before = await count(server, JSON, stream=True)
    return [
        figure("bytes of a start", "protobuf", services, (ours, "B"), upstream),
        figure("bytes of a start, as stream in JSON", "json", services, (before, "B"), upstream),
    ]


def _feed(content_type: str, events: Iterable[bytes], store: Store | None) -> None:
    """Split, decode and store a watch, as a Reflector does."""
    splitter = splitter_for(content_type)
    for chunk in events:
        for event in splitter.feed(chunk):
            obj = decode_object("EndpointSlice", decode_event(event).object)
            if store is not None and not isinstance(obj, Finding):
                store.upsert(obj)


def _events(slices: int) -> list[Figure]:
    found: list[Object] = [
        {"type": "ADDED", "object": {"kind": "EndpointSlice", **endpoint_slice(n)}}
        for n in range(slices)
    ]
    messages = [protobuf.frame_of(event) for event in found]
    lines = [json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in found]
    ours, before = (sum(map(len, events)) / slices for events in (messages, lines))
    figures = [figure("bytes of a change; in JSON", "protobuf", slices, (ours, "B"), before)]

    def measure(content_type: str, events: list[bytes], stored: bool) -> Callable[[], float]:
        def run() -> float:
            store = Store(world.NODE) if stored else None
            begun = time.process_time()
            _feed(content_type, events, store)
            return (time.process_time() - begun) / slices * 1e6

        return run

    for stored, name in ((False, "CPU to decode a change"), (True, "CPU until it is stored")):
        in_protobuf = measure(protobuf.CONTENT_TYPE, messages, stored)
        value, reference = interleaved(9, in_protobuf, measure(JSON, lines, stored))
        figures.append(figure(f"{name}; JSON", "protobuf", slices, (value, "us"), reference))
    return figures


def run(quick: bool) -> list[Figure]:
    """Measure 10,000 Services of three endpoints (1,000 when quick)."""
    return [*asyncio.run(_start(1000 if quick else 10000)), *_events(2000)]
