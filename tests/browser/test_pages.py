"""Every page on two real nodes with traffic: what `make demo-ui` shows, as a reader meets it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from steersman.ui.pages import PAGES
from tests.support.browser import WAIT, demo, tab

pytestmark = pytest.mark.kernel

SHOWN = {
    # What must be in the HTML already, without scripts.
    "/": ("node-a", "nftables", "node-b", "iptables"),
    "/services": ("shop/web", "billing/invoices", "shop/payments"),
    "/services/shop/web": ("10.96.0.10", "30080", "10.244.1.11", "10.244.2.13"),
    "/services/shop/mail": ("10.244.2.14",),
    "/services/shop/db": ("headless",),
    "/services/shop/payments": ("ExternalName",),
    "/problems": ("staging/preview",),
    "/time?node=node-a": ("node-a",),
    "/plan": ("node-a",),
    "/map": ("shop/web",),
    "/about": ("htmx.org",),
}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def url() -> AsyncIterator[str]:
    async with demo() as address:
        yield address


def test_every_page_of_the_navigation_is_tested() -> None:
    tested = {path.partition("?")[0] for path in SHOWN}
    assert {page.path for page in PAGES if "{" not in page.path} <= tested


@pytest.mark.parametrize("path", SHOWN)
async def test_a_page_is_in_order(chrome: Browser, url: str, path: str) -> None:
    async with tab(chrome, url) as opened:
        await opened.open(path)
        await expect(opened.page.locator("h1")).to_have_count(1)
        for dark, width in ((False, 1280), (True, 1280), (False, 400), (True, 400)):
            await opened.look(dark, width)
            assert await opened.barriers() == [], f"dark: {dark}, {width} px"
            assert await opened.overflow() <= 0, f"wider than {width} px"
        assert opened.complaints == []


async def test_a_service_keeps_its_title_while_rates_come(chrome: Browser, url: str) -> None:
    async with tab(chrome, url) as opened:
        await opened.open("/services/shop/web")
        await expect(opened.page.locator("#rates-here")).to_contain_text("New connections")
        await expect(opened.page).to_have_title("shop/web - steersman")


async def test_problems_of_a_node_are_seen_on_a_phone(chrome: Browser, url: str) -> None:
    async with tab(chrome, url) as opened:
        await opened.open("/")
        await opened.look(width=390)
        column = opened.page.get_by_role("columnheader", name="Problems")
        await expect(column).to_be_in_viewport()


@pytest.mark.parametrize("path", SHOWN)
async def test_the_content_needs_no_script(chrome: Browser, url: str, path: str) -> None:
    missing, end = list(SHOWN[path]), time.monotonic() + 4 * WAIT
    async with tab(chrome, url, javascript=False) as opened:
        # Without scripts a reader loads a page again if a node had no time to answer.
        while missing and time.monotonic() < end:
            await opened.open(path)
            shown = await opened.page.locator("main").text_content() or ""
            missing = [text for text in SHOWN[path] if text not in shown]
    assert missing == []


@pytest.mark.parametrize("path", SHOWN)
async def test_each_page_has_a_twin_in_json(url: str, path: str) -> None:
    status, end = 503, time.monotonic() + 4 * WAIT
    async with aiohttp.ClientSession(headers={"Accept": "application/json"}) as session:
        # A reader asks again if a node had no time to answer.
        while status == 503 and time.monotonic() < end:
            async with session.get(url + path) as reply:
                status, found = reply.status, await reply.json()
    assert status == 200, found
    assert isinstance(found, dict)


async def test_traffic_and_changes_show_without_loading_a_page_again(
    chrome: Browser, url: str
) -> None:
    """A pod of shop/search becomes unready and ready again every 15 seconds."""
    async with tab(chrome, url) as opened:
        await opened.open("/services/shop/search")
        endpoints = opened.page.locator("main")
        await expect(opened.page.locator("#connection")).to_have_text("Live")
        await expect(endpoints).to_contain_text("not ready", timeout=2 * WAIT * 1000)
        await expect(endpoints).not_to_contain_text("not ready", timeout=2 * WAIT * 1000)
        assert opened.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("button", "shown"),
    [
        ("Run doctor", "shop/web"),
        ("Show the kernel objects", "10.244.1.11"),
        ("Send a packet and trace it", "10.244."),
    ],
)
async def test_a_node_looks_closer_with_one_click(
    chrome: Browser, url: str, button: str, shown: str
) -> None:
    async with tab(chrome, url) as opened:
        await opened.open("/services/shop/web?node=node-a&client=pod/shop/web-1")
        await opened.page.get_by_role("button", name=button).click()
        result = opened.page.locator("[aria-live]:not(#connection)").filter(has_text=shown)
        await expect(result.first).to_be_visible(timeout=90_000)
        assert await opened.barriers() == []
        await opened.look(dark=True, width=400)
        assert await opened.barriers() == []
        assert await opened.overflow() <= 0
        assert opened.complaints == []
