"""Doctor's checks of the process: what they say of each state it can be in."""

from __future__ import annotations

from email.utils import formatdate
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steersman.model import codes
from steersman.model.failover import Backend, Ejection, Observation
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import NodeConfig
from steersman.model.names import ObjectName, Protocol
from steersman.model.node_state import NodeState, SourceStatus
from steersman.model.world import Origin, World
from steersman.operate.doctor import node_process
from steersman.operate.doctor.check import Check
from steersman.operate.doctor.context import ApiReply, Context, Question
from steersman.operate.doctor.result import Verdict
from steersman.run.process.instance import Holder
from tests.support.builders.doctor import CART, NOON, context_of, named, only, results
from tests.support.builders.objects import CONFIG, endpoint, node, service, slice_

PROCESS, SOURCE, NODE, PODS, FAILOVER, API, EJECTED = named(
    "process", "source", "node", "pods", "failover", "api-server", "ejected"
)


def status(**more: Any) -> NodeState:
    fields: dict[str, Any] = {
        "pid": 42,
        "version": "0.1",
        "synced_at": NOON - 3,
        "sync_reason": "changes",
    }
    return NodeState(**(fields | more))


def of_process(found: NodeState | None) -> Context:
    return context_of(world={"process": found})


@pytest.fixture(autouse=True)
def _no_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_process, "running", lambda: None)


def check(check: Check, found: NodeState | None) -> tuple[Verdict, str]:
    result = only(check, of_process(found))
    return result.verdict, result.text


def test_a_change_that_came_just_now_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_process, "_MOMENT", 0)

    async def renew(world: World) -> World:
        return msgspec.structs.replace(world, process=status(synced_at=NOON))

    context = context_of(world={"process": status(synced_at=NOON - 90, owes=True)}, renew=renew)
    assert only(PROCESS, context).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (status(), Verdict.OK, "last sync 3 s ago (changes)"),
        (None, Verdict.ERROR, "no steersman runs on this node"),
        (status(synced_at=0.0), Verdict.ERROR, "it has not written any rule yet"),
        (status(synced_at=0.0, waiting="its Node"), Verdict.ERROR, "it waits for its Node"),
        (
            status(synced_at=NOON - 90, owes=True),
            Verdict.ERROR,
            "wait for a sync",
        ),
        (status(owes=True), Verdict.OK, "last sync"),
        (status(healthy=False), Verdict.WARNING, "unhealthy"),
    ],
)
def test_the_process(found: NodeState | None, verdict: Verdict, words: str) -> None:
    said, text = check(PROCESS, found)
    assert said is verdict
    assert words in text


@pytest.mark.parametrize(
    ("owner", "verdict"),
    [
        ("the node", Verdict.ERROR),
        ("Service shop/cart", Verdict.ERROR),
        ("Service shop/other", Verdict.WARNING),
    ],
)
def test_rules_that_the_kernel_refuses(owner: str, verdict: Verdict) -> None:
    refused = Finding(owner, "", "the kernel refuses its rules", Severity.ERROR, codes.REFUSED)
    world = {
        "process": status(synced_at=NOON, sync_reason="start", refused=1),
        "findings": (refused, Finding("Service shop/cart", "spec", "something else")),
    }
    result = only(PROCESS, context_of(service(), world=world))
    assert (result.verdict, result.evidence) == (verdict, (str(refused),))
    assert result.code == codes.REFUSED


def test_a_process_that_was_not_asked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_process, "running", lambda: Holder(7, "host", "memory", 0))
    said, text = check(PROCESS, None)
    assert said is Verdict.OK
    assert text.endswith("this answer is about test manifests")


def test_a_process_that_does_not_answer_is_an_error() -> None:
    origin = Origin("manifests", "the manifests in /m", "pid 7 does not answer: it is stopped")
    result = only(PROCESS, context_of(world={"origin": origin}))
    assert (result.verdict, result.text) == (Verdict.ERROR, origin.hung)


