"""What happens to an open page: changes, focus, a server that restarts, names, time zones."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from playwright.async_api import Browser, expect

from steersman.model.findings import Finding, Severity
from steersman.model.node_state import NodeState
from steersman.run.pages.conditions import judge
from steersman.ui.pages import PAGES
from steersman.ui.site import Site
from tests.support.browser import tab
from tests.support.http import free_port
from tests.support.pages import ScriptedFleet, serving_pages

HOSTILE = (
    "<script>alert(1)</script>",
    "\u202egnp.txt",
    "x" * 253,
    "\"'><img src=/nothing onerror=alert(1)>",
    "{{ 7 * 7 }}${7 * 7}",
)


def state(node: str, **fields: Any) -> NodeState:
    now = time.time()
    usual = NodeState(
        node,
        "nftables",
        version="1.2.3",
        pid=4711,
        started=now - 60,
        now=now,
        revision=1,
        synced_at=now,
        services=12,
        cpu=0.01,
        memory=50 << 20,
    )
    made = msgspec.structs.replace(usual, **fields)
    return msgspec.structs.replace(made, conditions=tuple(judge(made)))


@asynccontextmanager
async def served(fleet: ScriptedFleet, port: int) -> AsyncIterator[str]:
    async with serving_pages(Site(fleet, PAGES).app, port):
        yield f"http://127.0.0.1:{port}"


async def test_a_change_shows_and_the_reader_keeps_focus_and_place(chrome: Browser) -> None:
    fleet = ScriptedFleet({f"node-{n:03}": state(f"node-{n:03}") for n in range(60)})
    async with served(fleet, free_port()) as url, tab(chrome, url) as opened:
        page = opened.page
        await opened.open("/")
        await expect(page.locator("#connection")).to_have_text("Live")
        search = page.get_by_role("searchbox").first
        await search.fill("node-05")
        await search.focus()
        await page.evaluate("scrollTo(0, 150)")
        top = await page.evaluate("scrollY")
        fleet.put(state("node-000", healthy=False, failure="the kernel said no"))
        await expect(page.locator("main")).to_contain_text("the kernel said no")
        await expect(search).to_have_value("node-05")
        await expect(search).to_be_focused()
        assert await page.evaluate("scrollY") == top
        assert opened.complaints == []


async def test_a_page_follows_the_server_through_a_restart(chrome: Browser) -> None:
    port = free_port()
    fleet = ScriptedFleet({"node-a": state("node-a")})
    async with served(fleet, port) as url:
        context = await chrome.new_context()
        page = await context.new_page()
        await page.goto(url)
        await expect(page.locator("#connection")).to_have_text("Live")
    await expect(page.locator("#connection")).to_contain_text("lost")
    fleet.put(state("node-b"))
    async with served(fleet, port):
        await expect(page.locator("#connection")).to_have_text("Live", timeout=60_000)
        await expect(page.locator("main")).to_contain_text("node-b")
        fleet.put(state("node-c"))
        await expect(page.locator("main")).to_contain_text("node-c")
    await context.close()


async def test_names_are_text_whatever_they_contain(chrome: Browser) -> None:
    findings = tuple(Finding(f"Service shop/{n}", n, n, Severity.ERROR) for n in HOSTILE)
    nodes = {n: state(n, findings=findings, failure=n) for n in HOSTILE}
    fleet = ScriptedFleet(nodes)
    async with served(fleet, free_port()) as url, tab(chrome, url) as opened:
        for path in ("/", "/problems"):
            await opened.open(path)
            await opened.look(width=400)
            assert await opened.overflow() <= 0
            for name in HOSTILE[:1] + HOSTILE[3:]:
                await expect(opened.page.locator("main")).to_contain_text(name)
            assert await opened.page.locator("main :is(script, img)").count() == 0
            # The same again, as parts of a live page.
            await expect(opened.page.locator("#connection")).to_have_text("Live")
            fleet.put(state("later " + HOSTILE[0]))
            if path == "/":
                await expect(opened.page.locator("main")).to_contain_text("later " + HOSTILE[0])
            assert await opened.page.locator("main :is(script, img)").count() == 0
        assert opened.complaints == []


@pytest.mark.parametrize(("zone", "hour"), [("Asia/Kolkata", "05:30"), ("America/Lima", "19:00")])
async def test_times_are_in_the_zone_of_the_reader(chrome: Browser, zone: str, hour: str) -> None:
    midnight = time.time() // 86400 * 86400
    fleet = ScriptedFleet({"node-a": state("node-a", started=midnight, synced_at=midnight)})
    async with served(fleet, free_port()) as url:
        context = await chrome.new_context(timezone_id=zone, locale="en-GB")
        page = await context.new_page()
        await page.goto(url)
        shown = page.locator("time").first
        await expect(shown).to_contain_text(hour)
        await context.close()


async def test_the_keyboard_is_enough(chrome: Browser) -> None:
    fleet = ScriptedFleet({"node-a": state("node-a"), "node-b": state("node-b")})
    async with served(fleet, free_port()) as url, tab(chrome, url) as opened:
        page = opened.page
        await opened.open("/")
        await page.keyboard.press("Tab")
        await expect(page.locator(":focus")).to_have_text("Skip to content")
        await expect(page.locator(":focus")).to_be_in_viewport()
        await page.keyboard.press("Tab")
        reached: list[str] = []
        words = [each.nav for each in PAGES if each.nav]
        while len(reached) < 200:
            await page.keyboard.press("Tab")
            if await page.evaluate("document.activeElement === document.body"):
                break  # after the last one
            reached.append(await page.evaluate("document.activeElement.textContent.trim()"))
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert await page.evaluate(outline) != "none", reached
        assert reached[: len(words)] == words
        assert reached[-1] == "About"
        await page.get_by_role("searchbox").first.focus()
        await page.keyboard.type("node-b")
        await page.keyboard.press("Enter")
        await expect(page.locator("tbody")).not_to_contain_text("node-a")
        await expect(page.locator("tbody")).to_contain_text("node-b")
        assert opened.complaints == []
