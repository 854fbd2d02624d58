"""The test API server's answers have the shape of a real one's (tests/data/upstream/api)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import aiohttp
import pytest
from msgspec.structs import replace

from steersman.model.findings import Finding
from steersman.model.kube import EndpointSlice, KubeObject
from steersman.model.names import ObjectName
from steersman.source.framing import ListReader, Message, unwrap
from steersman.source.objects import decode_items, decode_object
from steersman.source.wire import (
    ApiError,
    decode_event,
    decode_list_meta,
    decode_metadata,
    decode_status,
    initial_end,
    splitter_for,
)
from tests.support.apiserver import protobuf
from tests.support.apiserver.reading import reading
from tests.support.apiserver.server import ApiServer
from tests.support.apiserver.world import KINDS, Object, World, read_token
from tests.support.data import RECORDED
from tests.support.waiting import until

FOLDER = RECORDED / "api"


PER_REQUEST = {"Audit-Id", "Date", "Content-Length", "Transfer-Encoding", "Server"}
SELECT: dict[str, Any] = {
    "labelSelector": "!service.kubernetes.io/service-proxy-name",
    "fieldSelector": "spec.clusterIP!=None",
}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def recorded(name: str) -> Answer:
    head, _, body = (FOLDER / f"{name}.http").read_bytes().partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), headers, body)


def recorded_objects(kind: str, name: str) -> list[Object]:
    """The items of a recorded list, as objects to load."""
    return [{"kind": kind, **item} for item in json.loads(recorded(name).body)["items"]]


async def ask(server: ApiServer, kind: str, lines: int = 0, **query: Any) -> Answer:
    """Ask as curl does; of a watch, read so many lines."""
    async with (
        aiohttp.ClientSession(headers={"User-Agent": "curl/8"}) as session,
        session.get(server.url + KINDS[kind].path, params=query) as response,
    ):
        if lines:
            body = b"".join([await response.content.readline() for _ in range(lines)])
        else:
            body = await response.read()
        return Answer(response.status, dict(response.headers), body)


def shape(value: Any) -> Any:
    """Types and keys, in order; of lists, what their members have in common."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    return type(value).__name__


def same_headers(ours: Answer, real: Answer) -> None:
    assert ours.status == real.status
    names = set(real.headers) - PER_REQUEST - {"X-Content-Type-Options"}
    assert {name: ours.headers.get(name) for name in names} == {
        name: real.headers[name] for name in names
    }
    assert {"Audit-Id", "Date"} <= ours.headers.keys()


def services() -> list[Object]:
    pages = ("list-services-page1", "list-services-page2")
    return [obj for page in pages for obj in recorded_objects("Service", page)]


async def test_pages() -> None:
    first, second = (json.loads(recorded(f"list-services-page{n}").body) for n in (1, 2))
    async with ApiServer(services()) as server:
        answer = await ask(server, "Service", limit="5", **SELECT)
        same_headers(answer, recorded("list-services-page1"))
        page = json.loads(answer.body)
        assert answer.body.startswith(b'{\n  "kind": "ServiceList",\n  "apiVersion": "v1",\n')
        assert shape({**page, "items": 0}) == shape({**first, "items": 0})
        names = [item["metadata"]["name"] for item in page["items"]]
        assert names == [item["metadata"]["name"] for item in first["items"]]
        assert set(page["items"][0]) == set(first["items"][0])
        token = page["metadata"]["continue"]
        real = read_token(first["metadata"]["continue"])
        # The real key ends at the name that comes next to it in etcd: /namespace/name\0.
        assert read_token(token)[1].lstrip("/") == real[1].lstrip("/")
        rest = json.loads((await ask(server, "Service", **{"continue": token, **SELECT})).body)
        names = [item["metadata"]["name"] for item in rest["items"]]
        assert names == [item["metadata"]["name"] for item in second["items"]]
        assert set(rest["metadata"]) == {"resourceVersion"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("EndpointSlice", "list-endpointslices"),
        ("Node", "get-node-list"),
        ("ServiceCIDR", "list-servicecidrs"),
    ],
)
async def test_lists(kind: str, name: str) -> None:
    real = recorded(name)
    async with ApiServer(recorded_objects(kind, name)) as server:
        answer = await ask(server, kind)
    ours, theirs = json.loads(answer.body), json.loads(real.body)
    same_headers(answer, real)
    assert shape({**ours, "items": 0}) == shape({**theirs, "items": 0})
    for mine, item in zip(ours["items"], theirs["items"], strict=True):
        assert mine | {"metadata": 0} == item | {"metadata": 0}


