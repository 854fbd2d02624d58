"""Which ways doctor tries, how often, and what it makes of a connection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import Family, ObjectName, PlanKey, Protocol, ServicePortName
from steersman.model.plan import NodePlan
from steersman.netfilter.conntrack.flows import Tracked
from steersman.operate.doctor.pod_views import is_pod
from steersman.operate.doctor.traffic_dial import Dial, Outcome
from steersman.operate.doctor.tries import (
    MOST,
    Tried,
    Way,
    choose,
    first_round,
    next_round,
    sample,
    trouble,
    wrong_source,
)
from steersman.operate.doctor.tries_check import Failure, symptoms
from steersman.operate.places import NODE, Place
from tests.support.builders import objects
from tests.support.builders.doctor import context_of
from tests.support.builders.objects import endpoint, plan_of, port, service, slice_

CLIENT, OUTSIDE = "10.0.0.9", "198.19.0.5"
POD = Place("pod", "the pod", Path("/p"), {Family.IPV4: CLIENT}, "veth1")
OUT = Place("outside", "a client outside", Path("/o"), {Family.IPV4: OUTSIDE}, "smd-1-1")
PLACES = (NODE, POD, OUT)
ENDS = ("10.0.0.5", "10.0.0.6")
LOCAL = ("192.168.0.2", "127.0.0.1")


def planned(*ends: str, here: bool = True, **spec: Any) -> NodePlan:
    """The plan of a Service with a node port and a load balancer IP."""
    ports = [port(nodePort=30080)]
    node = objects.NODE if here else "other"
    return plan_of(
        service(type="LoadBalancer", ports=ports, ingress=[{"ip": "203.0.113.1"}], **spec),
        slice_(*(endpoint(end, node) for end in ends or ENDS)),
    )


def ways(plan: NodePlan, places: Sequence[Place] = PLACES) -> tuple[Way, ...]:
    return choose(plan, plan.services.values(), places).ways


def shown(found: Sequence[Way]) -> list[tuple[str, str]]:
    return [(way.place.kind, str(way.target)) for way in found]


def test_every_kind_of_frontend_is_tried_from_every_place_that_uses_it() -> None:
    found = shown(ways(planned()))
    assert ("node", "10.96.0.10:80") in found
    assert ("pod", "10.96.0.10:80") in found
    assert ("outside", "10.96.0.10:80") not in found
    for place in ("node", "pod", "outside"):
        assert (place, "203.0.113.1:80") in found
        assert (place, "192.168.0.2:30080") in found
    assert len(found) == len(set(found))


def test_what_a_source_range_excludes_is_not_tried() -> None:
    found = shown(ways(planned(loadBalancerSourceRanges=["10.0.0.0/8"])))
    assert ("pod", "203.0.113.1:80") in found
    assert ("outside", "203.0.113.1:80") not in found


def test_what_policy_local_drops_is_not_tried() -> None:
    found = shown(ways(planned(here=False, externalTrafficPolicy="Local")))
    assert not [each for each in found if each[0] == "outside"]
    assert ("pod", "10.96.0.10:80") in found


def test_an_answer_must_find_the_client_outside() -> None:
    """Remote endpoints that see its own address would answer somebody else."""
    every = shown(ways(planned(externalTrafficPolicy="Local")))
    assert ("outside", "192.168.0.2:30080") in every


def test_a_place_without_the_family_is_left_out() -> None:
    place = Place("pod", "the pod", None, {Family.IPV6: "fd00::9"})
    assert not ways(planned(), [place])


def test_a_pod_is_told_from_other_namespaces() -> None:
    def found(address: str, **config: Any) -> bool:
        things = (service(), slice_(endpoint("172.20.1.5", objects.NODE)))
        more = msgspec.structs.replace(objects.CONFIG, **config)
        return is_pod(context_of(*things, world={"config": more}), [address], "veth1")

    assert found("10.0.0.9")
    assert found("172.20.1.5")
    assert not found("172.20.1.6")
    # Without a pod network, neighbours of endpoints are pods.
    assert found("172.20.1.6", cluster_cidrs=())
    assert not found("192.168.0.9", cluster_cidrs=())
    assert not found("fd00::9", cluster_cidrs=())


def test_sctp_and_what_is_too_much_are_named() -> None:
    ports = [port(f"p{n}", n, nodePort=30000 + n) for n in range(1, 40)]
    ports.append(port("s", 99, protocol="SCTP"))
    many = plan_of(
        service(type="NodePort", ports=ports),
        slice_(endpoint(ENDS[0]), ports=[{**each, "port": each["port"]} for each in ports]),
    )
    choice = choose(many, many.services.values(), PLACES)
    assert "SCTP" in choice.untried
    assert choice.untried[-1].endswith("more addresses and places")
    # Every port has a way before one has two.
    assert len({way.key for way in choice.ways}) == 39


def tried(
    way: Way,
    to: str,
    *,
    outcome: Outcome = "connected",
    seen: str = "",
    answered: bool = True,
) -> Tried:
    """A connection that met an endpoint."""
    client = way.place.addresses.get(Family.IPV4, LOCAL[0])
    address, _, number = to.partition(":")
    entry = Tracked(
        *(way.target.protocol, client, 4000, way.target.address, way.target.port),
        *(address, int(number), seen or client, 4000, answered),
    )
    return Tried(way, Dial(way.target, outcome), entry)


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    most=st.integers(0, MOST),
    misses=st.integers(0, 5),
)
def test_the_budget_is_never_exceeded(counts: list[int], most: int, misses: int) -> None:
    found = []
    for number, count in enumerate(counts):
        ends = [f"10.1.{number}.{n + 1}" for n in range(count)]
        (way,) = ways(planned(*ends), [NODE])[:1]
        name = ServicePortName("shop", f"s{number}", "http", Protocol.TCP)
        found.append(way._replace(key=PlanKey(name, Family.IPV4)))
    made: dict[Way, list[Tried]] = {way: [] for way in found}
    total = 0
    todo = first_round(found, most)
    while todo:
        total += len(todo)
        for number, way in enumerate(todo):
            ends = sorted(way.endpoints)
            # Some endpoints are never met, whatever is tried.
            made[way].append(tried(way, ends[number % max(1, len(ends) - misses)]))
        left = {way: tries for way, tries in made.items() if tries}
        todo = next_round(left, (), most - total)
    assert total <= most


def test_endpoints_that_nobody_met_are_looked_for_from_each_place() -> None:
    found = ways(planned())
    made = {way: [tried(way, f"{ENDS[0]}:8080")] for way in found}
    more = next_round(made, (), MOST)
    assert {way.place.kind for way in more} == {"node", "pod", "outside"}
    for way in found:
        made[way].append(tried(way, f"{ENDS[1]}:8080"))
    assert not next_round(made, (), MOST)
    assert not next_round({found[0]: made[found[0]][:1]}, {found[0].key}, MOST)
    # Without entries nothing is known of endpoints.
    assert not next_round({found[0]: [Tried(found[0], made[found[0]][0].dial)]}, (), MOST)


@pytest.mark.parametrize(("count", "most"), [(3, 9), (10, 20), (10, 4), (0, 5)])
def test_the_first_round_treats_ways_alike(count: int, most: int) -> None:
    way = ways(planned())[0]
    found = [way._replace(words=str(number)) for number in range(count)]
    todo = [each.words for each in first_round(found, most)]
    assert len(todo) <= most
    assert len({todo.count(words) for words in todo}) <= 1


def test_a_wrong_endpoint_is_trouble_even_if_it_answers() -> None:
    way = ways(planned())[0]
    assert not trouble(tried(way, f"{ENDS[0]}:8080"), ())
    assert "went to 10.0.0.9:99, not to 10.0.0.5:8080" in trouble(tried(way, "10.0.0.9:99"), ())
    assert "was not translated" in trouble(tried(way, str(way.target)), ())
    failed = tried(way, f"{ENDS[0]}:8080", outcome="timeout")
    assert "no answer" in trouble(failed, ())
    assert not trouble(tried(way, f"{ENDS[0]}:8080", outcome="failed"), ())


def test_silence_is_trouble_only_if_the_endpoint_answers_otherwise() -> None:
    silent = tried(ways(planned())[0], f"{ENDS[0]}:8080", outcome="silent")
    assert not trouble(silent, ())
    assert "answers when it is dialled itself" in trouble(silent, {f"{ENDS[0]}:8080"})


@pytest.mark.parametrize(
    ("silent", "words"),
    [
        (("10.0.0.5:80",), "its endpoint 10.0.0.5:80 does not answer either"),
        (
            tuple(f"10.0.0.{number}:80" for number in range(1, 6)),
            "its endpoints 10.0.0.1:80, 10.0.0.2:80, 10.0.0.3:80 and 2 more do not answer either",
        ),
    ],
)
def test_silent_endpoints_are_named_in_words(silent: tuple[str, ...], words: str) -> None:
    (way, *_) = ways(planned())
    (result,) = symptoms((), [Failure(way, "no answer", 1, 1, silent)], ())
    assert result.text == f"{way.words} does not work from this node (each time): {words}"


def test_the_source_is_compared_with_the_plan() -> None:
    found = ways(planned())
    (inside,) = [w for w in found if (w.place.kind, w.target.port) == ("pod", 80)][:1]
    (outside,) = [w for w in found if (w.place.kind, w.target.port) == ("outside", 30080)][:1]
    end = f"{ENDS[0]}:8080"
    assert not wrong_source(tried(inside, end), LOCAL)
    assert "instead of the client" in wrong_source(tried(inside, end, seen=LOCAL[0]), LOCAL)
    assert not wrong_source(tried(outside, end, seen=LOCAL[0]), LOCAL)
    assert "instead of an address of this node" in wrong_source(tried(outside, end), LOCAL)
    assert not wrong_source(tried(outside, end, answered=False), LOCAL)
    hairpin = ways(planned(CLIENT, *ENDS), [POD])[0]
    assert not wrong_source(tried(hairpin, f"{CLIENT}:8080", seen=LOCAL[0]), LOCAL)


def test_a_node_has_a_sample_tried() -> None:
    parts: list[Any] = []
    for number in range(40):
        name = f"s{number:02}"
        ports = [port(number=1000 + number)]
        parts += [
            service(name, ports=ports),
            slice_(endpoint(ENDS[0]), name=f"{name}-1", owner=name),
        ]
    log = [port("log", 99, protocol="UDP")]
    parts += [
        service("empty"),
        service("log", ports=log),
        slice_(endpoint(ENDS[0]), name="log-1", owner="log", ports=log),
    ]
    every = list(plan_of(*parts).services.values())
    (used,) = [plan.key for plan in every if plan.key.name.service == "s30"]
    found = sample(every, {ObjectName("shop", "s20"), ObjectName("shop", "empty")}, {used: 7})
    names = [plan.key.name.service for plan in found]
    assert names == ["s20", "s30", "log"]
