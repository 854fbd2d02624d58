"""The pages of problems, of the last hour, and of planned changes, as a reader gets them."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest

from steersman.model.findings import Finding, Severity
from steersman.model.history import History, Refusal, SyncRecord
from steersman.model.node_state import Condition, NodeState
from steersman.operate.doctor.check import Diagnosis
from steersman.operate.doctor.result import CheckResult, Verdict
from steersman.ui.doctor_runs import DoctorRuns
from steersman.ui.pages import PAGES
from steersman.ui.site import Site
from tests.support.pages import ScriptedFleet, events, serving

JSON = {"Accept": "application/json"}
HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 253
NOW = 1_700_000_000.0


def state(name: str, **fields: Any) -> NodeState:
    return msgspec.structs.replace(NodeState(name, "nftables", now=NOW, version="1"), **fields)


def site_of(*states: NodeState, **fields: Any) -> tuple[Site, ScriptedFleet]:
    fleet = ScriptedFleet({each.node: each for each in states}, **fields)
    return Site(fleet, PAGES), fleet


BAD = Finding("Service shop/cart", "spec.ports[0].port", "70000 must be 1 to 65535", Severity.ERROR)
LATE = Condition("Healthy", "False", "Late", "a change waits for too long", NOW)


async def test_problems_of_all_nodes() -> None:
    site, _ = site_of(state("a", findings=(BAD,)), state("b", findings=(BAD,), conditions=(LATE,)))
    async with serving(site) as client:
        text = await (await client.get("/problems")).text()
        assert 'href="/services/shop/cart"' in text
        assert text.index("Healthy") < text.index("70000 must be"), "those of nodes come first"
        assert "all 2 nodes" in text
        assert "What to do:" in text
        assert "kubectl -n shop get service cart -o yaml" in text
        twin = await (await client.get("/problems?severity=error&q=70000", headers=JSON)).json()
        assert [each["nodes"] for each in twin["problems"]] == [["a", "b"]]
        assert twin["asked"]["text"] == "70000"
        wrong = await client.get("/problems?severity=fatal", headers=JSON)
        assert (await wrong.json())["error"].startswith("there is no severity fatal")


async def test_problems_without_any() -> None:
    site, _ = site_of(state("a"))
    async with serving(site) as client:
        assert "Nothing is wrong on 1 node." in await (await client.get("/problems")).text()
        assert "as the search asks" in await (await client.get("/problems?q=x")).text()
    empty, _ = site_of()
    async with serving(empty) as client:
        assert "No node is known." in await (await client.get("/problems")).text()


async def test_hostile_text_is_only_text() -> None:
    finding = Finding(f"Service shop/{HOSTILE}", HOSTILE, HOSTILE, Severity.ERROR)
    site, fleet = site_of(state(HOSTILE, findings=(finding,), conditions=(LATE,)))
    fleet.pages[HOSTILE, "/history"] = msgspec.json.encode(
        History(HOSTILE, NOW, records=(sync(5, names=(HOSTILE,), failure=HOSTILE),))
    )
    async with serving(site) as client:
        for path in ("/problems", "/time", "/plan", f"/problems?q={HOSTILE}&node={HOSTILE}"):
            reply = await client.get(path)
            assert reply.status == 200, path
            text = await reply.text()
            assert "<script>alert" not in text, path
            assert "style=" not in text
            assert "onclick" not in text


async def test_problems_follow_the_nodes() -> None:
    site, fleet = site_of(state("a"))
    async with serving(site) as client:

        def enough(seen: list[tuple[str, str]]) -> bool:
            if len(seen) == 2:
                fleet.put(state("a", findings=(BAD,)))
            return any("70000" in data for _, data in seen)

        found = await events(client, "/problems", enough)
        assert found[-1][0] == "live_problems"


# Doctor


def diagnosis(*verdicts: Verdict) -> Diagnosis:
    return Diagnosis(
        asked="node a",
        cause="the table is full",
        results=tuple(
            CheckResult(check=f"check-{n}", title=f"Check {n}", verdict=each, text=f"text {n}")
            for n, each in enumerate(verdicts)
        ),
    )


async def test_doctor_with_one_click() -> None:
    site, fleet = site_of(state("a"), state("b"))
    fleet.lines = [{"answer": msgspec.to_builtins(diagnosis(Verdict.ERROR, Verdict.OK))}]
    async with serving(site) as client:
        refused = await client.post("/problems/doctor", data={"node": "a"})
        assert refused.status == 403
        form = {"node": "a", "csrf": site.access.token}
        text = await (await client.post("/problems/doctor", data=form)).text()
        assert fleet.posted == [("a", "/run", {"command": "doctor", "arguments": ()})]
        assert "the table is full" in text
        assert "text 0" in text
        assert "text 1" not in text
        twin = await (await client.get("/problems", headers=JSON)).json()
        assert [each["kind"] for each in twin["problems"]] == ["doctor"]


async def test_doctor_of_a_service_is_listed_with_the_problems() -> None:
    site, fleet = site_of(state("a"))
    fleet.lines = [{"answer": msgspec.to_builtins(diagnosis(Verdict.WARNING))}]
    async with serving(site) as client:
        form = {"node": "a", "command": "doctor", "csrf": site.access.token}
        assert (await client.post("/services/shop/cart/run", data=form)).status == 200
        twin = await (await client.get("/problems?namespace=shop", headers=JSON)).json()
    assert [each["service"] for each in twin["problems"]] == ["shop/cart"]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "node a ended without an answer"),
        ([{"error": "it is busy"}], "it is busy"),
        ([{"answer": {"asked": 5}}], "node a is not understood"),
    ],
)
async def test_doctor_that_cannot_be_run(lines: list[Any], error: str) -> None:
    site, fleet = site_of(state("a"))
    fleet.lines = lines
    async with serving(site) as client:
        form = {"node": "a", "csrf": site.access.token}
        reply = await client.post("/problems/doctor", data=form)
        assert reply.status == 503
        assert error in await reply.text()
        assert len(site.doctor_runs) == 0


def test_runs_of_doctor_are_bounded_and_forgotten() -> None:
    clock = [NOW]
    runs = DoctorRuns(lambda: clock[0])
    for number in range(150):
        runs.note("a", f"shop/s{number}", diagnosis(*[Verdict.WARNING] * 60))
    assert len(runs) == 100
    assert len(runs.results) == 4000
    runs.note("a", "shop/s149", diagnosis(Verdict.OK))
    assert len(runs) == 100
    assert "shop/s149" not in {each.question for each in runs.results}
    clock[0] += 3601
    assert (len(runs), runs.results) == (0, ())


# The last hour


def sync(ago: float, **fields: Any) -> SyncRecord:
    usual = SyncRecord(NOW - ago, NOW - ago, phases={"plan": 0.01}, seconds=0.01, services=1)
    return msgspec.structs.replace(usual, **fields)


def history(*records: SyncRecord) -> bytes:
    return msgspec.json.encode(History("a", NOW, started=NOW - 7200, records=records))


async def test_the_last_hour_of_a_node() -> None:
    refusal = Refusal("shop/cart:http (TCP, IPv4)", "no such device")
    records = (
        sync(30, names=("shop/cart",), lag=0.2),
        sync(20, refused=1, refusals=(refusal,), revision=7),
    )
    site, _ = site_of(state("a"), pages={("a", "/history"): history(*records)})
    async with serving(site) as client:
        text = await (await client.get("/time?node=a")).text()
        assert "The last hour of node" in text
        assert text.count('<tr id="sync-') == 2
        (chart, lags) = re.findall(r'data-chart="([^"]*)"', text)
        times = msgspec.json.decode(chart.replace("&#34;", '"'))["times"]
        assert len(times) == 181
        assert "&#34;lag&#34;" in lags
        (link, _) = re.findall(r'href="([^"]*sync=[^"]*)"', text)
        chosen = await (await client.get("/time" + link.replace("&amp;", "&"))).text()
        assert "no such device" in chosen
        assert 'aria-current="true"' in chosen
        twin = await (await client.get("/time?only=refused", headers=JSON)).json()
        assert [row["verdict"] for row in twin["rows"]] == ["refused"]
        gone = await (await client.get("/time?sync=1")).text()
        assert "no longer remembered" in gone


async def test_a_history_is_asked_for_once_by_many_readers() -> None:
    site, fleet = site_of(state("a"), pages={("a", "/history"): history(sync(5))})
    asked: list[str] = []
    get = fleet.get

    async def counted(node: str, path: str) -> bytes:
        asked.append(path)
        return await get(node, path)

    fleet.get = counted  # type: ignore[method-assign]
    async with serving(site) as client:
        replies = await asyncio.gather(*(client.get("/time") for _ in range(5)))
        replies.append(await client.get("/time"))
        assert {reply.status for reply in replies} == {200}
        assert asked == ["/history"]
        fleet.put(state("a", revision=99))  # and after a sync once more
        replies = await asyncio.gather(*(client.get("/time") for _ in range(5)))
        assert {reply.status for reply in replies} == {200}
    assert asked == ["/history"] * 2


async def test_a_node_without_a_history() -> None:
    site, fleet = site_of(state("a"))
    async with serving(site) as client:
        assert (await client.get("/time?node=a")).status == 503
        fleet.pages["a", "/history"] = b'{"node": 5}'
        reply = await client.get("/time?node=a", headers=JSON)
        assert "node a is not understood" in (await reply.json())["error"]
        fleet.pages["a", "/history"] = history()
        assert "nothing changed" in await (await client.get("/time?node=a")).text()
    empty, _ = site_of()
    async with serving(empty) as client:
        assert "no node is known yet" in await (await client.get("/time")).text()
