"""Who may see and start what in the cluster: the API server decides."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession
from yarl import URL

from steersman.model.node_state import NodeState
from steersman.operate.answer import Answer, Block
from steersman.run.serve import http
from steersman.source.kubeconfig import ClusterAccess as ApiServers
from steersman.ui.access import COOKIE, ClusterAccess, Reviewer
from steersman.ui.pages import about
from steersman.ui.requests import Asked
from steersman.ui.site import Page, Query, Site
from tests.support.apiserver.server import ApiServer
from tests.support.pages import ScriptedFleet, serving

HTML = {"Accept": "text/html"}
ALL = {("list", "nodes"), ("list", "services")}
SHOP = {
    ("get", "services", "shop"),
    ("list", "endpointslices.discovery.k8s.io", "shop"),
}
EXEC = {("create", "pods/exec", "kube-system")}
ANNA = {"username": "anna", "uid": "7", "groups": ["ops"], "extra": {"scopes": ["a", "b"]}}


class Said(Answer, frozen=True, kw_only=True):
    text: str

    def blocks(self, wide: bool) -> Iterator[Block]:
        yield from ()


async def say(site: Site, query: Query) -> Said:
    other = query.get("client", "").partition("/")[0]
    return Said(text=f"{query['namespace']}, {other}: {await site.access.sees_pods(other)}")


async def start(_: Site, __: Asked) -> http.Answer:
    return http.Answer("started")


class Cluster:
    """A site in a cluster: its API server, a clock, and a reader."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.now = 1000.0
        reviewer = Reviewer(ApiServers(servers=(server.url,)))
        self.access = ClusterAccess(reviewer, "kube-system", clock=lambda: self.now)
        pages = (
            about.PAGE,
            Page("/of/{namespace}", "about.html", say, "Of", actions={"/doctor": start}),
        )
        self.fleet = ScriptedFleet({"a": NodeState("a", "nftables")})
        self.site = Site(self.fleet, pages, self.access)
        self.client: ClientSession

    def may(self, *rights: tuple[str, ...]) -> None:
        self.server.reviews.allowed["ops"] = set(rights)

    @property
    def asked(self) -> int:
        return len(self.server.reviews.asked)

    async def status(self, path: str, token: str = "", **headers: str) -> int:
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        accept = {"Accept": "application/json"}
        async with self.client.get(
            path, headers={**accept, **bearer, **headers}, allow_redirects=False
        ) as reply:
            return reply.status

    async def log_in(self, token: str = "good", target: str = "/about", **headers: str) -> Any:
        form = {"token": token, "next": target, "csrf": self.access.token}
        return await self.client.post("/login", data=form, headers=headers, allow_redirects=False)


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    async with ApiServer() as server:
        server.reviews.users["good"] = ANNA
        here = Cluster(server)
        here.may(*ALL)
        async with serving(here.site) as client:
            here.client = client
            yield here


async def test_a_bearer_token_is_reviewed_with_all_that_is_known_of_its_user() -> None:
    async with cluster() as here:
        assert await here.status("/about", "good") == 200
        token, nodes, services = here.server.reviews.asked
        assert token == {"token": "good"}
        for spec, resource in ((nodes, "nodes"), (services, "services")):
            assert {name: spec[name] for name in ("user", "uid", "groups", "extra")} == {
                "user": "anna",
                **{name: ANNA[name] for name in ("uid", "groups", "extra")},
            }
            assert spec["resourceAttributes"]["resource"] == resource
            assert spec["resourceAttributes"]["namespace"] == ""


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer bad"}, {"Authorization": "Basic Z29vZDo="}],
    ids=["none", "unknown", "not bearer"],
)
async def test_without_a_valid_token_there_is_nothing(headers: dict[str, str]) -> None:
    async with cluster() as here:
        for path in ("/about", "/of/shop", "/nowhere"):
            async with here.client.get(path, headers={"Accept": "*/*", **headers}) as reply:
                assert reply.status == 401
                assert reply.headers["WWW-Authenticate"] == "Bearer"
                assert "nftables" not in await reply.text()
        assert await here.status("/healthz") == 200
        assert await here.status("/static/app.css") == 200


async def test_a_page_of_a_service_needs_rights_in_its_namespace_only() -> None:
    async with cluster() as here:
        here.may(*SHOP)
        assert await here.status("/of/shop", "good") == 200
        assert await here.status("/of/other", "good") == 403
        assert await here.status("/of/shop?namespace=other", "good") == 200
        async with here.client.get("/about", headers={"Authorization": "Bearer good"}) as reply:
            assert reply.status == 403
            assert "anna may not list nodes, which this needs" in await reply.text()


async def test_pods_of_other_namespaces_are_for_readers_who_may_get_them() -> None:
    async with cluster() as here:
        here.may(*SHOP, ("get", "pods", "bank"))
        for namespace, known in (("bank", True), ("other", False)):
            path = f"/of/shop?client={namespace}/web-1"
            headers = {"Authorization": "Bearer good", "Accept": "application/json"}
            async with here.client.get(path, headers=headers) as reply:
                assert (await reply.json())["text"] == f"shop, {namespace}: {known}"
    assert not await here.access.sees_pods("bank"), "no request is answered now"


async def test_answers_are_kept_for_some_seconds_and_a_lost_right_ends() -> None:
    async with cluster() as here:
        assert await here.status("/about", "good") == 200
        asked = here.asked
        here.may()
        here.now += 9
        assert await here.status("/about", "good") == 200
        assert here.asked == asked
        here.now += 2
        assert await here.status("/about", "good") == 403
        here.may(*ALL)
        here.now += 11
        assert await here.status("/about", "good") == 200