async def test_errors() -> None:
    async with ApiServer(services()) as server:
        server.tokens = frozenset({"secret"})
        cases = [("error-401", await ask(server, "Service"))]
        server.tokens, server.forbidden = frozenset(), frozenset({"Node"})
        server.absent = frozenset({"ServiceCIDR"})
        cases += [("error-403", await ask(server, "Node"))]
        cases += [("error-404", await ask(server, "ServiceCIDR"))]
        cases += [("list-future-rv", await ask(server, "Service", resourceVersion="99999999"))]
        page = json.loads((await ask(server, "Service", limit="5")).body)
        server.compact()
        query = {"continue": page["metadata"]["continue"]}
        cases += [("error-410-expired-continue", await ask(server, "Service", **query))]
        query = {"resourceVersion": "5", "resourceVersionMatch": "Exact"}
        cases += [("error-410-list-exact", await ask(server, "Service", **query))]
    for name, answer in cases:
        real = recorded(name)
        same_headers(answer, real)
        ours, theirs = json.loads(answer.body), json.loads(real.body)
        assert shape(ours) == shape(theirs), name
        assert (ours["reason"], ours["code"]) == (theirs["reason"], theirs["code"])


async def test_watch_of_the_past() -> None:
    real = recorded("error-410-watch")
    async with ApiServer(services()) as server:
        server.compact()
        answer = await ask(server, "Service", lines=1, watch="true", resourceVersion="5")
    same_headers(answer, real)
    assert shape(json.loads(answer.body)) == shape(json.loads(real.body))


async def test_watch_list() -> None:
    real = recorded("watchlist-services")
    events = [json.loads(line) for line in real.body.splitlines()]
    async with ApiServer([e["object"] for e in events[:-1]]) as server:
        query = {"watch": "true", "sendInitialEvents": "true"}
        answer = await ask(server, "Service", lines=len(events), **query, **SELECT)
    same_headers(answer, real)
    ours = [json.loads(line) for line in answer.body.splitlines()]
    assert {event["type"] for event in ours[:-1]} == {"ADDED"}
    assert shape(ours[-1]) == shape(events[-1])
    key = sorted
    assert key(e["object"]["metadata"]["name"] for e in ours[:-1]) == key(
        e["object"]["metadata"]["name"] for e in events[:-1]
    )


async def test_live_watch() -> None:
    real = [json.loads(line) for line in recorded("watch-endpointslices-live").body.splitlines()]
    by_type = {event["type"]: event for event in real}
    changed, deleted = by_type["MODIFIED"]["object"], by_type["DELETED"]["object"]
    async with ApiServer([changed, deleted]) as server:
        server.bookmark_seconds = 0.05
        start = str(server.world.version)
        server.add(changed)
        server.delete("EndpointSlice", deleted["metadata"]["name"], "golden")
        server.add(by_type["ADDED"]["object"])
        answer = await ask(server, "EndpointSlice", lines=4, watch="true", resourceVersion=start)
    ours = {event["type"]: event for event in map(json.loads, answer.body.splitlines())}
    assert ours.keys() == by_type.keys()
    assert shape(ours["BOOKMARK"]) == shape(by_type["BOOKMARK"])
    for type_ in ("MODIFIED", "DELETED", "ADDED"):
        assert set(ours[type_]["object"]) == set(by_type[type_]["object"])


def test_real_objects_decode() -> None:
    """Also without the test server: what the real one sent is understood."""
    for kind, name in (("EndpointSlice", "list-endpointslices"), ("Node", "get-node-list"),
                       ("Service", "list-services-page2")):  # fmt: skip
        items = json.loads(recorded(name).body)["items"]
        objects, findings = decode_items(kind, json.dumps(items).encode())
        assert len(objects) == len(items)
        assert not findings
    for line in recorded("watch-endpointslices-live").body.splitlines():
        event = json.loads(line)
        if event["type"] != "BOOKMARK":
            raw = json.dumps(event["object"]).encode()
            assert not hasattr(decode_object("EndpointSlice", raw), "reason")


# Objects that were changed between the recordings in JSON and those in protobuf.
CHANGED = {"all-terminating-x", "dual-lb"}


def unversioned(obj: KubeObject) -> KubeObject:
    """An object without what differs between two lives of a server."""
    meta = replace(obj.metadata, uid="", resource_version="", creation_timestamp=None)
    return replace(obj, metadata=meta)


