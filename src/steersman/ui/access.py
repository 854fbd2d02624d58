"""Who may see a page, and start something from it.

On an operator's machine (`Access`) the server listens on loopback, and every user of the machine
may look. A page of another site could still send requests there, so the Host of each request must
be a name of loopback (DNS rebinding), and actions need the token that only our own pages contain.

In the cluster (`ClusterAccess`) the API server decides, as it does for kubectl. A reader brings a
bearer token: in each request, or once in the login form; then a cookie holds the random name of a
session, and the token stays here. The token is reviewed (TokenReview), and then what its user may
do (SubjectAccessReview):

    page of a Service        get services, list endpointslices in its namespace; get pods in that
                             of a client, if it is another one
    every other page         list nodes, list services in all namespaces
    actions (doctor, trace)  create pods/exec in steersman's namespace: who may run commands in
                             its pods can do the same without us; and the right to see the page

Answers, refusals too, are kept for ten seconds, so open pages end soon after a right is taken away.
The cookie is sent to this host only (a rebound name gets none), and never by pages of other sites
(SameSite=Strict).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import web

from steersman.operate.answer import QuestionError
from steersman.source.base import SourceStats, Timing
from steersman.source.client import ApiClient
from steersman.source.kubeconfig import ClusterAccess as ApiServers
from steersman.source.wire import ApiError

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
COOKIE = "steersman_session"
LOGIN, LOGOUT, ALIVE = "/login", "/logout", "/healthz"
_KEPT = 10.0  # seconds that an answer of the API server counts
_MOST_KEPT = 4096  # answers
_MOST_SESSIONS = 1000
_LONGEST_SESSION = 8 * 3600.0
_LONGEST_IDLE = 3600.0
_LONGEST_TOKEN = 16 << 10  # characters; headers are no longer either
_AT_ONCE = 8  # reviews; readers without rights must not flood the API server

ValueT = TypeVar("ValueT")


class Access:
    """Lets everybody on this machine look, and start what our own pages offer."""

    has_login = False
    """Whether pages offer to log out."""

    def __init__(self) -> None:
        """Choose a token against forged requests."""
        self.token = secrets.token_urlsafe(24)
        """Part of each form."""

    def add_to(self, app: web.Application, render: Callable[..., str]) -> None:
        """Add the addresses that this way of access needs; `render` renders a template."""

    async def check(self, request: web.Request) -> None:
        """Let a request pass.

        Raises:
            web.HTTPForbidden, web.HTTPUnauthorized: it may not.
        """
        host = request.host.rpartition(":")[0] if ":" in request.host else request.host
        if request.host not in _LOOPBACK and host not in _LOOPBACK:
            raise web.HTTPForbidden(text=f"this server is not {request.host}: ask for localhost\n")

    async def sees_pods(self, namespace: str) -> bool:  # noqa: ARG002
        """Return whether the reader whose request is answered now may look up pods there."""
        return True

    async def check_action(self, request: web.Request) -> None:
        """Let a request pass that starts something; raises as `check`."""
        site = request.headers.get("Sec-Fetch-Site", "same-origin")
        origin = request.headers.get("Origin", "")
        if site != "same-origin" or (origin and origin.partition("://")[2] != request.host):
            raise web.HTTPForbidden(text="this request comes from another site\n")
        token = request.headers.get("X-CSRF-Token") or str((await request.post()).get("csrf", ""))
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise web.HTTPForbidden(text="this page is of an earlier server: load it again\n")


class Right(NamedTuple):
    """Something that a user may do or not, as RBAC says it."""

    verb: str
    resource: str
    group: str = ""
    namespace: str = ""
    """"" for all namespaces, or if the resource has none."""
    subresource: str = ""

    def __str__(self) -> str:
        what = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        where = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {what}{f'.{self.group}' if self.group else ''}{where}"


class User(msgspec.Struct, frozen=True):
    """The user of a token, as the API server knows it."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


_reader: ContextVar[User | None] = ContextVar("reader", default=None)
"""The user whose request is answered; each request has a task, and so a context, of its own."""


class _TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: User = User()


class _AccessStatus(msgspec.Struct, frozen=True):
    allowed: bool = False
    denied: bool = False


