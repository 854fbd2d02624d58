"""The pages of a Service and of the traffic in a browser: pictures, charts, buttons, live parts."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from steersman.model.node_state import NodeState
from steersman.model.top import TopRow, TopSample
from steersman.operate.answer import QuestionError
from steersman.operate.doctor.check import Diagnosis
from steersman.ui.pages import PAGES
from steersman.ui.site import Site
from tests.support.browser import WAIT, Tab, tab
from tests.support.builders import kube
from tests.support.builders.asked import DEMO, NODES, POD_A, POD_B, WEB, asked
from tests.support.builders.asked import pod_endpoint as endpoint
from tests.support.pages import ScriptedFleet, serving_pages

HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 253
PAGE = "/services/shop/web"


class Fleet(ScriptedFleet):
    """Two nodes with traffic, whose counts grow with each look."""

    looks = 0

    async def get(self, node: str, path: str) -> bytes:
        self.looks += 1
        names = (
            ("shop/web:http", "shop/cart") if "service=" not in path else (POD_A, POD_B, HOSTILE)
        )
        rows = tuple(
            TopRow(name, rate=self.looks + 10.0 * n, connections=n, failure_rate=n * 0.5)
            for n, name in enumerate(names, 1)
        )
        sample = TopSample(NodeState(node, "memory"), counted=True, interval=1.0)
        return msgspec.msgpack.encode(
            msgspec.structs.replace(sample, rows=rows, matching=len(rows))
        )


def new_fleet() -> Fleet:
    worlds = {name: asked(*DEMO, node=name) for name in ("node-a", "node-b")}
    return Fleet({name: NodeState(name, "memory") for name in worlds}, worlds=worlds)


@pytest.fixture
def fleet() -> Fleet:
    return new_fleet()


@pytest.fixture
def site(fleet: Fleet) -> Site:
    return Site(fleet, PAGES)


@pytest_asyncio.fixture(loop_scope="session")
async def opened(chrome: Browser, site: Site) -> AsyncIterator[Tab]:
    async with (
        serving_pages(site.app) as port,
        tab(chrome, f"http://127.0.0.1:{port}") as page,
    ):
        yield page


async def test_charts_are_drawn_and_follow(opened: Tab) -> None:
    await opened.open(PAGE)
    page = opened.page
    charts = page.locator(".chart canvas")
    await expect(charts).to_have_count(2)
    # Two seconds later the part is replaced: the same charts are there, with more points.
    text = await page.locator("[data-chart]").first.get_attribute("data-chart")
    await page.wait_for_function(
        "old => document.querySelector('[data-chart]').dataset.chart !== old", arg=text
    )
    await expect(charts).to_have_count(2)
    await expect(page.locator(".u-legend").first).to_contain_text("all endpoints")
    assert opened.complaints == []


async def test_the_picture_changes_with_the_node_and_keeps_what_is_typed(
    opened: Tab, fleet: Fleet
) -> None:
    await opened.open(PAGE)
    page = opened.page
    await expect(page.locator(".way .way-endpoint")).to_have_count(3)
    await expect(page.locator("#connection")).to_have_text("Live")
    await page.get_by_role("combobox", name="Client").fill("198.51.100.7")
    fleet.worlds["node-a"] = asked(WEB, *NODES)
    fleet.put(NodeState("node-a", "memory", revision=2))
    await expect(page.locator(".way .way-reject")).to_have_count(1)
    await expect(page.get_by_role("combobox", name="Client")).to_have_value("198.51.100.7")
    await expect(page.get_by_role("combobox", name="Client")).to_be_focused()
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile("client=198"))
    await expect(page.locator(".way .way-client")).to_contain_text("198.51.100.7")
    assert opened.complaints == []


async def test_doctor_answers_in_place_and_in_a_live_region(opened: Tab, fleet: Fleet) -> None:
    answer = Diagnosis(asked=f"Service shop/web {HOSTILE}", cause="no endpoint is ready")
    fleet.lines = [{"running": 1.0}, {"exitCode": 1, "answer": msgspec.to_builtins(answer)}]
    await opened.open(PAGE)
    page = opened.page
    await page.get_by_role("button", name="Run doctor").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#result[aria-live=polite]")).to_contain_text("no endpoint is ready")
    await expect(page.locator("#result h1")).to_have_count(0)
    assert page.url.endswith(PAGE)
    assert [each[0] for each in fleet.posted] == ["node-a"]
    assert opened.complaints == []


async def test_a_button_of_an_earlier_server_says_so(opened: Tab, fleet: Fleet, site: Site) -> None:
    await opened.open(PAGE)
    site.access.token = "of another server"
    await opened.page.get_by_role("button", name="Run doctor").click()
    await expect(opened.page.locator("#result")).to_contain_text("load it again")
    assert fleet.posted == []
    assert all("403" in each for each in opened.complaints)


async def test_a_page_that_cannot_be_followed_says_why_as_text(
    opened: Tab, fleet: Fleet, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await opened.open(PAGE)
    page, check = opened.page, site.access.check
    await expect(page.locator("#connection")).to_have_text("Live")

    async def refuse(*_: object) -> None:
        raise QuestionError("nobody knows <b id=bold>bold</b>")

    monkeypatch.setattr(site.access, "check", refuse)
    fleet.put(NodeState("node-a", "memory", revision=3))
    await expect(page.locator("#problem")).to_have_text("nobody knows <b id=bold>bold</b>")
    monkeypatch.setattr(site.access, "check", check)
    fleet.put(NodeState("node-a", "memory", revision=4))
    await expect(page.locator("#problem")).to_be_hidden()
    await expect(page.locator(".way")).to_have_count(1)


async def test_everything_works_without_scripts(chrome: Browser, fleet: Fleet) -> None:
    fleet.lines = [{"exitCode": 2, "error": "needs root"}]
    async with (
        serving_pages(Site(fleet, PAGES).app) as port,
        tab(chrome, f"http://127.0.0.1:{port}", javascript=False) as plain,
    ):
        await plain.open(PAGE)
        page = plain.page
        await page.get_by_role("combobox", name="Client").fill("external")
        await page.get_by_role("button", name="Show", exact=True).click()
        await expect(page.locator(".way .way-client")).to_contain_text("outside")
        await page.get_by_role("link", name="Rates of the last minutes").click()
        await expect(page.get_by_role("cell", name=POD_A)).to_have_count(0)
        await expect(page.get_by_role("rowheader", name=POD_A)).to_be_visible()
        await page.go_back()
        await page.get_by_role("button", name="Run doctor").click()
        await expect(page.locator("main")).to_contain_text("needs root")
        await plain.open("/map")
        await expect(page.get_by_role("link", name="shop/cart").first).to_be_visible()
        assert plain.complaints == []


async def test_the_map_is_drawn_and_its_points_are_links(opened: Tab, fleet: Fleet) -> None:
    await opened.open("/map")
    page = opened.page
    graph = page.locator(".graph svg")
    await expect(graph.locator("a.node")).to_have_count(2)
    await expect(graph.locator("a.service")).to_have_count(2)
    await expect(graph.locator("path.bad").first).to_be_attached()
    await graph.locator("a.service").first.focus()
    looks = fleet.looks
    await page.wait_for_function(
        "old => document.querySelector('[data-graph]').dataset.graph !== old",
        arg=await page.locator("[data-graph]").get_attribute("data-graph"),
    )
    assert fleet.looks > looks
    await expect(graph.locator("a.service:focus")).to_have_count(1)
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile("/services/shop/"))
    assert [each for each in opened.complaints if "404" not in each] == []


@pytest.mark.parametrize("path", [PAGE, "/map", f"{PAGE}/rates", "/services/shop/none"])
async def test_nobody_is_kept_out(opened: Tab, fleet: Fleet, path: str) -> None:
    ends = kube.endpoint_slice("web-1", "web", endpoint(POD_A, HOSTILE, HOSTILE))
    fleet.worlds["node-a"] = asked({**WEB, "spec": {**WEB["spec"]}}, ends, *NODES)
    await opened.open(path)
    page = opened.page
    if path in ("/map", PAGE):
        drawn = ".graph svg" if path == "/map" else ".chart canvas"
        await page.locator(drawn).first.wait_for(timeout=WAIT * 1000)
    for dark, width in ((False, 1280), (True, 1280), (False, 400)):
        await opened.look(dark, width)
        assert await opened.barriers() == []
        assert await opened.overflow() == 0
    assert opened.complaints == []
