"""Annotations for single modes, weights, and SCTP in a mode that does not forward it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.model.kube import Annotations, EndpointSlice, Service
from steersman.model.names import ObjectName
from steersman.model.plan import ServicePlan, Traits
from steersman.source.packed import PackedSlices
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


# Weights


def weighed(text: str | None, *addresses: str, name: str = "cart-1", **more: Any) -> EndpointSlice:
    made = slice_(*map(endpoint, addresses), name=name, **more)
    annotations = Annotations(weight=text, trigger_time="2024-01-01T00:00:00Z")
    meta = msgspec.structs.replace(made.metadata, annotations=annotations)
    held, owner = PackedSlices(), ObjectName("shop", "cart")
    held.put(owner, msgspec.structs.replace(made, metadata=meta))
    [packed] = held[owner]
    return packed


def planned_weights(*slices: EndpointSlice) -> tuple[dict[str, int], list[str]]:
    plan = plan_of(service(), *slices)
    weights = {ip: weight for ip, _, weight in plan.services[KEY].scheduling.weights}
    return weights, [str(finding) for finding in plan.findings]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        (None, {}),
        ("1", {}),
        ("65535", {"10.0.0.1": 65535, "10.0.0.2": 65535}),
        ("10.0.0.2=3", {"10.0.0.2": 3}),
        ("10.0.0.2=3, 5", {"10.0.0.1": 5, "10.0.0.2": 3}),
        (" 010.0.0.1 = 2 ,10.0.0.9=7", {"10.0.0.1": 2}),
    ],
)
def test_weights(text: str | None, weights: dict[str, int]) -> None:
    assert planned_weights(weighed(text, "10.0.0.1", "10.0.0.2")) == (weights, [])


@pytest.mark.parametrize("text", ["0", "-1", "65536", "many", "10.0.0.=3", "=3", "3=", "", " "])
def test_what_is_no_weight(text: str) -> None:
    weights, findings = planned_weights(weighed(text, "10.0.0.1"))
    assert weights == {}
    assert ["steersman/weight" in finding for finding in findings] == ([True] if text else [])


def test_what_is_right_counts_beside_what_is_wrong() -> None:
    weights, (finding,) = planned_weights(weighed("10.0.0.1=2,10.0.0.2=x", "10.0.0.1", "10.0.0.2"))
    assert weights == {"10.0.0.1": 2}
    assert "EndpointSlice shop/cart-1" in finding


def test_each_slice_has_its_own() -> None:
    stable = weighed("9", "10.0.0.1", name="stable")
    canary = weighed(None, "10.0.0.2", name="canary")
    assert planned_weights(canary, stable) == ({"10.0.0.1": 9}, [])


def test_the_last_slice_that_says_something_counts() -> None:
    one, two = weighed("2", "10.0.0.1", name="a"), weighed("3", "10.0.0.1", name="b")
    assert planned_weights(two, one)[0] == {"10.0.0.1": 3}


def test_ports_of_no_service_have_no_weights() -> None:
    other = weighed("3", "10.0.0.1", name="other", ports=[port("metrics", 9090)])
    assert planned_weights(other, weighed(None, "10.0.0.1")) == ({}, [])


def test_endpoints_of_no_use() -> None:
    odd = slice_(endpoint("what"), {**endpoint("10.0.0.1"), "addresses": []}, name="odd")
    meta = msgspec.structs.replace(odd.metadata, annotations=Annotations(weight="3"))
    portless = msgspec.structs.replace(odd, metadata=meta, ports=None)
    assert planned_weights(portless, weighed("2", "10.0.0.1"))[0] == {"10.0.0.1": 2}
    assert planned_weights(msgspec.structs.replace(odd, metadata=meta), weighed("2", "10.0.0.1"))[
        0
    ] == {"10.0.0.1": 2}


def test_hostile_weights_are_one_finding() -> None:
    weights, (finding,) = planned_weights(weighed("10.0.0.1=3," + "x\n," * 48_000, "10.0.0.1"))
    assert weights == {"10.0.0.1": 3}
    assert "'x', 'x', 'x' and 1996 more: ignored" in finding
    assert len(finding) < 400


def test_a_malformed_check_is_a_finding_of_the_plan() -> None:
    _, [finding] = planned(probe="ftp:/x")
    assert "steersman/probe" in finding
    assert "tcp, or http:/PATH" in finding
    _, both = planned(probe="ftp:/x", eject="perhaps")
    assert len(both) == 2