async def test_a_stream_ends_when_its_reader_may_no_longer_see_it() -> None:
    async with cluster() as here:
        await here.log_in()

        stream = await here.client.get("/about", headers={"Accept": "text/event-stream"})
        assert stream.status == 200
        here.may()
        here.now += 11
        here.fleet.put(NodeState("b", "ebpf"))
        async with asyncio.timeout(60):
            text = "anna may not list nodes, which this needs"
            assert f"event: problem\ndata: {text}\n\n".encode() in await stream.read()
        assert await here.status("/about") == 403


async def test_a_stream_ends_with_its_session() -> None:
    async with cluster() as here:
        await here.log_in()
        stream = await here.client.get("/about", headers={"Accept": "text/event-stream"})
        here.now += 3601
        here.fleet.put(NodeState("b", "ebpf"))
        async with asyncio.timeout(60):
            assert b"data: you are not logged in: load this page" in await stream.read()


async def test_a_browser_logs_in_and_out_with_a_cookie_that_is_not_the_token() -> None:
    async with cluster() as here:
        path = "/about?x=1&y=2"
        async with here.client.get(path, headers=HTML, allow_redirects=False) as reply:
            assert reply.status == 303
            to_login = URL(reply.headers["Location"])
            assert (to_login.path, dict(to_login.query)) == ("/login", {"next": path})
        async with here.client.get(to_login, headers=HTML) as form:
            page = await form.text()
            assert 'name="next" value="/about?x=1&amp;y=2"' in page
            assert f'value="{here.access.token}"' in page
        reply = await here.log_in(target=path)
        assert (reply.status, reply.headers["Location"]) == (303, path)
        cookie = reply.headers["Set-Cookie"]
        assert re.search(rf"^{COOKIE}=[\w-]{{40,}};", cookie)
        assert "good" not in cookie
        for attribute in ("HttpOnly", "SameSite=Strict", "Path=/"):
            assert attribute in cookie
        assert "Secure" not in cookie
        assert await here.status(path) == 200
        async with here.client.get(path, headers=HTML) as page_reply:
            assert "Log out" in await page_reply.text()
        form_data = {"csrf": here.access.token}
        out = await here.client.post("/logout", data=form_data, allow_redirects=False)
        assert (out.status, out.headers["Location"]) == (303, "/login")
        here.client.cookie_jar.update_cookies({COOKIE: cookie.split("=")[1].split(";")[0]})
        assert await here.status(path) == 401


async def test_behind_https_the_cookie_is_for_https_only() -> None:
    async with cluster() as here:
        reply = await here.log_in(**{"X-Forwarded-Proto": "https"})
        assert "Secure" in reply.headers["Set-Cookie"]


async def test_a_login_is_refused_without_a_good_token_or_from_elsewhere() -> None:
    async with cluster() as here:
        for token in ("bad", "", "x" * 20_000, "\x00\u00e9"):
            reply = await here.log_in(token)
            assert reply.status == 401
            assert "does not accept this token" in await reply.text()
            assert "Set-Cookie" not in reply.headers
        form = {"token": "good", "csrf": "forged"}
        assert (await here.client.post("/login", data=form)).status == 403
        assert (await here.log_in(Origin="https://evil.example")).status == 403
        assert (await here.log_in(**{"Sec-Fetch-Site": "cross-site"})).status == 403


@pytest.mark.parametrize(
    "target", ["//evil.example", "https://evil.example", "/\\evil", "/a\nb", ""]
)
async def test_a_login_never_leads_to_another_server(target: str) -> None:
    async with cluster() as here:
        assert (await here.log_in(target=target)).headers["Location"] == "/"


async def test_sessions_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steersman.ui.access._MOST_SESSIONS", 2)
    async with cluster() as here:
        await here.log_in()
        here.now += 3601
        assert await here.status("/about") == 401, "idle for too long"
        await here.log_in()
        for _ in range(9):
            here.now += 3500
            last = await here.status("/about")
        assert last == 401, "used all the time, and too old"
        cookies = [(await here.log_in()).headers["Set-Cookie"].split(";")[0] for _ in range(3)]
        here.client.cookie_jar.clear()
        found = [await here.status("/about", Cookie=cookie) for cookie in cookies]
        assert found == [401, 200, 200]


async def test_an_action_needs_the_right_to_run_commands_and_our_own_page() -> None:
    async with cluster() as here:
        await here.log_in()
        form = {"csrf": here.access.token}
        refused = await here.client.post("/doctor", data=form)
        assert refused.status == 403
        assert "may not create pods/exec in namespace kube-system" in await refused.text()
        here.may(*ALL, *EXEC)
        here.now += 11
        assert await (await here.client.post("/doctor", data=form)).text() == "started"
        assert (await here.client.post("/doctor")).status == 403
        bearer = {"Authorization": "Bearer good"}
        assert (await here.client.post("/doctor", headers=bearer)).status == 200
        here.may(*EXEC)
        here.now += 11
        assert (await here.client.post("/doctor", headers=bearer)).status == 403


async def test_without_an_answer_of_the_api_server_nobody_gets_in() -> None:
    async with cluster() as here:
        await here.server.stop_listening()
        assert await here.status("/about", "good") == 503
        await here.server.listen_again()
        assert await here.status("/about", "good") == 200, "a failure is not kept"
        here.server.reviews.users["odd"] = {"username": 7}
        assert await here.status("/about", "odd") == 503
