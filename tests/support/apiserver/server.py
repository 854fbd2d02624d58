"""An API server for tests: speaks list and watch as the real one does, and misbehaves on demand.

In the test's own loop: `async with ApiServer() as server`. In a thread: `ServerThread` of
`tests.support.apiserver.remote`. As a process:
`python -m tests.support.apiserver.server --port N --objects FILE`; it prints
`listening on URL`. Every method named in OPERATIONS can also be called with
`POST /__control__ {"op": NAME, ...arguments}`, see `tests.support.apiserver.remote.control`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import signal
import ssl
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

from aiohttp import web

from steersman.source.kubeconfig import ClusterAccess, Material
from tests.support.apiserver import events as apiserver_events
from tests.support.apiserver import pods, protobuf
from tests.support.apiserver.answers import (
    JSON_ONLY,
    answer_expired,
    answer_status,
    answer_too_large,
    answer_value,
    bare,
    encoded_event,
    open_stream,
    selector_of,
    subject_of,
    too_old,
    verb_of,
    wants_protobuf,
)
from tests.support.apiserver.http2 import Front
from tests.support.apiserver.reviews import RIGHTS, TOKENS, Reviews
from tests.support.apiserver.world import (
    KINDS,
    Change,
    Kind,
    Object,
    Selector,
    World,
    bookmark,
    continue_token,
    key_of,
    read_objects,
    read_token,
    status,
    watch_event,
)
from tests.support.apiserver.writing import Writing

OPERATIONS = (
    *("add", "update", "apply", "delete", "load", "objects", "requests", "configure"),
    *("fault", "clear_faults", "drop", "stall", "send", "expire", "compact", "restart"),
)


@dataclass
class Fault:
    """How to answer the next `times` requests (-1: all) of a kind and verb ("": any).

    what: status, html, redirect, empty, drop, stall, truncate, huge_line, error_event, wrong_kind,
    end (a watch that ends at once).
    """

    what: str
    kind: str = ""
    verb: str = ""
    times: int = 1
    skip: int = 0
    """Requests that it would take, but lets pass first."""
    status: int = 500
    retry_after: int = 0
    message: str = ""

    def takes(self, kind: str, verb: str) -> bool:
        return self.times != 0 and self.kind in ("", kind) and self.verb in ("", verb)


@dataclass(frozen=True)
class Request:
    time: float
    kind: str
    verb: str
    """list, watch, watchlist or create."""
    query: dict[str, str]
    headers: dict[str, str]
    subject: str = ""
    """Common name of the client's certificate."""


