"""`steersman connectivity` in a cluster whose kubelets answer at once: pods, results, leftovers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

import pytest

from steersman.operate.answer import Line, QuestionError
from steersman.operate.connectivity import pod
from steersman.operate.connectivity.answer import NAMESPACE, Connectivity, Tried
from steersman.operate.connectivity.cluster import try_cluster
from steersman.operate.connectivity.pod import Check, Said, answering, try_check, wrong
from steersman.source.pace import Timing
from tests.support.apiserver.pods import steersman_pod
from tests.support.apiserver.server import ApiServer
from tests.support.apiserver.world import Change, Object

PROGRAM = Path(pod.__file__).read_text(encoding="utf-8")
OURS = {"app.kubernetes.io/managed-by": "steersman"}


def node(name: str, *addresses: str, ready: str = "True", os: str = "linux") -> Object:
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/os": os}},
        "status": {
            "addresses": [{"type": "InternalIP", "address": each} for each in addresses],
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


POD_IP = "10.244.0.9"
NODES = (node("a", "192.0.2.1"), node("b", "192.0.2.2", "2001:db8::2"))


def checks(made: Object) -> list[Check]:
    """What a pod is to ask."""
    (words,) = (each["command"] for each in made["spec"]["containers"] if each["name"] == "client")
    assert words[:4] == ["python3", "-c", PROGRAM, "ask"]
    return [Check(*each) for each in json.loads(words[4])]


class Status(dict[str, object]):
    """The status of a pod."""


def waits(reason: str, message: str) -> Object:
    return {"name": "server", "state": {"waiting": {"reason": reason, "message": message}}}


Finds = Callable[[Object], object]
"""Tells how a pod is: its Status, states of its containers by name, or reasons that it finds."""


def right(made: Object) -> object:
    """All that a pod asks is right."""
    return [""] * len(checks(made)) if asks(made) else []


def asks(made: Object) -> bool:
    return any(each["name"] == "client" for each in made["spec"]["containers"])


def kubelets(server: ApiServer, finds: Finds = right) -> dict[str, Object]:
    """Have the pods run and end at once; the pods by name, as they were created."""
    seen: dict[str, Object] = {}

    def changed(change: Change) -> None:
        made = change.after
        if change.kind != "Pod" or made is None or "status" in made:
            return
        seen[made["metadata"]["name"]] = made
        found = finds(made)
        if isinstance(found, Status):
            server.add({**made, "status": found})
            return
        states = (
            found
            if isinstance(found, dict)
            else {
                "server": {"running": {"startedAt": ""}},
                "client": {"terminated": {"exitCode": 0, "message": json.dumps(found)}},
            }
        )
        known = [{"name": name, "state": state} for name, state in states.items()]
        status = {"phase": "Running", "containerStatuses": known, "podIPs": [{"ip": POD_IP}]}
        server.add({**made, "status": status})

    server.world.listeners.append(changed)
    return seen


async def run(
    server: ApiServer, *names: str, image: str = "any", timing: Timing | None = None
) -> Connectivity:
    return await try_cluster(server.access, names, image, timing)


def impatient() -> Timing:
    """Ten seconds pass at each look at the clock."""
    times = count(step=10)
    return Timing(now=lambda: float(next(times)), sleep=lambda _: asyncio.sleep(0))


def failed(answer: Connectivity) -> list[Tried]:
    return [each for each in answer.tried if each.result == "failed"]


async def test_each_node_is_tried_from_its_pods_and_from_itself() -> None:
    async with ApiServer(NODES) as server:
        pods = kubelets(server)
        answer = await run(server)
        assert not server.objects("Namespace")
        assert not server.objects("Pod")
    assert answer.exit_code == 0
    per_node = {
        *("pod to pod, TCP", "pod to pod, UDP", "pod to itself by its Service"),
        *("pod to cluster IP, TCP", "pod to cluster IP, UDP"),
        *("node to cluster IP, TCP", "node to cluster IP, UDP"),
        *("node to node port, TCP", "node to node port, UDP", "session affinity"),
        *("internal policy Local", "external policy Local, client seen"),
    }
    tried = {(each.node, each.what): each.result for each in answer.tried}
    assert tried == {(node, what): "ok" for node in "ab" for what in per_node}

    where = {name: made["spec"]["nodeName"] for name, made in pods.items()}
    kinds = ("server", "pod", "node")
    assert where == {f"{kind}-{n}": node for kind in kinds for n, node in enumerate("ab")}
    on_node = [name for name, made in pods.items() if made["spec"].get("hostNetwork")]
    assert sorted(on_node) == ["node-0", "node-1"]
    direct = [each for each in checks(pods["pod-1"]) if each.address == POD_IP]
    assert [(each.port, each.protocol, each.server) for each in direct] == [
        (8080, "TCP", "server-0"),
        (8080, "UDP", "server-0"),
    ]
    ports = [each for each in checks(pods["node-0"]) if each.address == "192.0.2.2"]
    *plain, local = ports  # those of the other node
    assert [(each.protocol, each.server, each.seen) for each in plain] == [
        ("TCP", "server-0", False),
        ("UDP", "server-0", False),
    ]
    assert (local.node, local.seen, local.times) == ("b", True, pod.TIMES)


async def test_both_families_and_a_node_without_one() -> None:
    async with ApiServer(NODES) as server:
        server.writing.families += ("IPv6",)
        kubelets(server)
        answer = await run(server)
    tried = {(t.node, t.family, t.what): (t.result, t.reason) for t in answer.tried}
    assert tried["a", "IPv6", "pod to cluster IP, UDP"] == ("ok", "")
    assert tried["a", "IPv6", "node to node port, TCP"] == ("ok", "")
    assert tried["a", "IPv6", "pod to pod, UDP"] == ("not tried", "server-0 has no IPv6 address")
    nothing = ("not tried", "a has no IPv6 address")
    assert tried["b", "IPv6", "node to node port, TCP"] == nothing
    assert tried["b", "IPv6", "external policy Local, client seen"] == nothing


async def test_one_node_has_two_servers_and_no_policy_from_outside() -> None:
    async with ApiServer(NODES) as server:
        pods = kubelets(server)
        answer = await run(server, "b")
    assert {name for name in pods if name.startswith("server")} == {"server-0", "server-1"}
    assert not asks(pods["server-1"])
    (policy,) = (each for each in answer.tried if each.what.startswith("external policy"))
    assert (policy.result, policy.reason) == ("not tried", "this needs two nodes")


async def test_what_a_pod_finds_wrong_is_in_the_answer() -> None:
    def finds(made: Object) -> object:
        match made["metadata"]["name"]:
            case "pod-1":
                return ["no answer within 3 s"] + [""] * (len(checks(made)) - 1)
            case "node-0":
                return {"client": {"terminated": {"exitCode": 1, "message": "no python3"}}}
            case "node-1":
                return {"client": {"terminated": {"exitCode": 0, "message": "{"}}}
            case "server-0":
                return []
        return right(made)

    async with ApiServer(NODES) as server:
        kubelets(server, finds)
        answer = await run(server)
    assert answer.exit_code == 1
    found = {(each.node, each.what): each.reason for each in failed(answer)}
    assert found["b", "pod to pod, TCP"] == "no answer within 3 s"
    assert found["a", "pod to itself by its Service"] == "its pod says nothing about it"
    assert found["a", "node to cluster IP, TCP"] == (
        "pod node-0 has no result: it ended with status 1: no python3"
    )
    assert found["b", "node to cluster IP, TCP"] == "pod node-1 has no result: it is Running"
    assert len(found) == 2 + 2 * 5


async def test_nodes_without_a_pod_that_runs() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}

    def finds(made: Object) -> object:
        return {"server": waiting} if made["spec"]["nodeName"] == "a" else right(made)

    nodes = (*NODES, node("late", ready="Unknown"), node("win", os="windows"))
    async with ApiServer(nodes) as server:
        pods = kubelets(server, finds)
        answer = await run(server, timing=impatient())
        assert "pod-1" not in pods  # one client pod, of the node that has a server
        unfit = [each for each in answer.tried if each.result == "not tried"]
        assert {each.node: each.reason for each in unfit if each.what == "all"} == {
            "late": "the Node is not ready",
            "win": "this is no Linux node",
        }
        reason = "no pod runs: ErrImagePull: not found"
        assert failed(answer) == [Tried("all", "", "failed", reason, "a")]

        nobody = await run(server, "a", timing=impatient())
        assert nobody.tried == (Tried("all", "", "failed", reason, "a"),)
        nothing = await run(server, "win")
        assert (nothing.exit_code, len(nothing.tried)) == (0, 1)
        with pytest.raises(QuestionError, match="the cluster has no Node c"):
            await run(server, "a", "c")


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            {"phase": "Failed", "reason": "OutOfpods", "message": "no room"},
            "OutOfpods: no room",
        ),
        (
            {"phase": "Pending", "containerStatuses": [waits("ImagePullBackOff", "no such tag")]},
            "ImagePullBackOff: no such tag",
        ),
        (
            {"phase": "Pending", "containerStatuses": [waits("InvalidImageName", "")]},
            "InvalidImageName",
        ),
    ],
)
async def test_a_pod_that_will_never_run_is_not_waited_for(status: Object, reason: str) -> None:
    async def sleep(_: float) -> None:
        raise AssertionError("there is nothing to wait for")

    async with ApiServer(NODES[:1]) as server:
        kubelets(server, lambda _: Status(status))
        answer = await run(server, timing=Timing(sleep=sleep))
        assert not server.objects("Namespace")
    assert answer.tried == (Tried("all", "", "failed", f"no pod runs: {reason}", "a"),)


async def test_what_the_api_server_refuses_is_named_and_nothing_is_left() -> None:
    async with ApiServer(NODES) as server:
        kubelets(server)
        with pytest.raises(QuestionError, match=r'Pod "server-0" is invalid: .*image'):
            await run(server, image="two words")
        assert not server.objects("Namespace")


async def test_a_pod_in_the_network_of_a_node_that_is_refused_costs_only_its_own_part() -> None:
    async with ApiServer(NODES) as server:
        kubelets(server)
        server.writing.refused = "node-1"
        answer = await run(server)
        assert not server.objects("Namespace")
    (refused,) = (each for each in answer.tried if each.result != "ok")
    assert refused == Tried("all from the node", "", "not tried", "403: denied by a policy", "b")
    assert answer.exit_code == 0
    assert ("b", "pod to cluster IP, TCP") in {(each.node, each.what) for each in answer.tried}


async def test_results_are_told_if_the_namespace_cannot_be_deleted() -> None:
    async with ApiServer(NODES) as server:
        kubelets(server)
        server.writing.refused = NAMESPACE
        answer = await run(server)
    assert not failed(answer)
    assert answer.exit_code == 1
    *_, last = answer.blocks(wide=False)
    text = f"namespace {NAMESPACE} could not be deleted: 403: denied by a policy"
    assert last == Line(text, "bad")


async def test_the_image_is_that_of_our_own_pods() -> None:
    ours = steersman_pod("a")
    ours["spec"]["containers"][0]["image"] = "registry/steersman:1"
    async with ApiServer(NODES) as server:
        pods = kubelets(server)
        with pytest.raises(QuestionError, match="give --image"):
            await run(server, image="")
        server.add(ours)
        await run(server, image="")
    images = {each["image"] for made in pods.values() for each in made["spec"]["containers"]}
    assert images == {"registry/steersman:1"}


async def test_a_namespace_of_that_name_is_deleted_only_if_it_is_ours() -> None:
    old: Object = {"kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": OURS}}
    async with ApiServer((*NODES, old)) as server:
        kubelets(server)
        assert (await run(server)).exit_code == 0
        assert not server.objects("Namespace")
        old["metadata"]["labels"] = {}
        server.add(old)
        with pytest.raises(QuestionError, match="is not one of ours"):
            await run(server)
        assert server.objects("Namespace")


async def test_whoever_gives_up_leaves_nothing() -> None:
    async with ApiServer(NODES) as server:
        started = asyncio.Event()

        def finds(made: Object) -> object:
            del made
            started.set()
            return {"server": {"waiting": {"reason": "ContainerCreating"}}}

        kubelets(server, finds)
        task = asyncio.create_task(run(server))
        async with asyncio.timeout(60):
            await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not server.objects("Namespace")


async def test_a_right_that_is_missing() -> None:
    async with ApiServer(NODES) as server:
        server.configure(forbidden=["Node"])
        with pytest.raises(QuestionError, match=r"nodes is forbidden.*connectivity --help"):
            await run(server)


# The program of the pods


def sockets(*kinds: int) -> Iterable[socket.socket]:
    """Sockets of loopback, for one port."""
    port = 0
    for kind in kinds:
        sock = socket.socket(socket.AF_INET, kind)
        sock.setblocking(False)
        sock.bind(("127.0.0.1", port))
        port = sock.getsockname()[1]
        yield sock


async def test_answers_are_compared_with_what_was_expected() -> None:
    bound = [*sockets(socket.SOCK_STREAM, socket.SOCK_DGRAM)]
    port = bound[0].getsockname()[1]
    async with answering(bound, "server-0", "a"):
        fine = Check("127.0.0.1", port, times=3, server="server-0", node="a", seen=True, same=True)
        for protocol in ("TCP", "UDP"):
            assert not await try_check(fine._replace(protocol=protocol))
        other = await try_check(fine._replace(server="server-1"))
        assert other == "server-0 answered instead of server-1"
    assert await try_check(fine) == f"127.0.0.1:{port}: Connection refused"


def test_what_is_wrong_with_answers() -> None:
    check = Check("10.96.0.1", 80)
    here, there = Said("s0", "a", "10.0.0.1", "10.0.0.1"), Said("s1", "b", "10.0.0.1", "10.0.0.9")
    assert not wrong(check, [here, there])
    assert wrong(check._replace(same=True), [here, there]) == "one client reached s0 and s1"
    assert wrong(check._replace(node="a"), [here, there]) == "s1 on b answered: it is not on a"
    seen = wrong(check._replace(seen=True), [here, there])
    assert seen == "the endpoint saw 10.0.0.1 instead of 10.0.0.9"


async def test_the_program_runs_without_anything_of_ours(tmp_path: Path) -> None:
    """As in a pod: python3 -c TEXT, isolated from this package."""
    bound = [*sockets(socket.SOCK_STREAM)]
    port, result = bound[0].getsockname()[1], tmp_path / "log"
    asked = [Check("127.0.0.1", port, server="s"), Check("127.0.0.1", port, server="t")]
    words = ("ask", json.dumps(asked), "0", str(result))
    async with answering(bound, "s", "a"):
        process = await asyncio.create_subprocess_exec("python3", "-I", "-c", PROGRAM, *words)
        assert await process.wait() == 0
    assert json.loads(result.read_text()) == ["", "s answered instead of t"]
