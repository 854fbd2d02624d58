"""Doctor about the load of endpoints: even as chance makes it, or why not."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from steersman.compile.explain import EndpointReport
from steersman.model.names import Family, Protocol
from steersman.model.plan import ServicePlan, Traits
from steersman.netfilter.conntrack.flows import Tracked
from steersman.operate.doctor.result import CheckResult
from steersman.operate.doctor.traffic_load import Load, judge, load_of, uneven
from tests.support.builders.doctor import context_of
from tests.support.builders.objects import KEY, NODE, endpoint, node, port, service, slice_

A, B, C = (f"10.0.0.{n}:8080" for n in (1, 2, 3))


Port = tuple[ServicePlan, EndpointReport]


def found(*endpoints: dict[str, Any], zone: str | None = None, **spec: Any) -> Port:
    mine = endpoints or tuple(endpoint(f"10.0.0.{n}", NODE) for n in (1, 2, 3))
    things = service(**spec), slice_(*mine), node(zone)
    context = context_of(*things, world={"traits": Traits()})
    plan = context.world.plan.services[KEY]
    return plan, context.report(plan)


def said(them: Port, new: dict[str, int], now: dict[str, int] | None = None) -> CheckResult:
    return judge(*them, Load(new, now or {}, 7))


def test_chance_is_not_called_uneven() -> None:
    choice = random.Random(1)
    for _ in range(500):
        counts = Counter(choice.choice((A, B, C)) for _ in range(choice.choice((3, 30, 300))))
        assert not uneven([counts[end] for end in (A, B, C)]), counts


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([], False),
        ([50], False),
        ([0, 0, 0], False),
        ([3, 0, 0], False),  # too few to tell
        ([40, 0, 0], True),
        ([170, 65, 65], True),
        ([10_000, 10_900], False),  # not by chance, but nobody minds
    ],
)
def test_uneven(counts: list[int], expected: bool) -> None:
    assert uneven(counts) is expected


def test_one_endpoint_or_no_traffic_is_fine() -> None:
    assert "nothing to spread" in said(found(endpoint("10.0.0.1")), {A: 99}).text
    assert "no connection" in said(found(), {}).text
    assert "as chance does" in said(found(), {A: 30, B: 33, C: 28}).text


@pytest.mark.parametrize(
    ("endpoints", "spec", "new", "now", "words"),
    [
        ((), {"sessionAffinity": "ClientIP"}, {A: 40}, {}, "session affinity"),
        ((), {}, {A: 40, B: 5, C: 6}, {A: 40}, "40 long-lived connections"),
        ((), {}, {A: 70, B: 60, C: 66}, {A: 40}, "40 long-lived connections"),
        ((), {}, {A: 70, B: 1, C: 1}, {}, "no setting of the Service explains it"),
        (
            tuple(endpoint(f"10.0.0.{n + 1}", NODE, zones=[z]) for n, z in enumerate("abb")),
            {},
            {A: 40},
            {},
            "topology hints leave 2 of 3",
        ),
        (
            (endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "node-2")),
            {"internalTrafficPolicy": "Local"},
            {A: 40},
            {},
            "policy Local sends clients only to the 1 of 2",
        ),
        (
            (endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "node-2")),
            {
                "type": "NodePort",
                "externalTrafficPolicy": "Local",
                "ports": [port(nodePort=30080)],
            },
            {A: 40, B: 2},
            {},
            "policy Local sends clients only to the 1 of 2",
        ),
    ],
)
def test_the_reason_is_named(
    endpoints: tuple[Any, ...],
    spec: dict[str, Any],
    new: dict[str, int],
    now: dict[str, int],
    words: str,
) -> None:
    result = said(found(*endpoints, zone="a", **spec), new, now)
    assert result.verdict == "warning"
    assert words in result.text
    assert result.evidence[0] == f"{A}: {new[A]} connections, {now.get(A, 0)} of them open now"


def test_tracked_connections_are_counted() -> None:
    def entry(client: str, end: str, state: str, answered: bool = True) -> Tracked:
        ends = ("10.96.0.10", 80, end, 8080, client, 4444)
        return Tracked(Protocol.TCP, client, 4444, *ends, answered, state)

    entries = (
        entry("10.0.9.1", "10.0.0.1", "ESTABLISHED"),
        entry("10.0.9.1", "10.0.0.1", "TIME_WAIT"),
        entry("10.0.9.2", "10.0.0.2", "SYN_SENT", answered=False),
    )
    load = load_of(entries, {})
    assert (load.new, load.open, load.clients) == ({A: 2}, {A: 1}, 2)
    assert load_of(entries, {B: 5}).new == {B: 5}
    assert KEY.family is Family.IPV4
