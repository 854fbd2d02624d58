"""Logging in to the pages of a cluster, as a reader does it in a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser, expect

from steersman.model.node_state import NodeState
from steersman.source.kubeconfig import ClusterAccess as ApiServers
from steersman.ui.access import COOKIE, ClusterAccess, Reviewer
from steersman.ui.pages import PAGES
from steersman.ui.site import Site
from tests.support.apiserver.server import ApiServer
from tests.support.browser import tab
from tests.support.pages import ScriptedFleet, serving_pages


@pytest_asyncio.fixture(loop_scope="session")
async def base() -> AsyncIterator[str]:
    """Pages of a cluster in which the token `secret` is that of somebody who may see everything."""
    async with ApiServer() as api:
        api.reviews.users["secret"] = {"username": "anna"}
        api.reviews.allowed["anna"] = {("list", "nodes"), ("list", "services")}
        access = ClusterAccess(Reviewer(ApiServers(servers=(api.url,))), "kube-system")
        site = Site(ScriptedFleet({"node-a": NodeState("node-a", "nftables")}), PAGES, access)
        async with serving_pages(site.app) as port:
            yield f"http://127.0.0.1:{port}"


async def test_a_reader_logs_in_by_keyboard_sees_the_page_and_logs_out(
    chrome: Browser, base: str
) -> None:
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
