"""The fleet follows nodes at URLs and through the API server, and survives their failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steersman.model.names import ObjectName
from steersman.operate.answer import QuestionError
from steersman.source.kubeconfig import ClusterAccess, Material
from steersman.source.pace import Timing
from steersman.ui import fleet as fleets
from steersman.ui import nodes
from steersman.ui.fleet import Fleet
from steersman.ui.nodes import Finder, FixedNodes, NodeError, PodNodes, Token, Way, read_urls
from tests.support import waiting
from tests.support.apiserver.certificates import Authority
from tests.support.apiserver.pods import steersman_pod
from tests.support.apiserver.server import ApiServer
from tests.support.fleet import TOKEN, SimulatedNodes, followed, many_services

FAST = Timing(first=0.02, longest=0.1, connect=5.0, answer=10.0)
PATIENT = 30.0


def following(finder: Finder, **how: Any) -> AbstractAsyncContextManager[Fleet]:
    return followed(Fleet(finder, FAST, **how))


async def until(fleet: Fleet, true: Callable[[], bool]) -> None:
    """Wait for a condition, looking whenever the fleet changed."""
    async with asyncio.timeout(PATIENT):
        version = 0
        while not true():
            version = await fleet.changed(version)


def problem(fleet: Fleet, name: str) -> str:
    return next(each.problem for each in fleet.seen if each.name == name)


async def test_states_of_nodes_are_followed() -> None:
    async with SimulatedNodes(3) as simulated, following(FixedNodes(simulated.urls)) as fleet:
        await until(fleet, lambda: len(fleet.nodes) == 3)
        assert {each.name for each in fleet.seen} == set(simulated.urls)
        simulated.change("node-0002", revision=77)
        await until(fleet, lambda: fleet.nodes["node-0002"].revision == 77)
        assert fleet.nodes["node-0001"].revision == 10


async def test_a_node_that_goes_is_shown_with_its_last_state_until_it_is_back() -> None:
    async with SimulatedNodes(2) as simulated, following(FixedNodes(simulated.urls)) as fleet:
        await until(fleet, lambda: len(fleet.nodes) == 2)
        simulated.stop("node-0001")
        await until(fleet, lambda: problem(fleet, "node-0001") != "")
        assert problem(fleet, "node-0001") == "the node is down"
        lost = next(each for each in fleet.seen if each.name == "node-0001")
        assert lost.state is not None
        assert lost.since >= lost.heard > 0
        assert problem(fleet, "node-0002") == ""
        simulated.start("node-0001")
        await until(fleet, lambda: problem(fleet, "node-0001") == "")


async def test_waiters_wake_at_most_four_times_a_second() -> None:
    async with SimulatedNodes(1) as simulated, following(FixedNodes(simulated.urls)) as fleet:
        await until(fleet, lambda: len(fleet.nodes) == 1)
        loop = asyncio.get_running_loop()
        times, versions = [], [fleet.version]
        for number in range(4):
            simulated.change("node-0001", revision=100 + number)
            versions.append(await fleet.changed(versions[-1]))
            times.append(loop.time())
        apart = [later - earlier for earlier, later in pairwise(times)]
        assert min(apart) > fleets._APART * 0.9
        assert versions == sorted(set(versions))


async def test_an_idle_node_wakes_nobody() -> None:
    async with (
        SimulatedNodes(1, heartbeat=0.01) as simulated,
        following(FixedNodes(simulated.urls)) as fleet,
    ):
        await until(fleet, lambda: len(fleet.nodes) == 1)
        version, heard = fleet.version, fleet.seen[0].heard
        await waiting.until(lambda: fleet.seen[0].heard != heard)
        assert fleet.version == version


async def test_a_wrong_token_is_said_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    async with (
        SimulatedNodes(1, token=TOKEN) as simulated,
        following(FixedNodes(simulated.urls, Token(str(file)))) as fleet,
    ):
        await until(fleet, lambda: bool(fleet.seen) and bool(fleet.seen[0].problem))
        assert "refuses the token" in fleet.seen[0].problem
        assert fleet.nodes == {}
        # The file is read again for each request, so a new token needs no restart.
        file.write_text(f"{TOKEN}\n")
        await until(fleet, lambda: len(fleet.nodes) == 1)


async def test_a_missing_token_file_and_a_closed_port_are_said(tmp_path: Path) -> None:
    async with following(FixedNodes({"a": "http://127.0.0.1:9"})) as fleet:
        await until(fleet, lambda: bool(fleet.seen) and bool(fleet.seen[0].problem))
        assert fleet.seen[0].problem == "cannot connect to 127.0.0.1:9: Connection refused"
        with pytest.raises(NodeError, match="cannot connect"):
            await fleet.get("a", "/names")
    missing = Token(str(tmp_path / "none"))
    async with following(FixedNodes({"a": "http://127.0.0.1:9"}, missing)) as fleet:
        await until(fleet, lambda: bool(fleet.seen) and bool(fleet.seen[0].problem))
        assert fleet.seen[0].problem.startswith("--token-file: ")


async def test_no_node_is_asked_once_the_finder_has_ended() -> None:
    ended, tried = asyncio.Event(), asyncio.Event()
    tries: list[bool] = []

    class Refusing:
        name, address = "a", "a"

        def open(self, path: str, *, idle: float, body: object = None) -> Any:
            tries.append(ended.is_set())
            tried.set()
            raise NodeError("cannot connect")

    class SlowToEnd:
        async def follow(self, use: Callable[[Sequence[Way], str], None]) -> None:
            use([Refusing()], "")
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
                for _ in range(50):  # a session takes a while to close
                    await asyncio.sleep(0)

    fleet = Fleet(SlowToEnd(), Timing(sleep=lambda _: asyncio.sleep(0)))
    task = asyncio.create_task(fleet.run())
    async with asyncio.timeout(PATIENT):
        await tried.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tries == [False] * len(tries)


async def test_pages_commands_and_worlds_of_a_node() -> None:
    objects = many_services(3)
    async with (
        SimulatedNodes(2, objects=objects) as simulated,
        following(FixedNodes(simulated.urls)) as fleet,
    ):
        await until(fleet, lambda: len(fleet.nodes) == 2)
        simulated.set_answers("node-0002", [{"step": 1}, {"step": 2}])
        asked = {"command": "doctor", "arguments": []}
        assert [line async for line in fleet.post("node-0002", "/run", asked)] == [
            {"step": 1},
            {"step": 2},
        ]
        assert '"doctor"' in simulated.asked[-1][1]
        assert b"shop-01/web-00001" in await fleet.get("node-0001", "/names?kind=service")
        world = await fleet.world("node-0001")
        assert world.origin.text == "node node-0001 (nftables mode)"
        assert len(world.snapshot.services) == len(world.plan.services) == 3
        one = ObjectName("shop-01", "web-00001")
        assert list((await fleet.world("node-0001", (one,))).snapshot.services) == [one]
        with pytest.raises(NodeError, match="there is no Service shop/none"):
            await fleet.world("node-0001", (ObjectName("shop", "none"),))
        with pytest.raises(NodeError, match=r"there is no node x \(there are: node-0001, node-0"):
            await fleet.get("x", "/names")
        simulated.set_answers("node-0001", [msgspec.Raw(b"{")])
        with pytest.raises(QuestionError, match="answer of node node-0001 is not understood"):
            _ = [line async for line in fleet.post("node-0001", "/run", asked)]


async def test_nodes_without_a_name_tell_it() -> None:
    async with SimulatedNodes(1) as simulated:
        urls = read_urls(list(simulated.urls.values()))
        async with following(FixedNodes(urls)) as fleet:
            await until(fleet, lambda: "node-0001" in fleet.nodes)
            assert b"[" in await fleet.get("node-0001", "/names?kind=service")
            assert b"[" in await fleet.get("", "/names?kind=service")


async def test_services_that_nodes_disagree_about_are_named() -> None:
    async with (
        SimulatedNodes(4, objects=many_services(5)) as simulated,
        following(FixedNodes(simulated.urls), grace=0.1, compare=0.05) as fleet,
    ):
        await until(fleet, lambda: len(fleet.nodes) == 4)
        at_first = fleet.disagreements
        assert at_first == ()
        simulated.disagree("node-0003", "shop-01/web-00001", "shop-04/web-00004")
        await until(fleet, lambda: fleet.disagreements != ())
        (found,) = fleet.disagreements
        assert found.nodes == ("node-0003",)
        assert found.services == ("shop-01/web-00001", "shop-04/web-00004")
        assert found.reference != "node-0003"
        simulated.change("node-0003", digest=simulated.state("node-0001").digest)
        await until(fleet, lambda: fleet.disagreements == ())


# Through the API server


@asynccontextmanager
async def cluster(
    simulated: SimulatedNodes, tmp_path: Path, **how: Any
) -> AsyncIterator[tuple[ApiServer, Fleet]]:
    """An API server with a pod of steersman on each node, and a fleet that asks through it."""
    authority = Authority()
    async with ApiServer(tls=authority.server_context(tmp_path)) as server:
        server.tokens = frozenset({"operator"})
        for name, url in simulated.urls.items():
            server.add(steersman_pod(name))
            server.pods["kube-system", f"steersman-{name}:10259"] = url
        access = ClusterAccess((server.url,), ca=Material(authority.pem), token="operator")
        finder = PodNodes(access, Token(text=TOKEN), timing=FAST, **how)
        async with following(finder) as fleet:
            yield server, fleet


async def test_pods_are_found_and_asked_through_the_api_server(tmp_path: Path) -> None:
    async with (
        SimulatedNodes(3, token=TOKEN, objects=many_services(2)) as simulated,
        cluster(simulated, tmp_path) as (server, fleet),
    ):
        await until(fleet, lambda: len(fleet.nodes) == 3)
        asked = server.requests("pods/proxy")
        assert {each.headers["Authorization"] for each in asked} == {"Bearer operator"}
        simulated.change("node-0002", revision=77)
        await until(fleet, lambda: fleet.nodes["node-0002"].revision == 77)
        assert len((await fleet.world("node-0001")).plan.services) == 2
        done = [line async for line in fleet.post("node-0001", "/run", {"command": "doctor"})]
        assert done == [{"verdict": "ok"}]


async def test_pods_are_asked_at_their_own_addresses(tmp_path: Path) -> None:
    async with (
        SimulatedNodes(["only"], token=TOKEN, root="only") as simulated,
        cluster(simulated, tmp_path, direct=True, port=simulated.port) as (server, fleet),
    ):
        await until(fleet, lambda: set(fleet.nodes) == {"only"})
        assert fleet.seen[0].address == f"http://127.0.0.1:{simulated.port}"
        assert server.requests("pods/proxy") == []


async def test_pods_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_RELIST", 0.02)
    async with (
        SimulatedNodes(2, token=TOKEN) as simulated,
        cluster(simulated, tmp_path, namespace="kube-system") as (server, fleet),
    ):
        await until(fleet, lambda: len(fleet.nodes) == 2)
        server.delete("Pod", "steersman-node-0002", "kube-system")
        await until(fleet, lambda: set(fleet.nodes) == {"node-0001"})
        server.add(steersman_pod("node-0002", port=None))
        await until(fleet, lambda: len(fleet.seen) == 2 and problem(fleet, "node-0002") != "")
        assert "has no container port named state" in problem(fleet, "node-0002")
        server.delete("Pod", "steersman-node-0001", "kube-system")
        server.delete("Pod", "steersman-node-0002", "kube-system")
        await until(fleet, lambda: bool(fleet.problem))
        assert fleet.problem == "no pod with the label app.kubernetes.io/name=steersman runs"


async def test_rights_that_are_missing_are_named(tmp_path: Path) -> None:
    async with (
        SimulatedNodes(1, token="another") as simulated,
        cluster(simulated, tmp_path) as (server, fleet),
    ):
        await until(fleet, lambda: bool(fleet.seen) and bool(fleet.seen[0].problem))
        assert fleet.seen[0].problem.endswith("the node's token is given with --token-file")
        server.forbidden = frozenset({"pods/proxy"})
        await until(fleet, lambda: "pods/proxy is needed" in fleet.seen[0].problem)
        server.pods.clear()
        server.forbidden = frozenset()
        await until(fleet, lambda: "not found" in fleet.seen[0].problem)


async def test_a_list_that_fails_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_RELIST", 0.02)
    async with (
        SimulatedNodes(1, token=TOKEN) as simulated,
        cluster(simulated, tmp_path) as (server, fleet),
    ):
        await until(fleet, lambda: len(fleet.nodes) == 1)
        server.forbidden = frozenset({"Pod"})
        await until(fleet, lambda: "pods is forbidden" in fleet.problem)
        assert len(fleet.seen) == 1  # the nodes that were known are still followed
        server.forbidden = frozenset()
        await until(fleet, lambda: fleet.problem == "")


# Words of the command line


def test_urls_of_nodes() -> None:
    text = "# all\nb=https://10.0.0.2:10259/\n\n http://10.0.0.3:1  # third\n"
    assert read_urls(["a=http://10.0.0.1:10259"], text) == {
        "a": "http://10.0.0.1:10259",
        "b": "https://10.0.0.2:10259",
        "http://10.0.0.3:1": "http://10.0.0.3:1",
    }


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        (["a=10.0.0.1"], "", "--node: '10.0.0.1' is not a URL"),
        (["a=http://x:99999"], "", "is not a URL"),
        (["http://user:secret@/"], "", "is not a URL"),
        ([], "\nftp://x\n", "--nodes-file line 2: 'ftp://x' is not a URL"),
        (["a=http://x", "a=http://y"], "", "--node: a is given twice"),
    ],
)
def test_malformed_urls_are_refused(words: list[str], text: str, said: str) -> None:
    with pytest.raises(NodeError, match=said) as error:
        read_urls(words, text)
    assert "secret" not in str(error.value)