API_SERVER = SourceStatus(kind="apiserver", server="https://api:6443", quiet_seconds=2.0)


@pytest.mark.parametrize(
    ("source", "verdict", "words"),
    [
        (SourceStatus(), Verdict.OK, "manifests"),
        (API_SERVER, Verdict.OK, "connected to https://api:6443"),
        (msgspec.structs.replace(API_SERVER, quiet_seconds=None), Verdict.OK, "connected"),
        (msgspec.structs.replace(API_SERVER, quiet_seconds=999.0), Verdict.WARNING, "for 999 s"),
        (msgspec.structs.replace(API_SERVER, connected=False), Verdict.ERROR, "not connected"),
        (
            msgspec.structs.replace(API_SERVER, connected=False, errors={"http_403": 3}),
            Verdict.ERROR,
            "does not get all objects",
        ),
    ],
)
def test_the_source(source: SourceStatus, verdict: Verdict, words: str) -> None:
    said, text = check(SOURCE, status(source=source))
    assert said is verdict
    assert words in text


def test_errors_of_the_source_are_evidence() -> None:
    source = msgspec.structs.replace(API_SERVER, connected=False, errors={"timeout": 3})
    result = only(SOURCE, of_process(status(source=source)))
    assert result.evidence == ("3 times timeout",)
    assert only(SOURCE, of_process(None)).verdict is Verdict.UNKNOWN


def test_the_node_must_be_known() -> None:
    assert only(NODE, context_of(node())).verdict is Verdict.OK
    missing = only(NODE, context_of(world={"nodes": (node(),)}))
    assert missing.verdict is Verdict.WARNING
    assert missing.text.startswith("there is no Node object named node-1")
    assert missing.evidence == ("the nodes are node-1",)


def pods(config: NodeConfig, *addresses: str) -> list[tuple[Verdict, str]]:
    ends = [endpoint(address, node="node-1") for address in addresses]
    context = context_of(service(), slice_(*ends), world={"config": config})
    return [(result.verdict, result.text) for result in results(PODS, context)]


def test_pods_must_be_recognisable() -> None:
    assert pods(CONFIG, "10.0.0.5") == [
        (Verdict.OK, "IPv4: pods of this node are recognised by 10.0.0.0/8")
    ]
    # a pod in the node's own network is not a mistake
    assert pods(CONFIG, "192.168.0.2")[0][0] is Verdict.OK
    verdict, text = pods(CONFIG, "172.16.0.5", "10.0.0.5")[0]
    assert verdict is Verdict.WARNING
    assert text == (
        "IPv4: pods of this node have addresses outside of the pod network 10.0.0.0/8: 172.16.0.5"
    )
    verdict, text = pods(msgspec.structs.replace(CONFIG, cluster_cidrs=()), "10.0.0.5")[0]
    assert verdict is Verdict.WARNING
    assert text.startswith("IPv4: pods of this node cannot be recognised")


def api(seconds: float, version: str, http: int = 200) -> list[tuple[Verdict, str]]:
    async def ask(path: str) -> ApiReply:
        assert path == "/version"
        headers = {"date": formatdate(NOON + seconds, usegmt=True)}
        return ApiReply(http, headers, {"gitVersion": version})

    found = results(API, context_of(ask_api=ask))
    return [(result.verdict, result.text) for result in found]


def test_clock_and_version_of_the_api_server() -> None:
    assert [verdict for verdict, _ in api(0, "v1.36.2")] == [Verdict.OK, Verdict.OK]
    assert [verdict for verdict, _ in api(-3, "v1.33.0-eks-1")] == [Verdict.OK, Verdict.OK]
    found = api(60, "v1.36.2")
    assert found[0] == (
        Verdict.WARNING,
        "this node's clock is 60 s behind the API server's",
    )
    assert "ahead of" in api(-3600, "v1.36.2")[0][1]
    assert "tokens" in api(-3600, "v1.36.2")[0][1]
    assert "more than 3 minor versions newer" in api(0, "v1.40.0")[0][1]
    assert "more than 3 minor versions older" in api(0, "v1.30.0")[0][1]
    assert api(0, "local")[0][0] is Verdict.UNKNOWN
    assert api(0, "v1.36.0", http=403)[0][0] is Verdict.UNKNOWN
    assert only(API, context_of()).verdict is Verdict.UNKNOWN


