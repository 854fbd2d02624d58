"""The documentation site in a browser: nothing comes from elsewhere, and words are found."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.async_api import Browser, expect

from tests.support.browser import tab
from tests.support.site import build

PAGES = ("index.html", "doctor.html", "behaviour.html", "modes/nftables.html")
THEIRS = {"aria-dialog-name", "landmark-unique", "scrollable-region-focusable"}
"""Rules of axe-core that the theme's own templates break, whatever a page has in it."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = build(tmp_path_factory.mktemp("site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_is_in_order(chrome: Browser, site: str, path: str) -> None:
    async with tab(chrome, site) as opened:
        await opened.open(path)
        await expect(opened.page.locator("h1")).to_have_count(1)
        for dark, width in ((False, 1280), (True, 1280), (False, 400), (True, 400)):
            await opened.look(dark, width)
            await opened.open(path)  # the colours of the system are looked at once
            barriers = [b for b in await opened.barriers() if b.partition(":")[0] not in THEIRS]
            assert barriers == [], f"dark: {dark}, {width} px"
            assert await opened.overflow() <= 0, f"wider than {width} px"
        assert opened.complaints == []


async def test_a_word_is_found(chrome: Browser, site: str) -> None:
    async with tab(chrome, site) as opened:
        await opened.open("index.html")
        field = opened.page.locator(".md-search__input")
        found = opened.page.locator(".md-search-result__link").first
        async with asyncio.timeout(60):
            while not await found.is_visible():  # what is typed before the script runs is lost
                await field.fill("hairpin")
                await field.press("Shift")
                await asyncio.sleep(0.1)
        assert opened.complaints == []
