"""The web application: each page is an answer of `operate/`, a template, and an address.

One address has three forms, by the Accept header:

    text/html            the page
    application/json     the answer of the page as JSON
    text/event-stream    the parts of the page that change, whenever they do

The parts that change are the blocks of the template whose names start with `live_`. When the fleet
changed, the answer is computed and these blocks are rendered again, and those whose HTML differs
from what this reader has are sent; htmx puts them into the page. So a page keeps no state on the
server but one hash per block, and a reader that connects again simply gets everything once.

The content security policy forbids inline scripts and styles and every other server, so a name that
escaped the templates' escaping could still run nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jinja2
import msgspec

from steersman import __version__
from steersman.operate.answer import QuestionError, View
from steersman.operate.fleet_view import FleetQuery, FleetView
from steersman.operate.services_view import ServicesView
from steersman.run.serve import http
from steersman.ui import filters
from steersman.ui.access import HTML, Access
from steersman.ui.doctor_runs import DoctorRuns
from steersman.ui.fleet import Fleet
from steersman.ui.requests import Asked, RefusedError, Route, read_form
from steersman.ui.sampling import Sampler, Shared

log = logging.getLogger("steersman")

Query: TypeAlias = Mapping[str, str]
"""Values of the path and of the query string, by name."""
Action: TypeAlias = Callable[["Site", Asked], Awaitable[http.Answer]]

_FOLDER = Path(__file__).parent
_STATIC = _FOLDER / "static"
_APART = 0.5  # least seconds between two updates of a page
_SHARE = 4  # an update that takes t seconds is followed by a pause of at least 4 t
_HEARTBEAT = 15.0  # seconds; proxies close connections on which nothing is sent
_MOST_READERS = 64
_PLANS = 2  # that are computed at the same time, of all readers
_PATIENCE = 60.0  # seconds until a reader that takes nothing is dropped; its browser asks again
_MOST_BODY = 2 << 20
_JSON = "application/json"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # With no-referrer, browsers send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Page(msgspec.Struct, frozen=True):
    """An address, the answer behind it, and the template that shows it."""

    path: str
    """Route, such as `/services/{namespace}/{name}`."""
    template: str
    """File in `templates/`; it gets `answer`, `query`, `page` and `site`."""
    answer: Callable[[Site, Query], Awaitable[View]]
    title: str
    nav: str = ""
    """Word in the navigation; "" for pages that others link to."""
    live: bool = True
    """Whether the page follows the fleet."""
    actions: Mapping[str, Action] = {}
    """What the page can start, by address; see `Site.action`."""


class Site:
    """Serves pages about a fleet."""

    def __init__(self, fleet: Fleet, pages: Sequence[Page], access: Access | None = None) -> None:
        """Create the application.

        Args:
            fleet: the nodes.
            pages: in the order of the navigation.
            access: decides who may see and start what; by default everybody on this machine.
        """
        self.fleet = fleet
        self.pages = pages
        self.access = access or Access()
        self.version = __version__
        self.sampler = Sampler(fleet)
        self.clusters = Shared[FleetQuery, FleetView](8, 1.0)
        self.services = Shared[tuple[str, str, int, bool], ServicesView](8, 10.0)
        self.doctor_runs = DoctorRuns()
        self.planning = asyncio.Semaphore(_PLANS)
        self._readers = 0
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals["live"] = filters.live
        self._templates.filters |= filters.FILTERS
        self._routes = [
            Route("GET", "/static/{name}", _static, is_open=True),
            *self.access.routes(self.render),
        ]
        for page in pages:
            self._routes.append(Route("GET", page.path, self._page(page)))
            for path, action in page.actions.items():
                self.action(path, action)
        self.app = http.App(self._serve, _MOST_BODY)

    def action(self, path: str, handler: Action) -> None:
        """Add an address that starts something: POST, with the token of our own pages."""

        async def handle(asked: Asked) -> http.Answer:
            await self.access.check_action(asked.request, asked.form)
            return await handler(self, asked)

        self._routes.append(Route("POST", path, handle))

    def render(self, template: str, **values: Any) -> str:
        """Render a template, with `site` and the given values."""
        return self._templates.get_template(template).render(site=self, **values)

    def respond(
        self,
        request: http.Request,
        page: Page,
        answer: View,
        *,
        query: Query | None = None,
        status: int = 200,
    ) -> http.Answer:
        """Return an answer in the form that a request asks for: the page, or its JSON twin.

        Args:
            request: the request.
            page: shows the answer.
            answer: the answer.
            query: what was asked; None for the result of an action, which is not followed live.
            status: of HTTP.
        """
        varies = {"Vary": "Accept"}
        if _wanted(request) == "json":
            return http.Answer(msgspec.json.encode(answer), status, _JSON, more_headers=varies)
        html = self.render(
            page.template,
            page=page,
            answer=answer,
            query=query or {},
            events=request.target if page.live and query is not None else "",
        )
        return http.Answer(html, status, HTML, more_headers=varies)

    async def _serve(self, request: http.Request) -> http.Answer:
        """Answer a request; failures get the headers and the look of pages, too."""
        headers: Mapping[str, str] = {}
        try:
            answer = await self._find(request)
        except RefusedError as refused:
            answer = self._failure(request, refused.status, refused.text)
            headers = refused.headers
        except (QuestionError, TimeoutError) as error:
            answer = self._failure(request, 503, str(error) or "the node did not answer in time")
        headers = {"Cache-Control": "no-store", **_HEADERS, **answer.more_headers, **headers}
        return msgspec.structs.replace(answer, more_headers=headers)

    async def _find(self, request: http.Request) -> http.Answer:
        """Answer by the address that a request asks for, if its reader may."""
        found = {
            route.method: (route, values)
            for route in self._routes
            if (values := route.values(request.path)) is not None
        }
        method = "GET" if request.method == "HEAD" else request.method
        route, values = found.get(method) or next(iter(found.values()), (None, {}))
        if route is None or not route.is_open:
            await self.access.check(request, values)
        if route is None:
            raise RefusedError(404, "Not Found")
        if method not in found:
            raise RefusedError(405, "Method Not Allowed", {"Allow": ", ".join(sorted(found))})
        asked = Asked(request, values)
        if method == "POST":
            asked = asked._replace(form=await read_form(request))
        return await route.answer(asked)

    def _failure(self, request: http.Request, status: int, text: str) -> http.Answer:
        text = text.strip()
        if _wanted(request) == "json":
            return http.Answer(msgspec.json.encode({"error": text}), status, _JSON)
        html = self.render("error.html", text=text, status=status, page=None, query={})
        return http.Answer(html, status, HTML)

    def _page(self, page: Page) -> Callable[[Asked], Awaitable[http.Answer]]:
        async def handle(asked: Asked) -> http.Answer:
            query = {**asked.request.query, **asked.values}
            if _wanted(asked.request) == "events":
                if self._readers >= _MOST_READERS:
                    raise RefusedError(503, "too many pages are open\n")
                events = self._events(page, query, asked)
                kind = "text/event-stream"
                return http.Answer(content_type=kind, pieces=events, patience=_PATIENCE)
            return self.respond(asked.request, page, await page.answer(self, query), query=query)

        return handle

    async def _events(self, page: Page, query: Query, asked: Asked) -> AsyncGenerator[bytes]:
        """Send the live blocks of a page until the reader leaves."""
        self._readers += 1
        try:
            yield b":\n\n"  # the stream is open before the first answer is known
            shown: dict[str, int] = {}
            problem = ""
            while True:
                version = self.fleet.version
                began = asyncio.get_running_loop().time()
                try:
                    # Rights may be taken away meanwhile.
                    await self.access.check(asked.request, asked.values)
                    answer = await page.answer(self, query)
                    events = [*self._changed_blocks(page, answer, query, shown)]
                    events += [_event("problem", "")] if problem else []
                    problem = ""
                except (QuestionError, TimeoutError) as error:
                    problem = str(error) or "the node did not answer in time"
                    events = [_event("problem", problem)]
                for event in events:
                    yield event
                # Many pages of a large fleet must not take the whole core from each other.
                took = asyncio.get_running_loop().time() - began
                await asyncio.sleep(max(_APART, _SHARE * took))
                while True:
                    # An idle stream says so now and then: a proxy may close it otherwise, and only
                    # a write finds out that the reader has gone.
                    try:
                        async with asyncio.timeout(_HEARTBEAT):
                            await self.fleet.changed(version)
                        break
                    except TimeoutError:
                        yield b":\n\n"
        except RefusedError as refused:
            # The browser connects again and is refused, but shows its reader no reason for that.
            yield _event("problem", refused.text.strip())
        finally:
            self._readers -= 1

    def _changed_blocks(
        self, page: Page, answer: View, query: Query, shown: dict[str, int]
    ) -> Iterator[bytes]:
        """Yield an event for each live block that differs from what was shown; note it there."""
        template = self._templates.get_template(page.template)
        values = template.new_context(
            {"site": self, "page": page, "answer": answer, "query": query, "events": ""}
        )
        for name, block in template.blocks.items():
            if name.startswith("live_"):
                html = "".join(block(values))
                if shown.get(name) != hash(html):
                    shown[name] = hash(html)
                    yield _event(name, html)


def _wanted(request: http.Request) -> Literal["html", "json", "events"]:
    """Return the form of an answer that a request asks for."""
    accepted = request.headers.get("accept", "")
    if "text/event-stream" in accepted:
        return "events"
    return "json" if "application/json" in accepted and "text/html" not in accepted else "html"


def _event(name: str, text: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in re.split(r"\r\n|\r|\n", text))
    return f"event: {name}\n{lines}\n".encode()


async def _static(asked: Asked) -> http.Answer:
    """Serve a file of ours; the browser asks again whether it changed."""
    path = _STATIC / asked.values["name"]
    if path.parent != _STATIC or path.suffix not in _TYPES or not path.is_file():
        raise RefusedError(404, "no such file\n")
    found = path.stat()
    tag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
    headers = {"Cache-Control": "no-cache", "ETag": tag}
    if tag in asked.request.headers.get("if-none-match", ""):
        return http.Answer(status=304, more_headers=headers)
    return http.Answer(path.read_bytes(), 200, _TYPES[path.suffix], more_headers=headers)