def test_an_api_server_without_a_date() -> None:
    async def ask(_: str) -> ApiReply:
        return ApiReply(200, {}, {"gitVersion": "v1.36.0"})

    assert results(API, context_of(ask_api=ask))[0].text == "the API server sends no date"


NOT_SEEN = Finding(
    *("the node", "failover", "failing endpoints are not ejected: no nf_tables"),
    code=codes.FAILOVER,
)


def failover(root: Path, *findings: Finding, tables: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Verdicts and texts about these Findings and tables; process 7 runs."""
    context = context_of(
        root=root,
        files={"proc/7/comm": "steersman"},
        world={"findings": findings},
        list_tables=lambda: [("inet", name) for name in tables],
    )
    return [(each.verdict.value, each.text) for each in results(FAILOVER, context)]


def test_nothing_is_said_against_failover_that_works(tmp_path: Path) -> None:
    other = Finding("Service shop/web", "endpoint 10.0.0.1:80", "is ejected")
    [(verdict, _)] = failover(tmp_path, other, tables=("steersman", "filter"))
    assert verdict == "ok"
    found = failover(tmp_path, tables=("steersman-failures-7-21364",))
    assert found == [("ok", "packets of connections that fail are logged")]


def test_failover_that_cannot_be_had_is_explained(tmp_path: Path) -> None:
    assert failover(tmp_path, NOT_SEEN) == [("warning", NOT_SEEN.reason)]


def test_a_table_that_a_dead_process_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_process, "sees_processes", lambda _: True)
    found = failover(tmp_path, tables=("steersman-failures-8-21364",))
    text = "the table inet steersman-failures-8-21364 is left of process 8, which has ended"
    assert found == [("warning", text)]


def test_a_table_of_a_process_that_cannot_be_seen(tmp_path: Path) -> None:
    [(verdict, text)] = failover(tmp_path, tables=("steersman-failures-8-21364",))
    assert verdict == "unknown"
    assert text.startswith("whether process 8 of the table inet steersman-failures-8-21364 runs")


def test_a_table_of_the_process_in_another_pid_namespace() -> None:
    context = context_of(
        world={"process": status(pid=9)}, list_tables=lambda: [("inet", "steersman-failures-9-1")]
    )
    assert only(FAILOVER, context).verdict is Verdict.OK


def ejecting(name: ObjectName, **more: Any) -> Context:
    """A question about shop/cart while an endpoint of a Service is ejected."""
    backend = Backend("10.0.0.1", 8080, Protocol.TCP)
    ejection = Ejection(backend, Observation.REFUSED, NOON - 60, NOON + 20, 2)
    context = context_of(question=Question(CART), **more)
    snapshot = msgspec.structs.replace(context.world.snapshot, ejected={name: (ejection,)})
    context.world = msgspec.structs.replace(context.world, snapshot=snapshot)
    return context


def test_ejected_endpoints_are_named_with_the_reason() -> None:
    assert only(EJECTED, context_of()).verdict is Verdict.OK
    assert only(EJECTED, ejecting(ObjectName("other", "web"))).verdict is Verdict.OK
    result = only(EJECTED, ejecting(CART))
    assert result.verdict is Verdict.WARNING
    assert result.text.endswith("get no new connections from this node: 1")
    assert "10.0.0.1:8080 is ejected: it has refused connections since" in result.evidence[0]
    assert "steersman/eject" in result.remedy
