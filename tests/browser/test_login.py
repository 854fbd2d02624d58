"""Logging in to the pages of a cluster, as a reader does it in a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from steersman.model.node_state import NodeState
from steersman.source.kubeconfig import ClusterAccess as ApiServers
from steersman.ui.access import COOKIE, ClusterAccess, Reviewer
from steersman.ui.pages import PAGES
from steersman.ui.site import Site
from tests.support.apiserver.server import ApiServer
from tests.support.browser import tab
from tests.support.pages import ScriptedFleet, serving_pages


class Pages(NamedTuple):
    """Where the pages are, and the nodes that they show."""

    base: str
    fleet: ScriptedFleet


@pytest_asyncio.fixture(loop_scope="session")
async def pages() -> AsyncIterator[Pages]:
    """Pages of a cluster in which the token `secret` is that of somebody who may see everything."""
    async with ApiServer() as api:
        api.reviews.users["secret"] = {"username": "anna"}
        api.reviews.allowed["anna"] = {("list", "nodes"), ("list", "services")}
        access = ClusterAccess(Reviewer(ApiServers(servers=(api.url,))), "kube-system")
        fleet = ScriptedFleet({"node-a": NodeState("node-a", "nftables")})
        async with serving_pages(Site(fleet, PAGES, access).app) as port:
            yield Pages(f"http://127.0.0.1:{port}", fleet)


async def test_a_reader_logs_in_by_keyboard_sees_the_page_and_logs_out(
    chrome: Browser, pages: Pages
) -> None:
    base = pages.base
    async with tab(chrome, base) as here:
        page = here.page
        await here.open("/about?x=1")
        await expect(page).to_have_url(f"{base}/login?next=/about?x%3D1")
        assert await here.barriers() == []
        await here.look(dark=True, width=360)
        assert await here.barriers() == []
        assert await here.overflow() == 0
        assert here.complaints == []
        # A wrong token is refused in words; the browser notes the status, 401.
        await expect(page.get_by_label("Bearer token")).to_be_focused()
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("does not accept this token")
        assert all("401" in each for each in here.complaints), here.complaints
        here.complaints.clear()
        await page.get_by_label("Bearer token").fill("secret")
        await page.keyboard.press("Enter")
        await expect(page).to_have_url(f"{base}/about?x=1")
        await expect(page.get_by_role("heading", level=1)).to_have_text("About")
        cookies = {each["name"]: each for each in await page.context.cookies()}
        assert cookies[COOKIE]["httpOnly"]
        assert cookies[COOKIE]["sameSite"] == "Strict"
        assert await page.evaluate("document.cookie") == ""
        # Pages are live with the cookie alone.
        await here.open("/")
        await expect(page.locator("#connection")).to_have_text("Live")
        assert await here.barriers() == []
        await page.get_by_role("button", name="Log out").click()
        await expect(page).to_have_url(f"{base}/login")
        await here.open("/")
        await expect(page).to_have_url(f"{base}/login?next=/")
        assert here.complaints == []


async def test_a_page_says_that_its_session_ended_and_goes_on_after_a_login(
    chrome: Browser, pages: Pages
) -> None:
    async def log_in(page: Page) -> None:
        await page.get_by_label("Bearer token").fill("secret")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_have_text("About")

    async with tab(chrome, pages.base) as here:
        await here.open("/about")
        await log_in(here.page)
        await here.open("/")
        problem, connection = here.page.locator("#problem"), here.page.locator("#connection")
        await expect(connection).to_have_text("Live")
        # The session ends in another tab of the same browser.
        other = await here.page.context.new_page()
        await other.goto(f"{pages.base}/about")
        await other.get_by_role("button", name="Log out").click()
        await expect(other.get_by_label("Bearer token")).to_be_visible()
        pages.fleet.put(NodeState("node-b", "nftables"))
        await expect(problem).to_contain_text("you are not logged in: load this page again")
        await expect(connection).to_have_text("Connection lost; retrying")
        await other.goto(f"{pages.base}/login?next=/about")
        await log_in(other)
        await expect(connection).to_have_text("Live", timeout=60_000)
        await expect(problem).to_be_hidden()
        await expect(here.page.locator("main")).to_contain_text("node-b")
