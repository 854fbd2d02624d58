"""The pages of problems, of the last hour and of plans in a browser."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from steersman.model.drift import Drift, Writer
from steersman.model.findings import Finding, Severity
from steersman.model.history import History, Refusal, SyncRecord
from steersman.model.node_state import Condition, NodeState
from steersman.operate.doctor.check import Diagnosis
from steersman.operate.doctor.result import CheckResult, Verdict
from steersman.ui.pages import PAGES
from steersman.ui.site import Site
from tests.support.browser import Tab, tab
from tests.support.builders.pasted import CART, SERVICE, USER, encoded, world
from tests.support.pages import ScriptedFleet, serving_pages

HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 253
NOW = time.time()
LATE = Condition("Healthy", "False", "Late", "a change waits for too long", NOW - 90)
BAD = Finding("Service shop/cart", "spec.ports[0].port", "70000 must be 1 to 65535", Severity.ERROR)
BAD_TYPE = Finding(f"Service shop/{HOSTILE}", "spec.type", f"'{HOSTILE}' is unknown")
DRIFT = Drift(NOW - 30, missing=2, examples=("add rule inet x y",), writers=(Writer("nft", 41),))


def state(name: str, **fields: Any) -> NodeState:
    usual = NodeState(name, "nftables", version="1", now=NOW)
    return msgspec.structs.replace(usual, **fields)


def history(*more: SyncRecord) -> bytes:
    records = [
        SyncRecord(
            NOW - ago,
            NOW - ago + 0.2,
            revision=3600 - ago,
            seconds=0.02 + ago % 7 / 100,
            phases={"plan": 0.01, "render": 0.004, "apply": 0.006 + ago % 7 / 100},
            services=1 + ago % 3,
            names=(f"shop/web-{ago}",),
            lag=0.1 + ago % 5 / 10,
            added=ago % 4,
        )
        for ago in range(3500, 10, -30)
    ]
    return msgspec.json.encode(
        History("node-a", NOW, started=NOW - 9000, records=(*records, *more))
    )


REFUSED = SyncRecord(
    NOW - 5,
    NOW - 4,
    seconds=0.8,
    phases={"apply": 0.8},
    refused=1,
    refusals=(Refusal("shop/cart:http (TCP, IPv4)", HOSTILE),),
)


@pytest.fixture
def fleet() -> ScriptedFleet:
    found = ScriptedFleet(
        {
            "node-a": state("node-a", findings=(BAD, BAD_TYPE), conditions=(LATE,), drift=DRIFT),
            "node-b": state("node-b", findings=(BAD,)),
            HOSTILE: state(HOSTILE, mode="iptables"),
        },
        pages={("node-a", "/history"): history(REFUSED), ("node-b", "/history"): history()},
    )
    for name in found.nodes:
        found.pages[name, "/world"] = encoded(world(CART, USER))
    return found


@pytest_asyncio.fixture(loop_scope="session")
async def opened(chrome: Browser, fleet: ScriptedFleet) -> AsyncIterator[Tab]:
    async with (
        serving_pages(Site(fleet, PAGES).app) as port,
        tab(chrome, f"http://127.0.0.1:{port}") as page,
    ):
        yield page


async def test_problems_are_found_and_change_in_place(opened: Tab, fleet: ScriptedFleet) -> None:
    await opened.open("/problems")
    page = opened.page
    problems = page.locator("li.problem")
    await expect(problems).to_have_count(4)
    await expect(problems.first).to_contain_text("Healthy")
    await expect(page.locator("#connection")).to_have_text("Live")
    fleet.put(state("node-b", findings=(BAD, Finding("configuration", "families", "none"))))
    await expect(problems).to_have_count(5)
    # The search is a form and an address.
    await page.get_by_label("Object or text").fill("70000")
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile("q=70000"))
    await expect(problems).to_have_count(1)
    await expect(problems).to_contain_text("node-b")
    assert opened.complaints == []


async def test_doctor_runs_with_one_click(opened: Tab, fleet: ScriptedFleet) -> None:
    found = CheckResult(
        check="x", title="Firewall", verdict=Verdict.ERROR, text="a rule drops them"
    )
    answer = Diagnosis(asked="node-a", cause="a rule drops them", results=(found,))
    fleet.lines = [{"answer": msgspec.to_builtins(answer)}]
    await opened.open("/problems")
    page = opened.page
    await page.get_by_label("Look closer on node").fill("node-a")
    await page.get_by_role("button", name="Run doctor").click()
    await expect(page.get_by_role("status").nth(1)).to_contain_text("a rule drops them")
    await expect(page.locator("li.problem code", has_text="Firewall")).to_be_visible()
    assert opened.complaints == []


async def test_the_last_hour_is_drawn_and_followed(opened: Tab, fleet: ScriptedFleet) -> None:
    await opened.open("/time?node=node-a")
    page = opened.page
    await expect(page.locator(".chart canvas")).to_have_count(2)
    row = page.locator("tr", has_text="refused by the kernel")
    await row.locator("a").focus()
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile("sync="))
    await expect(page.locator("#chosen")).to_be_visible()
    failed = SyncRecord(NOW - 1, NOW, failure="timed out after 5 s", seconds=5.0)
    fleet.pages["node-a", "/history"] = history(REFUSED, failed)
    fleet.put(state("node-a", revision=7))
    await expect(page.locator("tr", has_text="timed out after 5 s")).to_be_visible()
    await expect(page.locator(".chart canvas")).to_have_count(2)
    assert opened.complaints == []


async def test_a_change_is_planned(opened: Tab) -> None:
    await opened.open("/plan")
    page = opened.page
    await page.get_by_label("Manifests or a configuration").fill(SERVICE % ("new", "ClusterIP", ""))
    await page.get_by_role("button", name="Show what would change").click()
    await expect(page.get_by_role("heading", name="Result")).to_be_visible()
    await expect(page.get_by_text("10.96.0.254").first).to_be_visible()
    await expect(page.get_by_label("Manifests or a configuration")).to_have_value(
        re.compile("name: new")
    )
    assert await opened.barriers() == []
    assert opened.complaints == []


@pytest.mark.parametrize("path", ["/problems", "/time?node=node-a", "/plan"])
async def test_nobody_is_kept_out(opened: Tab, path: str) -> None:
    await opened.open(path)
    if path.startswith("/time"):
        await opened.page.locator(".chart canvas").first.wait_for()
    for dark, width in ((False, 1280), (True, 1280), (False, 400)):
        await opened.look(dark, width)
        assert await opened.barriers() == []
        assert await opened.overflow() == 0
    assert opened.complaints == []