class _TokenReview(msgspec.Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


class Reviewer(Protocol):
    """Asks who somebody is, and what they may do; raises QuestionError if nobody answers."""

    async def user(self, token: str) -> User | None:
        """Return the user of a bearer token; None if it is not valid."""

    async def allowed(self, user: User, right: Right) -> bool:
        """Return whether a user has a right."""


class ApiReviewer:
    """Asks the API server, with the rights of this server's own account."""

    def __init__(self, servers: ApiServers) -> None:
        """Create it; nothing is asked yet."""
        self._servers = servers

    async def user(self, token: str) -> User | None:
        """Return the user of a bearer token; None if it is not valid."""
        review = await self._ask("authentication", "TokenReview", {"token": token}, _TokenReview)
        return review.status.user if review.status.authenticated else None

    async def allowed(self, user: User, right: Right) -> bool:
        """Return whether a user has a right."""
        asked = {
            "user": user.username,
            "uid": user.uid,
            "groups": user.groups,
            "extra": user.extra,
            "resourceAttributes": right._asdict(),
        }
        review = await self._ask("authorization", "SubjectAccessReview", asked, _AccessReview)
        return review.status.allowed and not review.status.denied

    async def _ask(self, group: str, kind: str, spec: object, answer: type[ValueT]) -> ValueT:
        version = f"{group}.k8s.io/v1"
        body = {"apiVersion": version, "kind": kind, "spec": spec}
        timing = Timing(connect=5.0, answer=10.0)  # a reader waits
        try:
            async with ApiClient(self._servers, SourceStats(), timing) as client:
                found = await client.post(f"/apis/{version}/{kind.lower()}s", body)
            return msgspec.json.decode(found, type=answer)
        except (ApiError, msgspec.DecodeError) as error:
            text = f"the API server does not say who may see this ({kind}): {error}"
            raise QuestionError(text) from error


class _Recent(Generic[ValueT]):
    """Answers of the last seconds, bounded in number; the same question is asked once at a time."""

    def __init__(self, clock: Callable[[], float], at_once: asyncio.Semaphore) -> None:
        self._clock = clock
        self._at_once = at_once
        self._kept: OrderedDict[Hashable, tuple[float, asyncio.Future[ValueT]]] = OrderedDict()

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[ValueT]]) -> ValueT:
        """Return the recent answer to a question, or ask; a failure to answer is not kept."""

        async def in_turn() -> ValueT:
            async with self._at_once:
                return await ask()

        until, answer = self._kept.get(key, (0.0, None))
        if answer is None or self._clock() >= until:
            answer = asyncio.ensure_future(in_turn())
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._kept[key] = self._clock() + _KEPT, answer
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        try:
            return await asyncio.shield(answer)  # a reader that leaves does not take it from others
        except QuestionError:
            if self._kept.get(key, (0.0, None))[1] is answer:
                del self._kept[key]
            raise


class _Session(msgspec.Struct):
    """A reader that has logged in."""

    token: str
    began: float
    used: float