@pytest.mark.parametrize(
    ("kind", "json_name", "name"),
    [
        ("EndpointSlice", "list-endpointslices", "list-endpointslices"),
        ("Service", "list-services-page1", "list-services-page1"),
        ("Service", "list-services-page2", "list-services"),
        ("Node", "get-node-list", "get-node-list"),
        ("ServiceCIDR", "list-servicecidrs", "list-servicecidrs"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_protobuf_decodes_to_the_same_objects(
    kind: str, json_name: str, name: str, size: int
) -> None:
    items = json.loads(recorded(json_name).body)["items"]
    wanted = {o.metadata.name: o for o in decode_items(kind, json.dumps(items).encode())[0]}
    body, reader = recorded(f"protobuf/{name}").body, ListReader(1 << 20)
    messages = [
        item for at in range(0, len(body), size) for item in reader.feed(body[at : at + size])
    ]
    found = [decode_object(kind, item) for item in messages]
    assert reader.complete
    assert decode_list_meta(kind, reader.kind, reader.metadata).resource_version == "41445"
    objects = {o.metadata.name: o for o in found if not isinstance(o, Finding)}
    assert len(objects) == len(found) >= len(wanted)
    for each in wanted.keys() - CHANGED:
        assert unversioned(objects[each]) == unversioned(wanted[each])
        assert objects[each].metadata.uid
        assert objects[each].metadata.resource_version.isdecimal()
        assert objects[each].metadata.creation_timestamp is not None


def test_a_watch_in_protobuf() -> None:
    body = recorded("protobuf/watch-endpointslices-live").body
    splitter = splitter_for(protobuf.CONTENT_TYPE)
    events = [
        decode_event(event)
        for at in range(0, len(body), 100)
        for event in splitter.feed(body[at : at + 100])
    ]
    assert not splitter.rest
    types = ["MODIFIED"] * 2 + ["DELETED", "MODIFIED"] + ["BOOKMARK"] * 3
    assert [event.type for event in events] == types
    versions = [int(decode_metadata(event.object).resource_version) for event in events]
    assert versions == sorted(versions)
    for event in events[:4]:
        assert isinstance(decode_object("EndpointSlice", event.object), EndpointSlice)


@pytest.mark.parametrize("name", ["watchlist-services", "watchlist-services-stream-type"])
def test_a_watch_list_in_protobuf(name: str) -> None:
    splitter = splitter_for(protobuf.CONTENT_TYPE)
    *events, end = map(decode_event, splitter.feed(recorded(f"protobuf/{name}").body))
    assert {event.type for event in events} == {"ADDED"}
    assert int(initial_end(end)) > 41000
    with pytest.raises(ApiError, match="before the end of the initial events"):
        initial_end(events[0])


def test_errors_in_protobuf() -> None:
    for name, code, reason in (
        ("error-404", 404, "could not find the requested resource"),
        ("error-410-list-exact", 410, "is too old"),
    ):
        _, message = unwrap(recorded(f"protobuf/{name}").body)
        error = decode_status(Message(message)).error()
        assert (error.status, error.reason) == (code, f"http_{code}")
        assert reason in str(error)
    splitter = splitter_for(protobuf.CONTENT_TYPE)
    (event,) = splitter.feed(recorded("protobuf/error-410-watch").body)
    with pytest.raises(ApiError, match="too old resource version") as caught:
        decode_event(event)
    assert caught.value.status == 410


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("EndpointSlice", "list-endpointslices"),
        ("Service", "list-services"),
        ("Service", "list-services-page1"),
        ("ServiceCIDR", "list-servicecidrs"),
    ],
)
def test_the_test_server_encodes_as_the_real_one(kind: str, name: str) -> None:
    real = recorded(f"protobuf/{name}").body
    (_, head), *items = protobuf.fields_of(protobuf.message_of(real))
    value = {
        "kind": f"{kind}List",
        "apiVersion": KINDS[kind].api_version,
        "metadata": protobuf.decoded("ListMeta", head),
        "items": [protobuf.decoded(kind, item) for _, item in items],
    }
    assert protobuf.body_of(value) == real


def test_the_test_server_encodes_watches_as_the_real_one() -> None:
    real = recorded("protobuf/watch-endpointslices-live").body
    frames = b""
    for event in splitter_for(protobuf.CONTENT_TYPE).feed(real):
        (_, type_), (_, extension) = protobuf.fields_of(event)
        message = protobuf.message_of(protobuf.fields_of(extension)[0][1])
        head = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1"}
        obj = {**head, **protobuf.decoded("EndpointSlice", message)}
        frames += protobuf.frame_of({"type": type_.decode(), "object": obj})
    assert frames == real


async def test_a_real_cluster_is_read() -> None:
    slices = recorded_objects("EndpointSlice", "list-endpointslices")
    async with ApiServer([*services(), *slices]) as server, reading(server) as r:
        await r.synced()
        assert len(r.store.snapshot.services) == len(services())
        event = json.loads(recorded("watch-endpointslices-live").body.splitlines()[0])["object"]
        server.add(event)
        owner = event["metadata"]["labels"]["kubernetes.io/service-name"]
        name = ObjectName(event["metadata"]["namespace"], owner)
        told = [endpoint["addresses"] for endpoint in event["endpoints"]]

        def arrived() -> bool:
            return any(
                slice_.metadata.name == event["metadata"]["name"]
                and told == [e.addresses for e in slice_.endpoints or ()]
                for slice_ in r.store.snapshot.slices[name]
            )

        await until(arrived)


def test_a_world_forgets_what_it_compacted() -> None:
    world = World()
    world.put({"kind": "Node", "metadata": {"name": "a"}})
    world.compact()
    assert list(world.since(0)) == []