@dataclass(eq=False)
class Watcher:
    kind: str
    request: web.Request
    selector: Selector
    after: int
    """The client has everything up to this resourceVersion."""
    transport: asyncio.Transport | None = None
    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class ApiServer:
    """Serves a World on a loopback port."""

    http2: ClassVar[bool] = False
    """Speak HTTP/2 where there is TLS, and at `access` in any case."""

    def __init__(
        self,
        objects: Iterable[Object] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        world: World | None = None,
    ) -> None:
        self.world = world or World()
        self.world.listeners.append(self._publish)
        self.log: list[Request] = []
        self.refused: list[tuple[Request, int]] = []
        """Requests answered with an error status, and that."""
        self.events: list[Object] = []
        """Events that were posted."""
        self.pods: dict[tuple[str, str], str] = {}
        """URL behind `[https:]NAME:PORT` of a pod in a namespace, for its proxy."""
        self.reviews = Reviews()
        self.writing = Writing(self.world)
        self.tokens: frozenset[str] = frozenset()
        """Accepted bearer tokens; empty: no authentication."""
        self.forbidden: frozenset[str] = frozenset()
        self.absent: frozenset[str] = frozenset()
        self.watch_list = "on"  # off: 422 as servers do without the feature; ignore: as before it
        self.protobuf = True
        self.bookmark_seconds = 60.0
        self.stalled = False
        self._faults: list[Fault] = []
        self._watchers: set[Watcher] = set()
        self._encoded: dict[tuple[Selector, bool], tuple[Change, bytes]] = {}
        self._connections: set[asyncio.Transport] = set()
        self._host, self._port, self._tls = host, port, tls
        self.front: Front | None = None
        """Speaks HTTP/2."""
        self.load(objects)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/__control__", self._control)
        app.router.add_get("/readyz", _ready)
        for kind in KINDS.values():
            app.router.add_get(kind.path, self._serve)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._serve)
        app.router.add_route("*", pods.PROXY, self._proxy)
        app.router.add_post(apiserver_events.PATH, self._take_event)
        app.router.add_post(TOKENS, self.reviews.token)
        app.router.add_post(RIGHTS, self.reviews.right)
        self.writing.add_routes(app.router)
        app.router.add_route("*", "/{rest:.*}", _not_found)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await self._listen()
        return self

    async def _listen(self) -> None:
        behind = self.http2 and self._tls is not None
        self._site = web.TCPSite(
            self._runner,
            "127.0.0.1" if behind else self._host,
            0 if behind else self._port,
            ssl_context=None if behind else self._tls,
            reuse_address=True,
        )
        await self._site.start()
        inner: int = self._runner.addresses[0][1]
        if self._port == 0 and not behind:
            self._port = inner
        if self.http2:
            port = self._port if behind else self.front.port if self.front else 0
            tls = self._tls or _certified().context
            self.front = await Front(inner, self._host, port, tls).listen()
            if behind:
                self._port = self.front.port

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drop()
        if self.front is not None:
            await self.front.close()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self._port}"

    @property
    def access(self) -> ClusterAccess:
        """How a client reaches a server without a TLS context: in HTTP/2 if that is on."""
        if self.front is None:
            return ClusterAccess(servers=(self.url,))
        url = f"https://127.0.0.1:{self.front.port}"
        return ClusterAccess(servers=(url,), ca=Material(data=_certified().ca))

    async def stop_listening(self) -> None:
        """Be down: refuse connections, drop those there are."""
        await self._site.stop()
        if self.front is not None:
            await self.front.close()
        self.drop()

    async def listen_again(self) -> None:
        await self._listen()

    # What tests do to the world

    def add(self, obj: Object) -> str:
        """Add or change an object; return its resourceVersion."""
        return str(self.world.put(obj).version)

    update = apply = add

    def delete(self, kind: str, name: str, namespace: str = "") -> None:
        self.world.delete(kind, (namespace, name))

    def load(self, objects: Iterable[Object]) -> None:
        for obj in objects:
            self.add(obj)

    def objects(self, kind: str) -> list[Object]:
        return self.world.select(kind, Selector())

    # What tests make it do wrong

    def fault(self, what: str, **how: Any) -> None:
        self._faults.append(Fault(what, **how))

    def clear_faults(self) -> None:
        self._faults.clear()

    def drop(self, kind: str = "") -> None:
        """Cut the connections of open watches, without an end of the answer."""
        for watcher in list(self._watchers):
            if kind in ("", watcher.kind) and watcher.transport is not None:
                self._watchers.discard(watcher)
                with suppress(AttributeError):  # TLS that is closed already, before Python 3.11.4
                    watcher.transport.abort()
                watcher.queue.put_nowait(None)

    def stall(self, on: bool = True) -> None:
        """Accept watches, but send nothing (what happened is lost to them)."""
        self.stalled = on

    def send(self, kind: str, text: str) -> None:
        """Send text into the open watches of a kind, as it is."""
        for watcher in self._watchers:
            if watcher.kind == kind:
                watcher.queue.put_nowait(text.encode())

    def expire(self) -> None:
        """Forget the history and tell open watches so (410 as an ERROR event)."""
        self.compact()
        for watcher in list(self._watchers):
            event = too_old(watcher.after, self.world.version)
            watcher.queue.put_nowait(encoded_event(event, watcher.request))
            watcher.queue.put_nowait(None)

    def compact(self) -> None:
        """Forget the history; open watches go on."""
        self.world.compact()

    def restart(self, version: int = 1) -> None:
        """Come back with another history of resourceVersions, as after a restore."""
        self.drop()
        self.world.restart(version)

    def restore(self, dice: random.Random) -> None:
        """Come back with resourceVersions that it has never had, below or above all of these."""
        self.drop()
        self.world.restore(dice)

    def configure(self, **settings: Any) -> None:
        """Set tokens, forbidden, absent (lists), protobuf, watch_list, bookmark_seconds."""
        for name, value in settings.items():
            assert hasattr(self, name), name
            setattr(self, name, frozenset(value) if isinstance(value, list) else value)

    def requests(self, kind: str = "", verb: str = "") -> list[Request]:
        return [r for r in self.log if kind in ("", r.kind) and verb in ("", r.verb)]

    def watching(self, kind: str = "") -> int:
        """How many watches are open."""
        return sum(kind in ("", watcher.kind) for watcher in self._watchers)

    # How it answers

    async def _control(self, request: web.Request) -> web.Response:
        arguments = json.loads(await request.read())
        operation = arguments.pop("op")
        if operation not in OPERATIONS:
            return web.json_response({"error": f"no operation {operation}"}, status=400)
        if operation in ("add", "update", "apply"):
            arguments = {"obj": arguments["object"]}
        when = time.monotonic()
        result = getattr(self, operation)(**arguments)
        if operation == "requests":
            result = [asdict(entry) for entry in result]
        version = str(self.world.version)
        return web.json_response({"result": result, "resourceVersion": version, "time": when})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        kind = next((kind for kind in KINDS.values() if kind.path == request.path), KINDS["Pod"])
        verb = verb_of(request)
        answer = await self._special(request, kind, verb)
        if answer is not None:
            return answer
        return await (self._list if verb == "list" else self._watch)(request, kind)

    async def _take_event(self, request: web.Request) -> web.StreamResponse:
        answer = await self._special(request, apiserver_events.EVENT, "create")
        return answer if answer is not None else await apiserver_events.take(request, self.events)

    async def _proxy(self, request: web.Request) -> web.StreamResponse:
        answer = await self._special(request, pods.PROXIED, request.method.lower())
        return answer if answer is not None else await pods.proxy(request, self.pods)

    async def _special(
        self, request: web.Request, kind: Kind, verb: str
    ) -> web.StreamResponse | None:
        """Log a request; the answer if it is refused or meets a fault."""
        query, headers = dict(request.query), dict(request.headers)
        entry = Request(_now(), kind.kind, verb, query, headers, subject_of(request))
        self.log.append(entry)
        request[JSON_ONLY] = not self.protobuf
        answer = self._refusal(request, kind) or await self._faulty(request, kind, verb)
        if answer is not None and answer.status >= 400:
            self.refused.append((entry, answer.status))
        return answer

    async def _faulty(
        self, request: web.Request, kind: Kind, verb: str
    ) -> web.StreamResponse | None:
        fault = next((f for f in self._faults if f.takes(kind.kind, verb)), None)
        if fault is not None and fault.skip:
            fault.skip -= 1
        elif fault is not None:
            fault.times -= fault.times > 0
            return await self._misbehave(request, fault, kind)
        return None

    def _refusal(self, request: web.Request, kind: Kind) -> web.Response | None:
        accepted = request.headers.get("Accept", "*/*")
        if not self.protobuf and not any(each in accepted for each in ("json", "*")):
            return answer_status(request, 406, "only application/json is spoken here")
        if not self.protobuf and request.content_type == protobuf.CONTENT_TYPE:
            return answer_status(request, 415, "only application/json is understood here")
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.tokens and bearer not in self.tokens:
            return answer_status(request, 401, "Unauthorized")
        if kind.kind in self.forbidden:
            plural = kind.path.rsplit("/", 1)[1]
            group = kind.api_version.rpartition("/")[0]
            message = (
                f'{plural} is forbidden: User "system:kube-proxy" cannot list resource "{plural}" '
                f'in API group "{group}" at the cluster scope'
            )
            return answer_status(request, 403, message, details={"kind": plural})
        if kind.kind in self.absent:
            text = "the server could not find the requested resource"
            return answer_status(request, 404, text, details={})
        return None

    async def _misbehave(
        self, request: web.Request, fault: Fault, kind: Kind
    ) -> web.StreamResponse | None:
        match fault.what:
            case "status":
                wish = {"Retry-After": str(fault.retry_after)} if fault.retry_after else {}
                return answer_status(request, fault.status, fault.message, headers=wish)
            case "html":
                page = "<html><body>Please log in</body></html>"
                return web.Response(text=page, content_type="text/html")
            case "redirect":
                return web.Response(status=302, headers={"Location": "/login"})
            case "empty":
                return answer_value(request, {})
            case "wrong_kind":
                return answer_value(
                    request, {"kind": "PodList", "metadata": {"resourceVersion": "1"}}
                )
            case "drop":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case "stall":
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.Event().wait(), 60)
                return web.Response()
        return await self._spoil(request, fault, kind)

    async def _spoil(self, request: web.Request, fault: Fault, kind: Kind) -> web.StreamResponse:
        """Answer 200 and then send what nobody asked for."""
        response = await open_stream(request)
        match fault.what:
            case "truncate":
                if wants_protobuf(request):
                    whole = protobuf.frame_of(bookmark(kind, self.world.version))
                    await response.write(whole[:-3])
                    return response
                await response.write(b'{"kind":"' + kind.kind.encode() + b'List","metadata":{"re')
            case "huge_line":
                if wants_protobuf(request):
                    await response.write((10 << 20).to_bytes(4))
                await response.write(b'{"type":"ADDED","object":{"metadata":{"name":"')
                for _ in range(10):
                    await response.write(b"x" * (1 << 20))
                await response.write(b'"}}}\n')
            case "error_event":
                event = {"type": "ERROR", "object": status(fault.status, fault.message)}
                await response.write(encoded_event(event, request))
            case "end":
                pass
            case _:
                raise AssertionError(fault.what)
        return response

    async def _list(self, request: web.Request, kind: Kind) -> web.Response:
        query, world = request.query, self.world
        version, wanted = world.version, int(query.get("resourceVersion") or 0)
        if wanted > version:
            return answer_too_large(request, wanted, version)
        if query.get("resourceVersionMatch") == "Exact" and wanted < world.compacted:
            return answer_status(
                request, 410, "The resourceVersion for the provided list is too old."
            )
        selector = selector_of(request)
        start, limit = "", int(query.get("limit") or 0)
        if token := query.get("continue"):
            version, start = read_token(token)
            if version == -1:
                version = world.version
            elif (version, kind.kind) not in world.pages:
                return answer_expired(request, start)
        found = world.pages.get((version, kind.kind)) if token else None
        found = world.select(kind.kind, selector) if found is None else found
        rest = [obj for obj in found if "/".join(filter(None, key_of(obj))) + "\0" > start]
        page = rest[:limit] if limit else rest
        meta = {"resourceVersion": str(version)}
        if len(page) < len(rest):
            world.pages[version, kind.kind] = found
            meta["continue"] = continue_token(version, key_of(page[-1]))
            if not selector:
                meta["remainingItemCount"] = len(rest) - len(page)  # type: ignore[assignment]
        head = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": meta}
        return answer_value(request, {**head, "items": [bare(obj) for obj in page]})

    async def _watch(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        streaming = request.query.get("sendInitialEvents") == "true"
        if streaming and self.watch_list == "off":
            text = (
                'ListOptions.meta.k8s.io "" is invalid: sendInitialEvents: Forbidden: '
                "sendInitialEvents is forbidden for watch unless the WatchList feature gate is "
                "enabled"
            )
            return answer_status(request, 422, text)
        response = await open_stream(request)
        since = int(request.query.get("resourceVersion") or 0)
        if 0 < since < self.world.compacted:
            gone = too_old(since, self.world.version)
            await response.write(encoded_event(gone, request))
            return response
        transport = request.transport
        watcher = Watcher(kind.kind, request, selector_of(request), since)
        watcher.transport = transport if isinstance(transport, asyncio.Transport) else None
        self._begin(watcher, kind, streaming)
        self._watchers.add(watcher)
        try:
            deadline = float(request.query.get("timeoutSeconds") or 3600)
            await self._feed(response, watcher, kind, _now() + deadline)
        except ConnectionError:
            pass  # the client went away
        finally:
            self._watchers.discard(watcher)
        return response

    def _begin(self, watcher: Watcher, kind: Kind, streaming: bool) -> None:
        """Queue what the watch begins with: the state, or what happened since."""
        if watcher.after:
            for change in self.world.since(watcher.after):
                self._enqueue(watcher, change)
            return
        watcher.after = self.world.version
        for obj in self.world.select(kind.kind, watcher.selector):
            added = {"type": "ADDED", "object": obj}
            watcher.queue.put_nowait(encoded_event(added, watcher.request))
        if streaming and self.watch_list == "on":
            end = bookmark(kind, self.world.version, initial_end=True)
            watcher.queue.put_nowait(encoded_event(end, watcher.request))

    async def _feed(
        self, response: web.StreamResponse, watcher: Watcher, kind: Kind, deadline: float
    ) -> None:
        next_bookmark = _now() + self.bookmark_seconds
        while (now := _now()) < deadline:
            wait = min(deadline, next_bookmark) - now
            try:
                text = await asyncio.wait_for(watcher.queue.get(), max(wait, 0))
            except TimeoutError:
                if _now() < next_bookmark:
                    return
                next_bookmark += self.bookmark_seconds
                if self.stalled or watcher.after > self.world.version:
                    continue  # nothing is sent from the future (recordings)
                text = encoded_event(bookmark(kind, self.world.version), watcher.request)
            if text is None:
                return
            if not self.stalled:
                await response.write(text)

    def _publish(self, change: Change) -> None:
        for watcher in self._watchers:
            self._enqueue(watcher, change)

    def _enqueue(self, watcher: Watcher, change: Change) -> None:
        if watcher.kind == change.kind and change.version > watcher.after:
            text = self._encode(change, watcher)
            if text:
                watcher.queue.put_nowait(text)

    def _encode(self, change: Change, watcher: Watcher) -> bytes:
        """An event as sent, made once for all watches alike; b"" if they do not see it."""
        key = watcher.selector, wants_protobuf(watcher.request)
        known = self._encoded.get(key)
        if known is None or known[0] is not change:
            event = watch_event(change, watcher.selector)
            text = encoded_event(event, watcher.request) if event else b""
            known = self._encoded[key] = (change, text)
        return known[1]


class _Certified(NamedTuple):
    ca: bytes
    context: ssl.SSLContext


@cache
def _certified() -> _Certified:
    """A certificate for loopback, made once in each process."""
    from tests.support.apiserver.certificates import Authority  # noqa: PLC0415 - takes 0.2 s

    authority = Authority()
    with tempfile.TemporaryDirectory() as folder:
        return _Certified(authority.pem, authority.server_context(Path(folder)))


def _now() -> float:
    """The time of the loop, which is virtual in some tests."""
    return asyncio.get_running_loop().time()


async def _not_found(request: web.Request) -> web.Response:
    return answer_status(
        request, 404, "the server could not find the requested resource", details={}
    )


async def _ready(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _main(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    objects = [obj for path in args.objects for obj in read_objects(path)]
    server = ApiServer(objects, host=args.host, port=args.port)
    if args.no_watch_list:
        server.watch_list = "off"
    gc.collect()
    gc.freeze()  # to walk a large world takes a second, in which no event is sent
    async with server:
        print(f"listening on {server.url}", flush=True)
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--objects", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--no-watch-list", action="store_true")
    asyncio.run(_main(parser.parse_args()))