class ClusterAccess(Access):
    """Asks the API server who may see and start what."""

    has_login = True

    def __init__(
        self, reviewer: Reviewer, namespace: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create it without sessions.

        Args:
            reviewer: knows users and their rights.
            namespace: of steersman's pods.
            clock: steady seconds.
        """
        super().__init__()
        self._reviewer = reviewer
        self._namespace = namespace
        self._clock = clock
        at_once = asyncio.Semaphore(_AT_ONCE)
        self._users: _Recent[User | None] = _Recent(clock, at_once)
        self._rights: _Recent[bool] = _Recent(clock, at_once)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._render: Callable[..., str] | None = None

    def add_to(self, app: web.Application, render: Callable[..., str]) -> None:
        """Add the login form, what it sends to, and the answer for probes."""
        self._render = render

        async def alive(_: web.Request) -> web.Response:
            return web.Response(text="ok\n")

        async def form(request: web.Request) -> web.Response:
            return self._page(_local(request.query.get("next", "")))

        app.router.add_get(LOGIN, form)
        app.router.add_post(LOGIN, self._login)
        app.router.add_post(LOGOUT, self._logout)
        app.router.add_get(ALIVE, alive)

    async def check(self, request: web.Request) -> None:
        """Let a request pass if its user may see the page; raises as in `Access`.

        Raises:
            web.HTTPSeeOther: a browser is sent to the login form.
        """
        if request.path not in (LOGIN, LOGOUT, ALIVE):
            rights: tuple[Right, ...] = (Right("list", "nodes"), Right("list", "services"))
            namespace = request.match_info.get("namespace", "")
            if namespace:
                slices = Right("list", "endpointslices", "discovery.k8s.io", namespace)
                rights = (Right("get", "services", "", namespace), slices)
            await self._check(request, rights)

    async def check_action(self, request: web.Request) -> None:
        """Let a request pass that starts something; raises as `check`."""
        if "Authorization" not in request.headers:  # a browser never adds it by itself
            await super().check_action(request)
        exec_ = Right("create", "pods", "", self._namespace, "exec")
        await self._check(request, (exec_,))

    async def _check(self, request: web.Request, rights: Iterable[Right]) -> None:
        # Without a token that is valid, a browser that opens a page is sent to the form.
        token = self._token_of(request)
        user = await self._user(token) if token else None
        if user is None:
            opens = request.method == "GET" and "text/html" in request.headers.get("Accept", "")
            if opens and "Authorization" not in request.headers:
                raise web.HTTPSeeOther(f"{LOGIN}?next={quote(str(request.rel_url), safe='')}")
            text = "give a token that the API server accepts: Authorization: Bearer TOKEN\n"
            raise web.HTTPUnauthorized(text=text, headers={"WWW-Authenticate": "Bearer"})
        for right in rights:
            if not await self._may(user, right):
                text = f"{user.username} may not {right}, which this needs\n"
                raise web.HTTPForbidden(text=text)
        _reader.set(user)

    async def _may(self, user: User, right: Right) -> bool:
        review = partial(self._reviewer.allowed, user, right)
        return await self._rights.get((msgspec.json.encode(user), right), review)

    async def sees_pods(self, namespace: str) -> bool:
        """Return whether the reader whose request is answered now may look up pods there."""
        user = _reader.get()
        return user is not None and await self._may(user, Right("get", "pods", "", namespace))

    def _token_of(self, request: web.Request) -> str:
        """Return the bearer token of a request or of its session; "" if there is none."""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind:
            return given.strip() if kind.lower() == "bearer" else ""
        name = request.cookies.get(COOKIE, "")
        session = self._sessions.get(name)
        if session is None:
            return ""
        now = self._clock()
        if now - session.began > _LONGEST_SESSION or now - session.used > _LONGEST_IDLE:
            del self._sessions[name]
            return ""
        session.used = now
        self._sessions.move_to_end(name)
        return session.token

    async def _user(self, token: str) -> User | None:
        if len(token) > _LONGEST_TOKEN:
            return None
        key = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        return await self._users.get(key, partial(self._reviewer.user, token))

    # The login form

    def _page(self, target: str, problem: str = "", status: int = 200) -> web.Response:
        assert self._render is not None
        html = self._render(
            "login.html", page=None, query={}, events="", target=target, problem=problem
        )
        return web.Response(text=html, status=status, content_type="text/html")

    async def _login(self, request: web.Request) -> web.Response:
        await super().check_action(request)
        form = await request.post()
        token, target = str(form.get("token", "")).strip(), _local(str(form.get("next", "")))
        if not token or await self._user(token) is None:
            return self._page(target, "The API server does not accept this token.", 401)
        name, now = secrets.token_urlsafe(32), self._clock()
        self._sessions[name] = _Session(token, now, now)
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)  # the one that was idle for longest
        response = web.Response(status=303, headers={"Location": target})
        secure = request.secure or request.headers.get("X-Forwarded-Proto", "") == "https"
        response.set_cookie(COOKIE, name, httponly=True, samesite="Strict", secure=secure, path="/")
        return response

    async def _logout(self, request: web.Request) -> web.Response:
        await super().check_action(request)
        self._sessions.pop(request.cookies.get(COOKIE, ""), None)
        response = web.Response(status=303, headers={"Location": LOGIN})
        response.del_cookie(COOKIE, path="/")
        return response


def _local(target: str) -> str:
    """Return an address of this server; never one of another, wherever a link wants to lead."""
    plain = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if plain else "/"
