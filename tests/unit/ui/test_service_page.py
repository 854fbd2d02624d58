"""The page of a Service, what it starts on a node, its rates, and the map of traffic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from steersman.model.findings import Finding, Severity
from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.model.top import TopRow, TopSample
from steersman.model.tracing import TraceStep
from steersman.model.world import World
from steersman.operate.answer import QuestionError
from steersman.operate.doctor.check import Diagnosis
from steersman.operate.doctor.result import CheckResult, Verdict
from steersman.operate.dump import KernelDump, KernelLine
from steersman.operate.node_trouble import Disagreement
from steersman.operate.trace import ShownStep, TraceAnswer
from steersman.ui.access import Access
from steersman.ui.pages import PAGES
from steersman.ui.pages.service import arguments_of
from steersman.ui.sampling import Sampler
from steersman.ui.site import Site
from tests.support.builders import kube
from tests.support.builders.asked import DEMO, NODE_A, NODES, POD_A, WEB, WEB_SLICE, asked
from tests.support.builders.asked import pod_endpoint as endpoint
from tests.support.pages import ScriptedFleet, events, serving

HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 253
JSON = {"Accept": "application/json"}
PAGE = "/services/shop/web"
UNKNOWN = ObjectName("shop", "wob")
CART = kube.service("cart", "10.96.0.20")
CART_SLICE = kube.endpoint_slice("cart-1", "cart", endpoint("10.244.2.77", "cart-1", "node-b"))


class Fleet(ScriptedFleet):
    """Nodes that answer for one Service only if they are asked for one, and count requests."""

    def __init__(self, **worlds: World) -> None:
        names = {name.replace("_", "-"): world for name, world in worlds.items()}
        super().__init__({name: NodeState(name, "memory") for name in names}, worlds=names)
        self.whole: World | None = None
        self.asked: list[str] = []

    async def world(self, node: str, services: Sequence[ObjectName] = ()) -> World:
        self.asked.append(f"{node} {' '.join(map(str, services)) or 'all'}")
        if UNKNOWN in services:
            raise QuestionError(f"there is no Service {UNKNOWN} on this node")
        if not services and self.whole is not None:
            return self.whole
        return await super().world(node, services)

    async def get(self, node: str, path: str) -> bytes:
        self.asked.append(f"{node} {path}")
        await asyncio.sleep(0)
        return await super().get(node, path)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(node_a=asked(*DEMO), node_b=asked(*DEMO, node="node-b"))


@pytest.fixture
def site(fleet: Fleet) -> Site:
    return Site(fleet, PAGES)


async def page(site: Site, path: str = PAGE) -> str:
    async with serving(site) as client:
        reply = await client.get(path)
        assert reply.status == 200, await reply.text()
        return await reply.text()


async def twin(site: Site, path: str = PAGE) -> dict[str, Any]:
    async with serving(site) as client:
        found: dict[str, Any] = await (await client.get(path, headers=JSON)).json()
        return found


def counts(*rows: TopRow, **more: Any) -> bytes:
    fields = {"counted": True, "interval": 1.0, "matching": len(rows), **more}
    return msgspec.msgpack.encode(TopSample(NodeState("node-a", "memory"), rows=rows, **fields))


# The page


async def test_the_page_has_the_service_and_the_way_of_a_packet(site: Site) -> None:
    text = await page(site)
    assert '<ol class="way" aria-label="Stages of the way">' in text
    assert '<div class="way-box way-endpoint"><span><bdi>shop/web-1</bdi></span>' in text
    assert "forwarded to one of 3 endpoints" in text
    assert "10.96.0.10:80/TCP is the clusterIP of shop/web:http" in text
    assert '<option value="192.0.2.1:30080/TCP">node port' in text
    assert "in: ready" in text
    assert "NodePort, internal traffic policy Cluster, external traffic policy Cluster." in text
    assert "style=" not in text


async def test_the_json_twin_has_the_same(site: Site) -> None:
    found = await twin(site, f"{PAGE}?node=node-b&client=external&to={NODE_A}:30080/TCP")
    assert found["node"] == "node-b"
    assert found["nodes"] == ["node-a", "node-b"]
    assert [each["selected"] for each in found["choices"] if each["to"].startswith(NODE_A)] == [
        True
    ]
    assert found["flow"]["hops"][0]["frontend"] == "nodePort"
    assert [each["node"] for each in found["picture"]["stages"]] == ["", "node-a", ""]
    assert found["served"]["ports"][0]["endpoints"][0]["why"] == "in: ready"


async def test_the_page_follows_its_node(site: Site, fleet: Fleet) -> None:
    async with serving(site) as client:

        def enough(seen: list[tuple[str, str]]) -> bool:
            if len(seen) == 3:
                fleet.worlds["node-a"] = asked(WEB, *NODES)
                fleet.put(NodeState("node-a", "memory", revision=2))
            return len(seen) > 3 and all("rejected" in seen[-1][1] for _ in seen[3:4])

        found = await events(client, PAGE, lambda seen: enough(seen) or len(seen) >= 6)
    names = [name for name, _ in found]
    assert names[:3] == ["live_problem", "live_way", "live_served"]
    assert any(name == "live_way" and "rejected" in text for name, text in found[3:])


async def test_nodes_that_serve_it_otherwise_are_named(site: Site, fleet: Fleet) -> None:
    fleet.disagreements = (
        Disagreement(("node-b",), "node-a", ("shop/web",), 1),
        Disagreement(("node-c",), "node-a", ("shop/other",), 1),
    )
    text = await page(site)
    assert 'Node <a href="?node=node-b"><bdi>node-b</bdi></a> serves it otherwise' in text
    assert "node-c" not in text


async def test_a_world_is_read_again_only_after_a_sync(site: Site, fleet: Fleet) -> None:
    async with serving(site) as client:
        for _ in range(3):
            await client.get(PAGE)
        assert fleet.asked == ["node-a shop/web"]
        fleet.put(NodeState("node-a", "memory", revision=2))
        await client.get(PAGE)
    assert fleet.asked == ["node-a shop/web"] * 2


async def test_a_client_behind_another_service_is_looked_up_once(site: Site, fleet: Fleet) -> None:
    fleet.whole = asked(*DEMO, CART, CART_SLICE)
    async with serving(site) as client:
        for _ in range(2):
            reply = await client.get(f"{PAGE}?client=shop/cart-1", headers=JSON)
            found = await reply.json()
            assert found["wayProblem"] == ""
            assert found["flow"]["source"] == "10.244.2.77"
            assert found["flow"]["hops"][0]["node"] == "node-b"
    assert fleet.asked.count("node-a all") == 1


@pytest.mark.parametrize(
    ("namespace", "known"), [("shop", True), ("market", True), ("bank", False)]
)
async def test_readers_with_rights_learn_nothing_of_other_namespaces(
    namespace: str, known: bool, fleet: Fleet
) -> None:
    class Rights(Access):
        async def sees_pods(self, namespace: str) -> bool:
            return namespace != "bank"

    ref = {"kind": "Pod", "namespace": namespace, "name": "cart-1"}
    ends = {"addresses": ["10.244.2.77"], "nodeName": "node-b", "targetRef": ref}
    fleet.whole = asked(*DEMO, CART, kube.endpoint_slice("cart-1", "cart", ends))
    found = await twin(Site(fleet, PAGES, Rights()), f"{PAGE}?client={namespace}/cart-1")
    assert (found["flow"] is not None) == known
    assert ("10.244.2.77" in json.dumps(found)) == known


async def test_pods_are_looked_up_again_after_a_while_found_or_not(fleet: Fleet) -> None:
    now = [100.0]
    sampler, cart = Sampler(fleet, lambda: now[0]), ObjectName("shop", "cart-1")
    fleet.whole = asked(*DEMO)
    assert await sampler.pod("node-a", cart) is None
    fleet.whole = asked(*DEMO, CART, CART_SLICE)
    assert await sampler.pod("node-a", cart) is None
    now[0] += 60
    pod = await sampler.pod("node-a", cart)
    assert pod is not None
    assert pod.node == "node-b"
    assert fleet.asked == ["node-a all"] * 2
    fleet.whole = None
    assert await sampler.pod("node-z", cart) is None  # it cannot be asked


@pytest.mark.parametrize("client", ["shop/nobody", "svc/web", "[", "node/none"])
async def test_a_client_that_nobody_knows_is_said(site: Site, client: str) -> None:
    found = await twin(site, f"{PAGE}?client={client}")
    assert found["wayProblem"]
    assert found["served"]["ports"]


async def test_an_unknown_service_and_an_unknown_node_say_what_to_do(site: Site) -> None:
    text = await page(site, "/services/shop/wob")
    assert "there is no Service shop/wob on this node" in text
    assert "Check the namespace and the name" in text
    text = await page(site, f"{PAGE}?node=node-z")
    assert "node node-z: there is no node node-z" in text
    assert "choose another node" in text


async def test_a_page_without_nodes_says_so() -> None:
    text = await page(Site(Fleet(), PAGES))
    assert "no node has been reached yet" in text


@pytest.mark.parametrize(
    "spec", [{"clusterIP": "None"}, {"type": "ExternalName", "externalName": "x.example"}]
)
async def test_a_service_that_no_proxy_serves(spec: dict[str, str]) -> None:
    service = kube.service("web", "")
    service["spec"] |= spec
    text = await page(Site(Fleet(node_a=asked(service, *NODES)), PAGES))
    assert "no proxy takes part" in text
    assert "The way of a packet" not in text
    assert "hx-trigger" not in text


async def test_hostile_values_are_text() -> None:
    ends = kube.endpoint_slice(
        "web-1", "web", endpoint(POD_A, HOSTILE, HOSTILE), ports=WEB_SLICE["ports"]
    )
    finding = Finding("Service shop/web", "spec", HOSTILE, Severity.ERROR)
    site = Site(Fleet(node_a=asked(WEB, ends, *NODES, findings=(finding,))), PAGES)
    for path in (
        PAGE,
        f"{PAGE}?client={HOSTILE}&to={HOSTILE}",
        f"/services/{HOSTILE.replace('/', '')}/x",
    ):
        text = await page(site, path)
        assert "<script>alert" not in text


# What somebody starts


@pytest.mark.parametrize(
    ("command", "client", "to", "words"),
    [
        ("dump", "pod", "10.96.0.10:80/TCP", ["shop/web"]),
        ("doctor", "pod", "10.96.0.10:80/TCP", ["shop/web"]),
        (
            "doctor",
            "shop/cart-1",
            "10.96.0.10:80/TCP",
            ["--from=shop/cart-1", "--to=10.96.0.10:80/TCP"],
        ),
        ("trace", "pod", "10.96.0.10:80/TCP", ["--from=node", "--to=10.96.0.10:80/TCP"]),
        (
            "trace",
            "--netns=/x",
            "10.96.0.10:80/TCP",
            ["--from=--netns=/x", "--to=10.96.0.10:80/TCP"],
        ),
        ("trace", "external", "", ["--from=outside", "--to=shop/web"]),
    ],
)
def test_the_words_of_a_command(command: str, client: str, to: str, words: list[str]) -> None:
    assert arguments_of(command, "shop/web", client, to) == words


@pytest.mark.parametrize(
    ("command", "service"), [("rm", "shop/web"), ("dump", "--manifests=/etc/x")]
)
def test_other_words_are_refused(command: str, service: str) -> None:
    with pytest.raises(QuestionError):
        arguments_of(command, service, "", "")


ANSWERS = {
    "doctor": (
        Diagnosis(
            asked="Service shop/web on node-a",
            cause="no endpoint is ready <b>",
            remedy="look at the pods",
            results=(
                CheckResult(check="x", title="endpoints", verdict=Verdict.ERROR, text="none"),
            ),
        ),
        ["Likely cause: no endpoint is ready &lt;b&gt;", "What to do: look at the pods"],
    ),
    "dump": (
        KernelDump(
            service="shop/web",
            mode="memory",
            lines=(
                KernelLine(
                    "chain A", "-d 10.96.0.10/32 --dport 80 -j X", "the clusterIP", "planned"
                ),
                KernelLine("chain B", "-j MASQUERADE", "", "missing"),
                KernelLine("chain C", f"-> {POD_A}:8080", "an endpoint", "planned"),
            ),
        ),
        [
            "chain B",
            '<p class="line bad"><bdi>  - -j MASQUERADE</bdi>',
            "# an endpoint",
            "lines missing (-): 1, unexpected (+): 0",
        ],
    ),
    "trace": (
        TraceAnswer(
            flow="a to b",
            mode="memory",
            predicted="forwarded",
            steps=(ShownStep(1, TraceStep("prerouting", "KUBE-SERVICES", "-j X", "jump X")),),
        ),
        ["explain predicts: forwarded", "KUBE-SERVICES", "the kernel did what explain predicts"],
    ),
}


@pytest.mark.parametrize("command", ANSWERS)
async def test_a_button_runs_a_command_on_the_node(site: Site, fleet: Fleet, command: str) -> None:
    answer, says = ANSWERS[command]
    done = {"exitCode": 1, "answer": json.loads(msgspec.json.encode(answer))}
    fleet.lines = [{"running": 1.0}, done]
    form = {"csrf": site.access.token, "command": command, "node": "node-a", "client": "pod"}
    async with serving(site) as client:
        reply = await client.post(f"{PAGE}/run", data=form)
        text = await reply.text()
    assert reply.status == 200
    assert 'id="answer"' in text
    assert f'href="{PAGE}?node=node-a&amp;client=pod&amp;to="' in text
    for each in says:
        assert each in text
    (posted,) = fleet.posted
    assert posted[:2] == ("node-a", "/run")


async def test_a_command_without_the_token_does_not_run(site: Site, fleet: Fleet) -> None:
    async with serving(site) as client:
        reply = await client.post(f"{PAGE}/run", data={"command": "doctor", "node": "node-a"})
    assert reply.status == 403
    assert fleet.posted == []


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{"exitCode": 2, "error": "needs root"}], "needs root"),
        ([{"running": 1.0}], "node node-a ended without an answer"),
        ([], "node node-a ended without an answer"),
        (
            [{"exitCode": 0, "answer": {"asked": 5}}],
            "the answer of node node-a is not understood",
        ),
    ],
)
async def test_a_command_that_fails_says_why(
    site: Site, fleet: Fleet, lines: list[object], says: str
) -> None:
    fleet.lines = lines
    form = {"csrf": site.access.token, "command": "doctor", "node": "node-a"}
    async with serving(site) as client:
        assert says in await (await client.post(f"{PAGE}/run", data=form)).text()


# Rates and the map


async def test_rates_are_shown_and_drawn(site: Site, fleet: Fleet) -> None:
    rows = [TopRow(f"{POD_A}:8080 (http)", rate=2.5, connections=7, failures=1, failure_rate=0.5)]
    fleet.pages["node-a", "/top?sort=rate&service=shop%2Fweb"] = counts(*rows)
    text = await page(site, f"{PAGE}/rates")
    assert f'<th scope="row">{POD_A}:8080 (http)</th><td><bdi>shop/web-1</bdi></td>' in text
    assert '<td class="number">2.5</td>' in text
    assert "data-chart=" in text
    found = await twin(site, f"{PAGE}/rates?node=node-a")
    assert found["failures"]["series"][0] == {"label": "all endpoints", "values": [0.5]}


async def test_rates_of_a_node_that_does_not_answer_say_why(site: Site) -> None:
    found = await twin(site, f"{PAGE}/rates?node=node-b")
    assert found["problem"].startswith("node node-b: ")
    assert found["rows"] == []


async def test_readers_share_one_request(fleet: Fleet) -> None:
    now = [100.0]
    path = "/top?sort=rate&service=shop%2Fweb"
    fleet.pages["node-a", path] = counts(TopRow("a", rate=1.0))
    sampler = Sampler(fleet, lambda: now[0])
    await asyncio.gather(*(sampler.rates("node-a", "shop/web") for _ in range(5)))
    assert fleet.asked == [f"node-a {path}"]
    now[0] += 2.0
    rates = await sampler.rates("node-a", "shop/web")
    assert len(fleet.asked) == 2
    assert rates.connections is not None
    assert rates.connections.times == [100.0, 102.0]


async def test_what_the_server_remembers_is_bounded(fleet: Fleet) -> None:
    sampler = Sampler(fleet)
    for number in range(300):
        fleet.pages["node-a", f"/top?sort=rate&service=shop%2Fs{number}"] = counts()
        await sampler.rates("node-a", f"shop/s{number}")
        await sampler.world("node-a", ObjectName("shop", f"s{number}"))
    known = (sampler._counts, sampler._rates, sampler._worlds, sampler._counts._asking)
    assert [len(each) for each in known] == [256, 32, 16, 0]


async def test_counts_of_another_version_are_a_problem(fleet: Fleet) -> None:
    fleet.pages["node-a", "/top?sort=rate"] = msgspec.msgpack.encode({"status": 5})
    with pytest.raises(QuestionError, match="the answer of node node-a is not understood"):
        await Sampler(fleet).top("node-a")


async def test_the_map_shows_the_busiest_nodes_and_says_what_is_missing(
    site: Site, fleet: Fleet
) -> None:
    fleet.pages["node-a", "/top?sort=rate"] = counts(TopRow("shop/web:http", rate=4.0))
    fleet.pages["node-a", "/top?sort=rate&service=shop%2Fweb"] = counts(TopRow(HOSTILE, rate=4.0))
    text = await page(site, "/map")
    assert "data-graph=" in text
    assert '<a href="/services/shop/web?node=node-a">' in text
    assert "node node-b: node-b: no page /top" in text
    assert "<script>alert" not in text
    found = await twin(site, "/map?node=node-a")
    assert found["shown"] == ["node-a"]
    assert [each["rate"] for each in found["graph"]["streams"]] == [4.0, 4.0]


async def test_a_map_of_a_mode_that_does_not_count_says_so(site: Site, fleet: Fleet) -> None:
    fleet.pages["node-a", "/top?sort=rate"] = counts(counted=False)
    text = await page(site, "/map?node=node-a")
    assert "does not count connections" in text
    assert "data-graph" not in text


async def test_the_map_asks_a_bounded_number_of_nodes() -> None:
    fleet = Fleet()
    for number in range(50):
        fleet.put(NodeState(f"node-{number:02}", "memory", connections=float(number)))
    found = await twin(Site(fleet, PAGES), "/map")
    assert found["shown"] == [f"node-{number}" for number in range(42, 50)]
