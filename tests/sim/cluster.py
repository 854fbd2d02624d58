"""The cluster: etcd with its history, and API servers that fail in every way.

A server answers from its cache, which follows etcd after a delay (a stale server: after a long
one). What a process was sent last is what it can know; the simulation only trusts etcd.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from tests.sim.network import Address, Peer
from tests.sim.universe import Universe
from tests.support.apiserver import protobuf
from tests.support.apiserver.world import (
    KINDS,
    Change,
    Kind,
    Object,
    Selector,
    bookmark,
    continue_token,
    key_of,
    read_token,
    status,
    watch_event,
)

Key = tuple[str, str]
_BY_PATH = {kind.path: kind for kind in KINDS.values()}
_BOOKMARKS = 60.0
_CREATED = "2027-01-{:02d}T{:02d}:{:02d}:{:02d}Z"


class Etcd:
    """The truth: objects, resourceVersions and as much history as was not compacted."""

    def __init__(self) -> None:
        self.version = 1_000
        self.compacted = 0
        self.objects: dict[str, dict[Key, Object]] = {kind: {} for kind in KINDS}
        self.history: deque[Change] = deque(maxlen=4_000)
        self.servers: list[ApiServer] = []
        self._made = 0

    def put(self, obj: Object) -> None:
        """Create or replace an object."""
        kind, key = obj["kind"], key_of(obj)
        self.version += 1
        before = self.objects[kind].get(key)
        old = before["metadata"] if before else self._fresh()
        head = {"kind": kind, "apiVersion": KINDS[kind].api_version}
        kept = {name: old[name] for name in ("uid", "creationTimestamp")}
        meta = {**kept, **obj["metadata"], "resourceVersion": str(self.version)}
        after = {**head, **obj, "metadata": meta}
        self.objects[kind][key] = after
        self._record(Change(self.version, kind, before, after))

    def delete(self, kind: str, key: Key) -> None:
        before = self.objects[kind].pop(key, None)
        if before is not None:
            self.version += 1
            self._record(Change(self.version, kind, before, None))

    def compact(self) -> None:
        """Forget the history: older resourceVersions are refused with 410."""
        self.servers[0]._universe.note(f"etcd: compacted at {self.version}")
        self.compacted = self.version
        self.history.clear()

    def restore(self, version: int) -> None:
        """Come back from a backup: the same objects, another count of resourceVersions."""
        self.version = version
        for kind in KINDS:
            for key, obj in self.objects[kind].items():
                self.version += 1
                meta = {**obj["metadata"], "resourceVersion": str(self.version)}
                self.objects[kind][key] = {**obj, "metadata": meta}
        self.compact()
        for server in self.servers:
            server.restart()

    def _fresh(self) -> dict[str, str]:
        self._made += 1
        rest, second = divmod(self._made, 60)
        rest, minute = divmod(rest, 60)
        day, hour = divmod(rest, 24)
        created = _CREATED.format(day + 1, hour, minute, second)
        return {"uid": f"uid-{self._made}", "creationTimestamp": created}

    def _record(self, change: Change) -> None:
        self.history.append(change)
        for server in self.servers:
            server.follow(change)


@dataclass
class Fault:
    """How a server answers some of the requests."""

    what: str
    """status, html, reset, silence, truncated, malformed, ended, other_kind."""
    times: int = 1
    kind: str = ""
    code: int = 500
    retry_after: int = 0

    def takes(self, kind: str) -> bool:
        return self.times > 0 and self.kind in ("", kind)


@dataclass(eq=False)
class Watch:
    """An open watch: what it wants, and how far it was told."""

    kind: Kind
    selector: Selector
    peer: Peer
    version: int
    open: bool = True
    stalled: bool = False


@dataclass
class _Request:
    method: str
    path: str
    query: dict[str, str]
    kind: Kind | None = field(init=False)

    def __post_init__(self) -> None:
        self.kind = _BY_PATH.get(self.path)

    @property
    def selector(self) -> Selector:
        return Selector(self.query.get("labelSelector", ""), self.query.get("fieldSelector", ""))


class ApiServer:
    """One API server of the cluster."""

    def __init__(self, universe: Universe, etcd: Etcd, address: Address) -> None:
        self._universe = universe
        self._etcd = etcd
        self._address = address
        self.watch_list = True
        self.delay = 0.002
        """Seconds behind etcd."""
        self.latency = 0.0
        """Seconds more for each answer."""
        self.faults: list[Fault] = []
        self.requests = 0
        self.events: list[Object] = []
        """Events that were posted."""
        self._pending: deque[Change] = deque()
        self._watches: list[Watch] = []
        self._peers: dict[Peer, None] = {}
        self._cache: dict[str, dict[Key, Object]] = {}
        self._version = 0
        etcd.servers.append(self)
        self.restart()
        self.up(True)

    def up(self, on: bool) -> None:
        """Accept connections, or refuse them and cut those there are."""
        hosts = self._universe.network.hosts
        if on:
            hosts[self._address] = self._accept
        else:
            hosts.pop(self._address, None)
            self.drop()

    def silent(self, on: bool) -> None:
        """Drop all packets: connections hang, watches say nothing."""
        (self._universe.network.silent.add if on else self._universe.network.silent.discard)(
            self._address
        )
        for watch in tuple(self._watches):
            watch.stalled = watch.stalled or on

    def drop(self) -> None:
        """Reset the connections of open watches."""
        for watch in tuple(self._watches):
            watch.open = False
            watch.peer.close(reset=True)
        self._watches = []

    def expire(self) -> None:
        """Tell the open watches that their resourceVersion is too old."""
        for watch in tuple(self._watches):
            self._send(watch, {"type": "ERROR", "object": status(410, "too old")})
            self._end(watch)
        self._watches = []

    def restart(self) -> None:
        """Begin again, as after a crash: no connection survives, all is read from etcd."""
        self._watches = []
        peers, self._peers = self._peers, {}
        for peer in peers:
            peer.close(reset=True)
        self._pending.clear()
        self._cache = {kind: dict(objects) for kind, objects in self._etcd.objects.items()}
        self._version = self._etcd.version

    def follow(self, change: Change) -> None:
        """Hear of a change from etcd; it is in the cache some time later."""
        self._pending.append(change)
        self._universe.after(self.delay, self._catch_up)

    def _catch_up(self) -> None:
        if self._pending:
            change = self._pending.popleft()
            objects = self._cache[change.kind]
            if change.after is not None:
                objects[key_of(change.after)] = change.after
            elif change.before is not None:
                objects.pop(key_of(change.before), None)
            self._version = change.version
            for watch in tuple(self._watches):
                if watch.kind.kind == change.kind:
                    self._tell(watch, change)

    # Connections

    def _accept(self, peer: Peer) -> None:
        received = bytearray()
        self._peers[peer] = None
        peer.on_close = lambda: self._closed(peer)

        def data(chunk: bytes) -> None:
            received.extend(chunk)
            head, found, body = bytes(received).partition(b"\r\n\r\n")
            if found and len(body) >= _length(head):
                received.clear()
                self._universe.after(self.latency, lambda: self._answer(peer, head, body))

        peer.on_data = data

    def _answer(self, peer: Peer, head: bytes, body: bytes) -> None:
        if peer not in self._peers:
            return
        self.requests += 1
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        path, _, query = target.partition("?")
        request = _Request(method, path, dict(parse_qsl(query, keep_blank_values=True)))
        kind = request.kind.kind if request.kind else "Event"
        verb = "watch" if "watch" in request.query else "list"
        since = request.query.get("resourceVersion", "")
        self._universe.note(f"{self._address[0]}: {method} {verb} {kind} {since}")
        fault = next((fault for fault in self.faults if fault.takes(kind)), None)
        if fault is not None:
            fault.times -= 1
            self._universe.note(f"api: {fault.what} {fault.code} for {kind}")
            self._misbehave(peer, fault)
        elif request.kind is None:
            if body.startswith(protobuf.MAGIC):
                self.events.append(protobuf.decoded("Event", protobuf.message_of(body)))
            else:
                self.events.append(json.loads(body) if body else {})
            _reply(peer, 201, {})
        elif request.query.get("watch") == "true":
            self._watch(peer, request, request.kind)
        else:
            self._list(peer, request, request.kind)

    def _misbehave(self, peer: Peer, fault: Fault) -> None:
        match fault.what:
            case "status":
                _reply(peer, fault.code, status(fault.code), retry_after=fault.retry_after)
            case "html":
                _raw(peer, 200, b"<html>Please log in</html>", "text/html")
            case "reset":
                peer.close(reset=True)
            case "silence":
                pass
            case "truncated":
                _open_stream(peer)
                _chunk(peer, b'{"type":"ADDED","object":{"metadata":{"na')
                peer.close()
            case "malformed":
                _open_stream(peer)
                _chunk(peer, b'{"type":\n')
                _chunk(peer, b"")
            case "ended":
                _open_stream(peer)
                _chunk(peer, b"")
            case _:
                _reply(peer, 200, {"kind": "PodList", "metadata": {"resourceVersion": "1"}})

    # Lists

    def _list(self, peer: Peer, request: _Request, kind: Kind) -> None:
        query = request.query
        wanted = int(query.get("resourceVersion") or 0)
        if wanted > self._version:
            cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
            late = status(504, "Too large resource version", details={"causes": [cause]})
            self._universe.after(3.0, lambda: _reply(peer, 504, late))
            return
        start = ""
        if token := query.get("continue"):
            version, start = read_token(token)
            if version < self._etcd.compacted:
                _reply(peer, 410, status(410))
                return
        found = self._select(kind, request.selector)
        rest = [obj for obj in found if "/".join(key_of(obj)) + "\0" > start]
        page = rest[: int(query.get("limit") or 0) or None]
        meta = {"resourceVersion": str(self._version)}
        if len(page) < len(rest):
            meta["continue"] = continue_token(self._version, key_of(page[-1]))
        head = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": meta}
        _reply(peer, 200, {**head, "items": page})

    def _select(self, kind: Kind, selector: Selector) -> list[Object]:
        return sorted(filter(selector.matches, self._cache[kind.kind].values()), key=key_of)

    # Watches

    def _watch(self, peer: Peer, request: _Request, kind: Kind) -> None:
        since = int(request.query.get("resourceVersion") or 0)
        streaming = request.query.get("sendInitialEvents") == "true"
        if streaming and not self.watch_list:
            _reply(peer, 422, status(422, "sendInitialEvents is forbidden"))
            return
        _open_stream(peer)
        watch = Watch(kind, request.selector, peer, self._version)
        if 0 < since < self._etcd.compacted:
            self._send(watch, {"type": "ERROR", "object": status(410, "too old")})
            _chunk(peer, b"")
            return
        if streaming:
            for obj in self._select(kind, watch.selector):
                self._send(watch, {"type": "ADDED", "object": obj})
            self._send(watch, bookmark(kind, self._version, initial_end=True))
        else:
            for change in tuple(self._etcd.history):
                if since < change.version <= self._version and change.kind == kind.kind:
                    self._tell(watch, change)
        watch.version = max(self._version, since)
        self._watches.append(watch)
        seconds = float(request.query.get("timeoutSeconds") or 3600)
        self._universe.after(seconds, lambda: self._end(watch))
        self._universe.after(_BOOKMARKS, lambda: self._bookmark(watch))

    def _tell(self, watch: Watch, change: Change) -> None:
        event = watch_event(change, watch.selector)
        if event is not None:
            self._send(watch, event)

    def _send(self, watch: Watch, event: Object) -> None:
        if watch.open and not watch.stalled:
            _chunk(watch.peer, json.dumps(event, separators=(",", ":")).encode() + b"\n")

    def _bookmark(self, watch: Watch) -> None:
        if watch.open:
            self._send(watch, bookmark(watch.kind, self._version))
            self._universe.after(_BOOKMARKS, lambda: self._bookmark(watch))

    def _end(self, watch: Watch) -> None:
        if watch.open and not watch.stalled:
            _chunk(watch.peer, b"")
            self._forget(watch)

    def _closed(self, peer: Peer) -> None:
        self._peers.pop(peer, None)
        for watch in tuple(self._watches):
            if watch.peer is peer:
                self._forget(watch)

    def _forget(self, watch: Watch) -> None:
        watch.open = False
        if watch in self._watches:
            self._watches.remove(watch)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _raw(peer: Peer, code: int, body: bytes, content_type: str, more: str = "") -> None:
    head = f"HTTP/1.1 {code} X\r\nContent-Type: {content_type}\r\n{more}"
    peer.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def _reply(peer: Peer, code: int, value: Object, retry_after: int = 0) -> None:
    wish = f"Retry-After: {retry_after}\r\n" if retry_after else ""
    _raw(peer, code, json.dumps(value).encode(), "application/json", wish)


def _open_stream(peer: Peer) -> None:
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    peer.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())


def _chunk(peer: Peer, data: bytes) -> None:
    peer.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")
