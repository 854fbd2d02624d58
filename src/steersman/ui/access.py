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
import string
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from steersman.operate.answer import QuestionError
from steersman.run.serve.http import Answer, Request
from steersman.source.client import ApiClient, Connections
from steersman.source.kubeconfig import ClusterAccess as ApiServers
from steersman.source.pace import Timing
from steersman.source.stats import SourceStats
from steersman.source.wire import ApiError
from steersman.ui.requests import Asked, Form, RefusedError, Route, cookie
from steersman.ui.sampling import Shared

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
COOKIE = "steersman_session"
HTML = "text/html; charset=utf-8"
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

    def routes(self, render: Callable[..., str]) -> tuple[Route, ...]:  # noqa: ARG002
        """Return the addresses that this way of access needs; `render` renders a template."""
        return ()

    async def check(self, request: Request, values: Mapping[str, str]) -> None:  # noqa: ARG002
        """Let a request pass.

        Args:
            request: the request.
            values: parts of its path, by name.

        Raises:
            RefusedError: it may not.
        """
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if ":" in host else host
        if host not in _LOOPBACK and name not in _LOOPBACK:
            raise RefusedError(403, f"this server is not {host}: ask for localhost\n")

    async def sees_pods(self, namespace: str) -> bool:  # noqa: ARG002
        """Return whether the reader whose request is answered now may look up pods there."""
        return True

    async def check_action(self, request: Request, form: Form) -> None:
        """Let a request pass that starts something; raises as `check`."""
        headers = request.headers
        site, origin = headers.get("sec-fetch-site", "same-origin"), headers.get("origin", "")
        same = not origin or origin.partition("://")[2] == headers.get("host", "")
        if site != "same-origin" or not same:
            raise RefusedError(403, "this request comes from another site\n")
        token = headers.get("x-csrf-token") or form.text("csrf")
        if not hmac.compare_digest(token.encode(errors="surrogateescape"), self.token.encode()):
            raise RefusedError(403, "this page is of an earlier server: load it again\n")


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
"""The user whose request is answered; each connection has a task, and so a context, of its own."""


class _Status(msgspec.Struct, frozen=True):
    """`status` of a TokenReview or a SubjectAccessReview."""

    authenticated: bool = False
    user: User = User()
    allowed: bool = False
    denied: bool = False


class _Review(msgspec.Struct, frozen=True):
    status: _Status = _Status()


