"""A cluster of 1,000 nodes and 10,000 Services, changing 50 times a second, simulated."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from tests.support.browser import simulated, tab

LARGE_PAGE = 400_000
"""Bytes of HTML; a page of all 10,000 Services would have megabytes."""


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    folder: Path = tmp_path_factory.mktemp("nodes")
    flags = ("--nodes=1000", "--services=10000", "--changes=50", "--trouble")
    async with simulated(folder, *flags) as served:
        yield served.url


async def test_the_worst_nodes_of_a_thousand_come_first(chrome: Browser, url: str) -> None:
    async with tab(chrome, url) as opened:
        main = opened.page.locator("main")
        await opened.open("/")
        await expect(main).to_contain_text("of 1000 nodes")
        await expect(main).to_contain_text("unreachable")
        rows = opened.page.locator("tbody tr")
        await expect(rows.first).to_contain_text("node-0004")
        await expect(rows.first).to_contain_text("the node is down")
        # Who disagrees is known some seconds after the start: a node may lag.
        disagreeing = opened.page.get_by_role("link", name="shop-03/web-00003")
        await expect(disagreeing).to_be_visible(timeout=60_000)
        assert opened.complaints == []


async def test_nodes_are_searched_and_the_address_says_how(chrome: Browser, url: str) -> None:
    async with tab(chrome, url) as opened:
        await opened.open("/")
        await opened.page.get_by_role("searchbox").first.fill("node-0042")
        await opened.page.keyboard.press("Enter")
        await expect(opened.page).to_have_url(re.compile(r"q=node-0042"))
        await expect(opened.page.locator("tbody tr")).to_have_count(1)
        await opened.page.reload()
        await expect(opened.page.locator("tbody tr")).to_have_count(1)
        assert opened.complaints == []


async def test_a_page_of_changing_nodes_is_live(chrome: Browser, url: str) -> None:
    async with tab(chrome, url) as opened:
        await opened.open("/?sort=sync")
        table = opened.page.locator("tbody")
        before = await table.inner_text()
        await expect(table).not_to_have_text(before, use_inner_text=True)
        assert opened.complaints == []


async def test_one_of_ten_thousand_services_is_found(chrome: Browser, url: str) -> None:
    async with tab(chrome, url) as opened:
        page = opened.page
        await opened.open("/?health=ok")  # live, so that it shows when a node has answered
        await expect(page.locator("tbody tr").first).to_be_visible(timeout=60_000)
        await opened.open("/services")
        await expect(page.locator("main")).to_contain_text("10000")
        assert len(await page.content()) < LARGE_PAGE
        await page.get_by_role("searchbox").first.fill("web-07777")
        await page.keyboard.press("Enter")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.get_by_role("link", name="shop-17/web-07777").click()
        await expect(page.locator("h1")).to_contain_text("web-07777")
        assert opened.complaints == []


@pytest.mark.parametrize("path", ["/", "/services", "/problems", "/map"])
async def test_pages_of_a_large_cluster_are_in_order(chrome: Browser, url: str, path: str) -> None:
    async with tab(chrome, url) as opened:
        await opened.open(path)
        assert await opened.barriers() == []
        await opened.look(dark=True, width=400)
        assert await opened.barriers() == []
        assert await opened.overflow() <= 0
        assert opened.complaints == []
