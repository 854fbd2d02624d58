"""The web application: three forms of an address, live blocks, headers, and who may ask."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest
from yarl import URL

from steersman import ui
from steersman.model.node_state import NodeState
from steersman.operate.answer import Answer, Block, QuestionError
from steersman.run.serve import http
from steersman.ui.pages import PAGES, about
from steersman.ui.requests import Asked
from steersman.ui.site import Page, Query, Site
from tests.support.pages import ScriptedFleet, events, serving
from tests.support.waiting import until

HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 253
BROKEN = "no <b>mode</b>"
STATIC = Path(ui.__file__).parent / "static"


class Modes(Answer, frozen=True, kw_only=True):
    modes: dict[str, str]
    node: str = ""

    def blocks(self, wide: bool) -> Iterator[Block]:
        yield from ()


async def modes(site: Site, query: Query) -> Modes:
    if BROKEN in (state.mode for state in site.fleet.nodes.values()):
        raise QuestionError(f"{BROKEN}, of a")
    if query.get("node", "") == "unknown":
        raise QuestionError("there is no node unknown")
    return Modes(
        modes={name: state.mode for name, state in site.fleet.nodes.items()},
        node=query.get("node", ""),
    )


TEMPLATE = """{% extends "base.html" %}
{% block main %}<p>{{ answer.node }}</p>
<div {{ live("modes") }}>{% block live_modes %}
{% for node, mode in answer.modes.items() %}<b>{{ node | cut }}: {{ mode }}</b>
{% endfor %}{% endblock %}</div>
<div {{ live("constant") }}>{% block live_constant %}always the same{% endblock %}</div>
{% endblock %}"""


@pytest.fixture
def site() -> Site:
    fleet = ScriptedFleet({"a": NodeState("a", "nftables")})
    site = Site(fleet, [Page("/modes", "modes.html", modes, "Modes", "Modes"), about.PAGE])
    loader = site._templates.loader
    assert loader is not None
    site._templates.loader = jinja2.ChoiceLoader(
        [jinja2.DictLoader({"modes.html": TEMPLATE}), loader]
    )
    return site


def fleet(site: Site) -> ScriptedFleet:
    assert isinstance(site.fleet, ScriptedFleet)
    return site.fleet


async def test_an_address_is_a_page_and_its_json_twin(site: Site) -> None:
    async with serving(site) as client:
        page = await client.get("/modes", headers={"Accept": "text/html,*/*"})
        assert page.content_type == "text/html"
        text = await page.text()
        assert "a</bdi>: nftables" in text
        assert 'sse-connect="/modes"' in text
        assert 'aria-current="page">Modes' in text
        twin = await client.get("/modes?node=b", headers={"Accept": "application/json"})
        assert await twin.json() == {"source": "", "modes": {"a": "nftables"}, "node": "b"}
        assert twin.headers["Vary"] == "Accept"


async def test_only_the_blocks_that_changed_are_sent(site: Site) -> None:
    async with serving(site) as client:

        def enough(seen: list[tuple[str, str]]) -> bool:
            if len(seen) == 2:
                fleet(site).put(NodeState("b", "ebpf"))
            return len(seen) == 3

        found = await events(client, "/modes", enough)
        assert [name for name, _ in found] == ["live_modes", "live_constant", "live_modes"]
        assert "b</bdi>: ebpf" in found[2][1]


async def test_every_value_is_escaped(site: Site) -> None:
    fleet(site).put(NodeState(HOSTILE, HOSTILE))
    async with serving(site) as client:
        page = await (await client.get("/modes", params={"node": HOSTILE})).text()
        assert "<script>alert" not in page
        [(_, block), *_] = await events(client, "/modes", lambda seen: len(seen) == 2)
        assert "<script>" not in block
        assert "<bdi title=" in block


async def test_a_question_without_an_answer_is_an_error_page(site: Site) -> None:
    async with serving(site) as client:
        page = await client.get("/modes?node=unknown")
        assert page.status == 503
        assert "there is no node unknown" in await page.text()
        twin = await client.get("/modes?node=unknown", headers={"Accept": "application/json"})
        assert await twin.json() == {"error": "there is no node unknown"}
        found = await events(client, "/modes?node=unknown", lambda seen: True)
        assert found == [("problem", "there is no node unknown")]
        missing = await client.get("/nowhere")
        assert missing.status == 404
        assert "Content-Security-Policy" in missing.headers


async def test_a_page_says_why_it_is_not_followed_and_when_it_is_again(site: Site) -> None:
    async with serving(site) as client:

        def enough(seen: list[tuple[str, str]]) -> bool:
            if len(seen) in (2, 3):
                fleet(site).put(NodeState("a", BROKEN if len(seen) == 2 else "nftables"))
            return len(seen) == 4

        found = await events(client, "/modes", enough)
    assert found[2:] == [("problem", f"{BROKEN}, of a"), ("problem", "")]


async def test_other_names_of_the_server_are_refused(site: Site) -> None:
    async with serving(site) as client:
        for host, status in (("localhost:1", 200), ("[::1]:80", 200), ("evil.example", 403)):
            reply = await client.get("/modes", headers={"Host": host})
            assert reply.status == status, host


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"X-CSRF-Token": "wrong"}, 403),
        ({"X-CSRF-Token": "TOKEN"}, 200),
        ({"X-CSRF-Token": "TOKEN", "Origin": "http://evil.example"}, 403),
        ({"X-CSRF-Token": "TOKEN", "Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
async def test_an_action_needs_the_token_of_our_pages(
    site: Site, headers: dict[str, str], status: int
) -> None:
    started: list[str] = []

    async def start(_: Site, asked: Asked) -> http.Answer:
        started.append(asked.request.path)
        return http.Answer("started")

    site.action("/start", start)
    headers = {name: value.replace("TOKEN", site.access.token) for name, value in headers.items()}
    async with serving(site) as client:
        assert (await client.get("/start")).status == 405
        assert (await client.post("/start", headers=headers)).status == status
    assert started == ["/start"] * (status == 200)


async def test_a_form_carries_the_token_without_scripts(site: Site) -> None:
    async def start(_: Site, asked: Asked) -> http.Answer:
        return http.Answer(asked.form.text("word"))

    site.action("/start", start)
    async with serving(site) as client:
        reply = await client.post("/start", data={"csrf": site.access.token, "word": "go"})
        assert await reply.text() == "go"


async def test_assets_are_those_of_their_projects(site: Site) -> None:
    async with serving(site) as client:
        rows = json.loads((STATIC / "VENDORED.json").read_text())
        for row in rows:
            reply = await client.get(f"/static/{row['file']}")
            assert hashlib.sha256(await reply.read()).hexdigest() == row["sha256"]
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
        known = {row["file"] for row in rows} | {"app.js", "app.css", "icon.svg"}
        ours = {path.name for path in STATIC.iterdir() if path.suffix in {".js", ".css"}}
        assert {name for name in ours if ".min." in name} <= known
        for name in ("VENDORED.json", "..%2fsite.py", "nothing.js"):
            assert (await client.get(f"/static/{name}")).status == 404
        assert "htmx.org" in await (await client.get("/about")).text()


async def test_an_asset_that_the_browser_has_is_not_sent_again(site: Site) -> None:
    async with serving(site) as client:
        first = await client.get("/static/app.css")
        assert first.headers["Cache-Control"] == "no-cache"
        tag = first.headers["ETag"]
        for known, status in ((tag, 304), ('"another"', 200)):
            reply = await client.get("/static/app.css", headers={"If-None-Match": known})
            assert (reply.status, reply.headers["ETag"]) == (status, tag)
            assert (await reply.read() == b"") == (status == 304)


async def test_addresses_and_methods(site: Site) -> None:
    async with serving(site) as client:
        head, whole = await client.head("/about"), await client.get("/about")
        assert head.headers["Content-Length"] == whole.headers["Content-Length"]
        assert await head.read() == b""
        for method in ("POST", "PUT", "BREW"):
            reply = await client.request(method, "/about")
            assert (reply.status, reply.headers["Allow"]) == (405, "GET")
        for path in ("/nowhere", "/about/", "/modes/a", "/static/%2e%2e%2fabout"):
            reply = await client.get(URL(path, encoded=True))
            assert reply.status == 404, path


async def test_only_so_many_pages_are_followed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steersman.ui.site._MOST_READERS", 2)
    monkeypatch.setattr("steersman.ui.site._HEARTBEAT", 0.05)
    stream = {"Accept": "text/event-stream"}
    async with serving(site) as client:
        replies = [await client.get("/modes", headers=stream) for _ in range(2)]
        assert [reply.status for reply in replies] == [200, 200]
        assert (await client.get("/modes", headers=stream)).status == 503
        replies[0].close()
        await until(lambda: site._readers == 1)  # it is noticed by the next sign of life
        assert (await client.get("/modes", headers=stream)).status == 200
        replies[1].close()


async def test_pages_run_no_inline_script_and_ask_no_other_server(site: Site) -> None:
    async with serving(site) as client:
        reply = await client.get("/about")
        policy = reply.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        text = await reply.text()
        assert "http://" not in text
        assert "https://" not in text
        assert "style=" not in text


def test_every_page_has_a_template_and_a_title() -> None:
    templates = Path(ui.__file__).parent / "templates"
    for page in PAGES:
        assert (templates / page.template).is_file()
        assert page.title
