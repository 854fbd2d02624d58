"""The tests of pages see what they claim to see: each complaint is provoked once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from steersman.run.serve.http import Answer, App, Request
from tests.support.browser import tab
from tests.support.pages import serving_pages

PAGES = {
    "/fine": "<main><h1>Fine</h1></main>",
    "/style": "<main><h1 style='color: red'>Inline style</h1></main>",
    "/script": "<main><h1>Inline script</h1></main><script>document.title = 'x'</script>",
    "/elsewhere": "<main><h1>Elsewhere</h1><img alt='' src='http://192.0.2.7/x.png'></main>",
    "/missing": "<main><h1>Missing</h1><img alt='' src='/nothing.png'></main>",
    "/throws": "<main><h1>Throws</h1></main><script src='/throws.js'></script>",
    "/pale": "<main><h1>Pale</h1><p class='pale'>Hardly to be read</p></main>",
    "/wide": "<main><h1>Wide</h1><pre>" + "x" * 2000 + "</pre></main>",
}
STYLE = "body { background: #fff; color: #000 } .pale { color: #eee }"


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def base() -> AsyncIterator[str]:
    def page(request: Request) -> Answer:
        if request.path == "/throws.js":
            return Answer("throw new Error('oh')", content_type="text/javascript")
        if request.path == "/style.css":
            return Answer(STYLE, content_type="text/css")
        if request.path not in PAGES:
            return Answer(status=404 if request.path == "/nothing.png" else 204)
        head = "<title>A page</title><link rel=stylesheet href=/style.css>"
        text = f"<!doctype html><html lang=en>{head}{PAGES[request.path]}"
        policy = {"Content-Security-Policy": "default-src 'self'; img-src *"}
        return Answer(text, content_type="text/html", more_headers=policy)

    async with serving_pages(App(page)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/style", "Content Security Policy"),
        ("/script", "Content Security Policy"),
        ("/elsewhere", "request to http://192.0.2.7/x.png"),
        ("/missing", "/nothing.png: 404"),
        ("/throws", "exception: oh"),
    ],
)
async def test_what_a_page_does_wrong_is_noted(
    chrome: Browser, base: str, path: str, complaint: str
) -> None:
    async with tab(chrome, base) as page:
        await page.open(path)
        assert any(complaint in each for each in page.complaints), page.complaints


async def test_a_page_in_order_has_no_complaints(chrome: Browser, base: str) -> None:
    async with tab(chrome, base) as page:
        await page.open("/fine")
        assert await page.barriers() == []
        assert await page.overflow() == 0
        assert page.complaints == []


async def test_pale_text_and_wide_content_are_found(chrome: Browser, base: str) -> None:
    async with tab(chrome, base) as page:
        await page.open("/pale")
        (barrier,) = await page.barriers()
        assert barrier.startswith("color-contrast: ")
        await page.look(width=400)
        await page.open("/wide")
        assert await page.overflow() > 1000
