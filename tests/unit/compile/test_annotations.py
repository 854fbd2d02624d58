"""Annotations that only some modes can follow, and SCTP where it cannot be served."""

from __future__ import annotations

import msgspec
import pytest

from steersman.model.kube import Annotations, Service
from steersman.model.plan import ServicePlan, Traits
from tests.support.builders.objects import KEY, endpoint, plan_of, port, service, slice_

USERSPACE = Traits(terminates_connections=True, forwards_sctp=False)


def annotated(made: Service, **words: str) -> Service:
    meta = msgspec.structs.replace(made.metadata, annotations=Annotations(**words))
    return msgspec.structs.replace(made, metadata=meta)


def planned(**words: str) -> tuple[ServicePlan, list[str]]:
    made = annotated(service(), **words)
    plan = plan_of(made, slice_(endpoint("10.0.0.1")), traits=USERSPACE)
    return plan.services[KEY], [str(finding) for finding in plan.findings]


@pytest.mark.parametrize(
    ("words", "wishes"),
    [
        ({}, (False, False)),
        ({"load_balancing": "least-connections"}, (True, False)),
        ({"load_balancing": "round-robin"}, (False, False)),
        ({"load_balancing": "maglev"}, (False, False)),
        ({"proxy_protocol": "v2"}, (False, True)),
    ],
)
def test_annotations(words: dict[str, str], wishes: tuple[bool, bool]) -> None:
    plan, findings = planned(**words)
    assert (plan.least_connections, plan.proxy.proxy_protocol) == wishes
    assert plan.maglev == (words.get("load_balancing") == "maglev")
    assert not findings


def test_unknown_words_are_said() -> None:
    plan, findings = planned(load_balancing="random", proxy_protocol="v1")
    assert not plan.least_connections
    assert not plan.proxy.proxy_protocol
    assert len(findings) == 2
    assert any("steersman/load-balancing" in f and "'random'" in f for f in findings)


@pytest.mark.parametrize(("word", "shown"), [("true", True), ("false", False), ("", False)])
def test_metrics_of_a_service(word: str, shown: bool) -> None:
    plan, findings = planned(metrics=word)
    assert (plan.metrics, findings) == (shown, [])


def test_an_unknown_word_for_metrics_is_reported() -> None:
    plan, (finding,) = planned(metrics="True")
    assert not plan.metrics
    assert "steersman/metrics" in finding
    assert "write true, false" in finding


def test_a_scheduler_of_the_kernel() -> None:
    plan, findings = planned(ipvs_scheduler="wlc")
    assert (plan.scheduling.scheduler, findings) == ("wlc", [])
    plan, (finding,) = planned(ipvs_scheduler="dice")
    assert plan.scheduling.scheduler == ""
    assert "steersman/ipvs-scheduler" in finding
    assert "wlc" in finding


def test_flags_of_a_scheduler() -> None:
    plan, findings = planned(ipvs_scheduler_flags="mh-port, mh-fallback,")
    assert (plan.scheduling.scheduler_flags, findings) == (("mh-port", "mh-fallback"), [])
    plan, (finding,) = planned(ipvs_scheduler_flags="none,rr-port")
    assert plan.scheduling.scheduler_flags == ("none",)
    assert "steersman/ipvs-scheduler-flags" in finding
    assert "'rr-port'" in finding


def test_the_proxy_protocol_is_for_tcp() -> None:
    made = annotated(service(ports=[port(), port("dns", 53, protocol="UDP")]), proxy_protocol="v2")
    plan = plan_of(made, traits=USERSPACE)
    assert {key.name.protocol: p.proxy.proxy_protocol for key, p in plan.services.items()} == {
        "TCP": True,
        "UDP": False,
    }


def test_sctp_is_refused_where_it_cannot_be_served() -> None:
    made = service(ports=[port(), port("sctp", 99, protocol="SCTP")])
    plan = plan_of(made, traits=USERSPACE)
    assert set(plan.services) == {KEY}
    assert ["SCTP cannot be forwarded" in str(finding) for finding in plan.findings] == [True]
    assert len(plan_of(made).services) == 2


def test_endpoints_never_see_clients_of_a_proxy() -> None:
    made = service(type="LoadBalancer", ports=[port(nodePort=30080)], externalTrafficPolicy="Local")
    plan = plan_of(made, slice_(endpoint("10.0.0.1", "node-1")), traits=USERSPACE)
    actions = [a for f in plan.services[KEY].frontends for a in (f.pod, f.node, f.external)]
    assert all(action.masquerade for action in actions)


@pytest.mark.parametrize(("word", "traits", "keeps"), [
    ("true", USERSPACE, True), ("false", USERSPACE, False), ("true", Traits(), False),
])  # fmt: skip
def test_listed_endpoints_keep_their_connections(word: str, traits: Traits, keeps: bool) -> None:
    made = annotated(service(), close_connections=word)
    leaving = endpoint("10.0.0.2", ready=False, serving=True, terminating=True)
    plan = plan_of(made, slice_(endpoint("10.0.0.1"), leaving), traits=traits).services[KEY]
    assert [end.ip for end in plan.reachable] == ["10.0.0.1"]
    assert (plan.proxy.kept is not None) == keeps
    if plan.proxy.kept is not None:
        assert [end.ip for end in plan.proxy.kept] == ["10.0.0.1", "10.0.0.2"]
        empty = plan_of(made, traits=traits).services[KEY]
        assert (empty.proxy.kept, empty.frontends[0].pod.verdict.value) == ((), "reject")


def test_a_hostile_annotation_is_one_finding() -> None:
    plan, (finding,) = planned(ipvs_scheduler_flags="x," * 48_000 + "none")
    assert plan.scheduling.scheduler_flags == ()
    assert "'x', 'x', 'x' and 13 more: unknown" in finding
    assert "(and 1 more)" in finding  # that there are too many
    plan, (finding,) = planned(load_balancing="\x1b[31m" + "y" * 200_000)
    assert finding.isprintable()
    assert len(finding) < 400