class Reviewer:
    """Asks the API server who somebody is and what they may do, with this server's own account.

    It raises QuestionError if the API server does not say so.
    """

    def __init__(self, servers: ApiServers) -> None:
        """Create it; nothing is asked yet."""
        timing = Timing(connect=5.0, answer=10.0)  # a reader waits
        self._client = ApiClient(Connections(servers, timing), SourceStats(), timing)

    async def user(self, token: str) -> User | None:
        """Return the user of a bearer token; None if it is not valid."""
        status = await self._ask("authentication", "TokenReview", {"token": token})
        return status.user if status.authenticated else None

    async def allowed(self, user: User, right: Right) -> bool:
        """Return whether a user has a right."""
        asked = {
            "user": user.username,
            "uid": user.uid,
            "groups": user.groups,
            "extra": user.extra,
            "resourceAttributes": right._asdict(),
        }
        status = await self._ask("authorization", "SubjectAccessReview", asked)
        return status.allowed and not status.denied

    async def _ask(self, group: str, kind: str, spec: object) -> _Status:
        version = f"{group}.k8s.io/v1"
        body = {"apiVersion": version, "kind": kind, "spec": spec}
        try:
            found = await self._client.post(f"/apis/{version}/{kind.lower()}s", body)
            return msgspec.json.decode(found, type=_Review).status
        except (ApiError, msgspec.DecodeError) as error:
            text = f"the API server does not say who may see this ({kind}): {error}"
            raise QuestionError(text) from error


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
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._users = Shared[bytes, User | None](_MOST_KEPT, _KEPT, clock)
        self._rights = Shared[tuple[bytes, Right], bool](_MOST_KEPT, _KEPT, clock)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def routes(self, render: Callable[..., str]) -> tuple[Route, ...]:
        """Return the login form, what it sends to, and the answer for probes."""

        def page(target: str, problem: str = "", status: int = 200) -> Answer:
            html = render(
                "login.html", page=None, query={}, events="", target=target, problem=problem
            )
            return Answer(html, status, HTML)

        async def alive(_: Asked) -> Answer:
            return Answer("ok\n")

        async def form(asked: Asked) -> Answer:
            return page(_local(asked.request.query.get("next", "")))

        async def log_in(asked: Asked) -> Answer:
            await Access.check_action(self, asked.request, asked.form)
            token, target = asked.form.text("token").strip(), _local(asked.form.text("next"))
            if not token or await self._user(token) is None:
                return page(target, "The API server does not accept this token.", 401)
            return see_other(target, self._begin_session(token, asked.request))

        async def log_out(asked: Asked) -> Answer:
            await Access.check_action(self, asked.request, asked.form)
            self._sessions.pop(cookie(asked.request, COOKIE), None)
            return see_other(LOGIN, f"{COOKIE}=; Max-Age=0; Path=/")

        return (
            Route("GET", LOGIN, form, is_open=True),
            Route("POST", LOGIN, log_in, is_open=True),
            Route("POST", LOGOUT, log_out, is_open=True),
            Route("GET", ALIVE, alive, is_open=True),
        )

    async def check(self, request: Request, values: Mapping[str, str]) -> None:
        """Let a request pass if its user may see the page; raises as in `Access`."""
        rights: tuple[Right, ...] = (Right("list", "nodes"), Right("list", "services"))
        if namespace := values.get("namespace", ""):
            slices = Right("list", "endpointslices", "discovery.k8s.io", namespace)
            rights = (Right("get", "services", "", namespace), slices)
        await self._check(request, rights)

    async def check_action(self, request: Request, form: Form) -> None:
        """Let a request pass that starts something; raises as `check`."""
        if "authorization" not in request.headers:  # a browser never adds it by itself
            await super().check_action(request, form)
        exec_ = Right("create", "pods", "", self._namespace, "exec")
        await self._check(request, (exec_,))

    async def _check(self, request: Request, rights: Iterable[Right]) -> None:
        # Without a token that is valid, a browser that opens a page is sent to the form.
        _reader.set(None)
        token = self._token_of(request)
        user = await self._user(token) if token else None
        if user is None:
            opens = request.method == "GET" and "text/html" in request.headers.get("accept", "")
            if opens and "authorization" not in request.headers:
                to_form = {"Location": f"{LOGIN}?next={quote(request.target, safe='/?')}"}
                raise RefusedError(303, headers=to_form)
            text = (
                "you are not logged in: load this page again, or send a token that the API server "
                "accepts (Authorization: Bearer TOKEN)\n"
            )
            raise RefusedError(401, text, {"WWW-Authenticate": "Bearer"})
        for right in rights:
            if not await self._may(user, right):
                text = f"{user.username} may not {right}, which this needs\n"
                raise RefusedError(403, text)
        _reader.set(user)

    async def _may(self, user: User, right: Right) -> bool:
        review = self._in_turn(self._reviewer.allowed, user, right)
        return await self._rights.get((msgspec.json.encode(user), right), review)

    def _in_turn(
        self, ask: Callable[..., Awaitable[ValueT]], *about: object
    ) -> Callable[[], Awaitable[ValueT]]:
        """Return what asks the reviewer as soon as few enough others do."""

        async def review() -> ValueT:
            async with self._at_once:
                return await ask(*about)

        return review

    async def sees_pods(self, namespace: str) -> bool:
        """Return whether the reader whose request is answered now may look up pods there."""
        user = _reader.get()
        return user is not None and await self._may(user, Right("get", "pods", "", namespace))

    def _token_of(self, request: Request) -> str:
        """Return the bearer token of a request or of its session; "" if there is none."""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind:
            return given.strip() if kind.lower() == "bearer" else ""
        name = cookie(request, COOKIE)
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
        return await self._users.get(key, self._in_turn(self._reviewer.user, token))

    def _begin_session(self, token: str, request: Request) -> str:
        """Begin a session; return its cookie, as a header sets it."""
        name, now = secrets.token_urlsafe(32), self._clock()
        self._sessions[name] = _Session(token, now, now)
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)  # the one that was idle for longest
        secure = "; Secure" if request.headers.get("x-forwarded-proto", "") == "https" else ""
        return f"{COOKIE}={name}; HttpOnly; Path=/; SameSite=Strict{secure}"


def see_other(target: str, set_cookie: str = "") -> Answer:
    """Send a browser to another address of this server."""
    ascii_target = quote(target, safe=string.punctuation)
    cookies = {"Set-Cookie": set_cookie} if set_cookie else {}
    return Answer(status=303, more_headers={"Location": ascii_target, **cookies})


def _local(target: str) -> str:
    """Return an address of this server; never one of another, wherever a link wants to lead."""
    plain = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if plain else "/"
