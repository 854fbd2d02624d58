"""Elements that are derived from others: clusterIPs in use, and hairpins of local endpoints."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from steersman.model.names import Family
from steersman.model.plan import Endpoint, Frontend, FrontendKind, ServicePlan
from steersman.model.ruleset import Diff, diff
from steersman.modes.nftables.derived import DerivedElements, check_derived, derived
from steersman.modes.nftables.layout import LEARN_CHAIN, Kind, named, prefix, without_locality
from steersman.modes.nftables.render import Slots, render_service
from steersman.modes.nftables.rules import FIREWALL_CHECK
from steersman.modes.nftables.text import ruleset_text
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import PLAIN

V4 = Family.IPV4
NODE_PORT = Frontend(FrontendKind.NODE_PORT, "", 30080, *PLAIN)
GUARDED = Frontend(FrontendKind.LOAD_BALANCER_IP, "192.0.2.80", 80, *PLAIN, ("198.51.100.0/24",))


def test_a_cluster_ip_stays_as_long_as_one_port_has_it() -> None:
    one = render_service(make.port(), make.SETTINGS, {})
    other_port = [make.cluster_ip(port=81)]
    two = render_service(make.port(frontends=other_port), make.SETTINGS, {})
    known = DerivedElements()
    address = prefix(Kind.CLUSTER_IPS, V4) + bytes((10, 96, 0, 10))

    def done(change: Diff) -> Diff:
        counts = known.counts_after(change)
        complete = known.complete(change, counts)
        known.commit(counts)
        return complete

    assert address in done(Diff(added=one)).added
    assert address not in done(Diff(added=two)).added
    assert address not in done(Diff(removed=one)).removed
    assert address in done(Diff(removed=two)).removed
    assert address in done(Diff(added=one)).added
    known.forget({V4})  # its table was dropped
    assert address in done(Diff(added=one)).added


def test_other_addresses_are_no_cluster_ips() -> None:
    elsewhere = Frontend(FrontendKind.EXTERNAL_IP, "192.0.2.80", 80, *PLAIN)
    rendered = render_service(make.port(frontends=[elsewhere]), make.SETTINGS, {})
    assert {key[0] for key in DerivedElements().load(rendered)} == {Kind.HAIRPIN_CONNECTIONS}


def test_derived_elements_are_loaded_with_their_sources() -> None:
    known = DerivedElements()
    plan = make.port([0, 1], frontends=[make.cluster_ip(), NODE_PORT])  # 0 is local
    rendered = render_service(plan, make.SETTINGS, {})
    assert ruleset_text(known.load(rendered)) == (
        "add element ip kube-proxy cluster-ips { 10.96.0.10 }\n"
        "add element ip kube-proxy hairpin-connections "
        "{ 10.244.0.0 . 10.244.0.0 . tcp . 8080 }\n"
    )
    known.reset({})
    change = Diff(added=rendered)
    assert known.complete(change, known.counts_after(change)) != change


def test_an_endpoint_in_the_place_of_another_has_a_hairpin_if_it_is_local() -> None:
    known, slots = DerivedElements(), dict[bytes, bytes]()
    have = render_service(make.port([1, 3]), make.SETTINGS, slots)
    known.load(have)
    for numbers, added, removed in (
        ([1, 5], 0, 0),
        ([1, 2], 1, 0),  # even ones are local
        ([7, 2], 0, 0),
        ([7, 4], 1, 1),
        ([7, 9], 0, 1),
    ):
        want = render_service(make.port(numbers), make.SETTINGS, slots)
        change = diff(have, want)
        counts = known.counts_after(change)
        whole = known.complete(change, counts)
        known.commit(counts)
        assert len(change.changed) == 1
        assert (len(whole.added), len(whole.removed)) == (added, removed)
        have = want


@pytest.mark.parametrize(
    ("plan", "chain"),
    [
        (make.port(frontends=[GUARDED]), FIREWALL_CHECK),
        (make.port(affinity=60), LEARN_CHAIN),
        (make.port(frontends=[NODE_PORT], affinity=60), LEARN_CHAIN),
    ],
)
def test_the_last_element_takes_the_chains_that_look_it_up(plan: ServicePlan, chain: str) -> None:
    known, plain = DerivedElements(), render_service(make.port(()), make.SETTINGS, {})
    lazy, objects = named(Kind.LAZY, V4, chain), render_service(plan, make.SETTINGS, {})
    known.load(plain)
    change = Diff(added=objects)
    counts = known.counts_after(change)
    assert lazy in known.complete(change, counts).added
    known.commit(counts)
    change = Diff(removed=objects)
    assert lazy in known.complete(change, known.counts_after(change)).removed


def test_a_source_without_its_derived_element_is_not_in_force() -> None:
    rendered: dict[bytes, Any] = dict(render_service(make.port([0, 1]), make.SETTINGS, {}))
    follows = DerivedElements().load(rendered)
    stranger = prefix(Kind.CLUSTER_IPS, V4) + bytes((10, 96, 0, 99))
    for missing in follows:
        objects = {**rendered, **follows, stranger: b""}
        del objects[missing]
        check_derived(objects)
        lost = {key for key, element in derived(rendered.items()) if element == missing}
        assert lost
        assert objects.keys() == (rendered.keys() - lost) | {stranger}


def hairpins(objects: dict[bytes, Any]) -> list[str]:
    """Return the commands for `hairpin-connections`."""
    return [line for line in ruleset_text(objects).splitlines() if "hairpin" in line]


ITSELF = "hairpin-connections { 10.244.0.1 . 10.244.0.1 . tcp . 8080 }"


def test_an_endpoint_that_comes_to_this_node_can_call_itself() -> None:
    slots: Slots = {}
    there = replace(make.port(()), cluster=(Endpoint("10.244.0.1", 8080, False),))
    here = replace(make.port(()), cluster=(Endpoint("10.244.0.1", 8080, True),))
    away, home = (render_service(plan, make.SETTINGS, slots) for plan in (there, here))
    known = DerivedElements()
    known.load(away)
    for change, comes in ((diff(away, home), True), (diff(home, away), False)):
        assert [key[0] for key in change.changed] == [Kind.SERVICE_ENDPOINTS]
        counts = known.counts_after(change)
        whole = known.complete(change, counts)
        found = [hairpins(part) for part in (whole.added, whole.removed)]
        line = f"add element ip kube-proxy {ITSELF}"
        assert found == ([[line], []] if comes else [[], [line]])
        known.commit(counts)


def test_an_element_without_sources_stays_if_one_comes() -> None:
    """As an earlier version wrote it: the element is there, but endpoints have no locality."""
    rendered: dict[bytes, Any] = render_service(make.port([0, 1]), make.SETTINGS, {})
    endpoints = {k: v for k, v in rendered.items() if k[0] == Kind.SERVICE_ENDPOINTS}
    everyones = {k: v[:-1] + b"\1" for k, v in endpoints.items()}
    objects: dict[bytes, Any] = {**rendered, **DerivedElements().load({**rendered, **everyones})}
    objects.update({k: without_locality(v) for k, v in endpoints.items()})
    known = DerivedElements()
    known.reset(check_derived(objects))
    change = diff(objects, rendered)
    complete = known.complete(change, known.counts_after(change))
    assert hairpins(complete.removed) == [f"add element ip kube-proxy {ITSELF}"]
    assert [key[0] for key in complete.changed] == [Kind.SERVICE_ENDPOINTS]


def test_an_endpoint_of_two_services_stays_until_both_are_gone() -> None:
    known = DerivedElements()
    one = render_service(make.port([0]), make.SETTINGS, {})
    other = make.port([0], of=make.key("other"), frontends=[make.cluster_ip(address="10.96.0.11")])
    two = render_service(other, make.SETTINGS, {})
    objects: dict[bytes, Any] = {**one, **two}
    known.reset(check_derived({**objects, **DerivedElements().load(objects)}))
    first = Diff(removed=one)
    counts = known.counts_after(first)
    assert {key[0] for key in known.complete(first, counts).removed.keys() - one.keys()} == {
        Kind.CLUSTER_IPS
    }
    known.commit(counts)
    last = Diff(removed=two)
    gone = known.complete(last, known.counts_after(last)).removed.keys() - two.keys()
    assert {key[0] for key in gone} == {Kind.CLUSTER_IPS, Kind.HAIRPIN_CONNECTIONS}
