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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import msgspec
from aiohttp import web

from steersman import __version__
from steersman.operate.answer import Answer, QuestionError
from steersman.ui import filters
from steersman.ui.access import Access
from steersman.ui.fleet import Fleet

log = logging.getLogger("steersman")

Query: TypeAlias = Mapping[str, str]
"""Values of the path and of the query string, by name."""
Action: TypeAlias = Callable[["Site", web.Request], Awaitable[web.StreamResponse]]

_FOLDER = Path(__file__).parent
_STATIC = _FOLDER / "static"
_APART = 0.5  # least seconds between two updates of a page
_SHARE = 4  # an update that takes t seconds is followed by a pause of at least 4 t
_HEARTBEAT = 15.0  # seconds; proxies close connections on which nothing is sent
_MOST_READERS = 64
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # With no-referrer, browsers send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Page(msgspec.Struct, frozen=True):
    """An address, the answer behind it, and the template that shows it."""

    path: str
    """Route, such as `/services/{namespace}/{name}`."""
    template: str
    """File in `templates/`; it gets `answer`, `query`, `page` and `site`."""
    answer: Callable[[Site, Query], Awaitable[Answer]]
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
        self.app = web.Application(middlewares=[self._guard], client_max_size=2 << 20)
        self.app.router.add_get("/static/{name}", _static)
        self.access.add_to(self.app, self.render)
        for page in pages:
            self.app.router.add_get(page.path, self._handler(page))
            for path, action in page.actions.items():
                self.action(path, action)

    def action(self, path: str, handler: Action) -> None:
        """Add an address that starts something: POST, with the token of our own pages."""

        async def handle(request: web.Request) -> web.StreamResponse:
            await self.access.check_action(request)
            return await handler(self, request)

        self.app.router.add_post(path, handle)

    def render(self, template: str, **values: Any) -> str:
        """Render a template, with `site` and the given values."""
        return self._templates.get_template(template).render(site=self, **values)

    def respond(
        self,
        request: web.Request,
        page: Page,
        answer: Answer,
        *,
        query: Query | None = None,
        status: int = 200,
    ) -> web.Response:
        """Return an answer in the form that a request asks for: the page, or its JSON twin.

        Args:
            request: the request.
            page: shows the answer.
            answer: the answer.
            query: what was asked; None for the result of an action, which is not followed live.
            status: of HTTP.
        """
        if _form(request) == "json":
            body = msgspec.json.encode(answer)
            response = web.Response(body=body, status=status, content_type="application/json")
        else:
            html = self.render(
                page.template,
                page=page,
                answer=answer,
                query=query or {},
                events=str(request.rel_url) if page.live and query is not None else "",
            )
            response = web.Response(text=html, status=status, content_type="text/html")
        response.headers["Vary"] = "Accept"
        return response

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if not request.path.startswith("/static/"):
                await self.access.check(request)
            response = await handler(request)
        except web.HTTPException as error:
            # aiohttp's own failures (no such page, wrong method) get our headers and look, too.
            response = self._failure(request, error.status, error.text or error.reason)
            response.headers.extend(
                {name: value for name, value in error.headers.items() if name in _KEPT}
            )
        except (QuestionError, TimeoutError) as error:
            response = self._failure(request, 503, str(error) or "the node did not answer in time")
        if not response.prepared:
            response.headers.update(_HEADERS)
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    def _failure(self, request: web.Request, status: int, text: str) -> web.Response:
        text = text.strip()
        if _form(request) == "json":
            body = msgspec.json.encode({"error": text})
            return web.Response(body=body, status=status, content_type="application/json")
        html = self.render("error.html", text=text, status=status, page=None, query={})
        return web.Response(text=html, status=status, content_type="text/html")

    def _handler(self, page: Page) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            query = {**request.query, **request.match_info}
            form = _form(request)
            if form == "events":
                return await self._events(page, query, request)
            return self.respond(request, page, await page.answer(self, query), query=query)

        return handle

    async def _events(self, page: Page, query: Query, request: web.Request) -> web.StreamResponse:
        """Send the live blocks of a page until the reader leaves."""
        if self._readers >= _MOST_READERS:
            raise web.HTTPServiceUnavailable(text="too many pages are open\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **_HEADERS})
        response.headers["Cache-Control"] = "no-store"
        self._readers += 1
        try:
            await response.prepare(request)
            shown: dict[str, int] = {}
            problem = ""
            while True:
                version = self.fleet.version
                began = asyncio.get_running_loop().time()
                try:
                    await self.access.check(request)  # rights may be taken away meanwhile
                    answer = await page.answer(self, query)
                    events = [*self._changed_blocks(page, answer, query, shown)]
                    events += [_event("problem", "")] if problem else []
                    problem = ""
                except (QuestionError, TimeoutError) as error:
                    problem = str(error) or "the node did not answer in time"
                    events = [_event("problem", problem)]
                for event in events:
                    await response.write(event)
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
                        await response.write(b":\n\n")
        except web.HTTPException:  # the browser connects again, and gets the reason
            return response
        except ConnectionResetError:  # the reader left
            return response
        finally:
            self._readers -= 1

    def _changed_blocks(
        self, page: Page, answer: Answer, query: Query, shown: dict[str, int]
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


_KEPT = frozenset({"Location", "Set-Cookie", "WWW-Authenticate", "Retry-After", "Allow"})


def _form(request: web.Request) -> str:
    accepted = request.headers.get("Accept", "")
    if "text/event-stream" in accepted:
        return "events"
    return "json" if "application/json" in accepted and "text/html" not in accepted else "html"


def _event(name: str, text: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in re.split(r"\r\n|\r|\n", text))
    return f"event: {name}\n{lines}\n".encode()


async def _static(request: web.Request) -> web.StreamResponse:
    """Serve a file of ours; the browser asks again whether it changed."""
    path = _STATIC / request.match_info["name"]
    if path.parent != _STATIC or path.suffix not in _TYPES or not path.is_file():
        raise web.HTTPNotFound(text="no such file\n")
    headers = {"Cache-Control": "no-cache", "Content-Type": _TYPES[path.suffix]}
    return web.FileResponse(path, headers={**headers, **_HEADERS})
