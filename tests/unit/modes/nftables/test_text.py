"""Rulesets as text, and the elements that nft loads when it replaces a table."""

from __future__ import annotations

import pytest

from steersman.model.names import Family
from steersman.model.plan import (
    Frontend,
    FrontendKind,
)
from steersman.model.ruleset import Diff, diff
from steersman.modes.nftables.layout import Kind, prefix
from steersman.modes.nftables.render import Slots, render_localhost, render_node, render_service
from steersman.modes.nftables.text import describe, diff_text, interim_firewall, loadable
from tests.support.builders import nftables_plans as make
from tests.support.builders.nftables_plans import ON
from tests.support.builders.plans import MASQUERADED, PLAIN, Actions


def test_a_diff_is_printed() -> None:
    plan, more = make.port([1], affinity=60), make.port([1, 3, 5, 7, 9], affinity=60)
    slots: Slots = {}
    before = render_service(plan, make.SETTINGS, slots) | render_node(make.SETTINGS)
    after = render_service(more, make.SETTINGS, slots)
    text = diff_text(diff(before, after))
    assert "delete table ip6 kube-proxy\n" in text
    assert "delete chain ip kube-proxy cluster-affinity-" in text
    assert "  # lookup tcp mark-cluster cluster lb-16\n" in text


def test_objects_are_named_in_errors() -> None:
    keys = sorted(render_service(make.port([1], affinity=60), make.SETTINGS, {}))
    assert describe(keys[:2]) == (
        "element 10.96.0.10 . tcp . 80 of service-ips and 1 more in table ip kube-proxy"
    )
    said = {describe([key]).split(" ", 1)[0] for key in keys}
    assert said == {"element", "chain", "affinity", "members", "member"}
    table = describe([prefix(Kind.SKELETON, Family.IPV6)])
    assert table == "skeleton in table ip6 kube-proxy"


def node_port(actions: Actions = PLAIN, port: int = 30080) -> Frontend:
    return Frontend(FrontendKind.NODE_PORT, "", port, *actions)


def test_listeners_are_printed_as_comments() -> None:
    plan = make.port([1], frontends=[node_port()])
    text = diff_text(Diff(added=render_localhost(plan, ON)))
    assert text == "# add listener at 127.0.0.1 port 30080: all to 10.244.0.1:8080\n"


V4, V6 = Family.IPV4, Family.IPV6


def rendered(affinity: int = 0, actions: Actions = PLAIN) -> dict[bytes, object]:
    node_port = Frontend(FrontendKind.NODE_PORT, "", 30080, *actions)
    plan = make.port([1, 2], frontends=[make.cluster_ip(actions), node_port], affinity=affinity)
    return {**render_node(make.SETTINGS), **render_service(plan, make.SETTINGS, {})}


@pytest.mark.parametrize(
    "actions", [PLAIN, MASQUERADED, make.UNMASQUERADED], ids=["plain", "all", "none"]
)
def test_loadable_elements_equal_those_without_affinity(actions: Actions) -> None:
    assert loadable(V4, rendered(60, actions)) == loadable(V4, rendered(0, actions))


def test_only_elements_of_the_family_are_loaded() -> None:
    everything = rendered(60)
    loaded = loadable(V4, everything)
    assert loaded.keys() < everything.keys()
    assert {key[1] for key in loaded} == {V4}
    assert loadable(V6, everything) == {}


def test_source_ranges_hold_from_the_start() -> None:
    guarded = Frontend(
        FrontendKind.LOAD_BALANCER_IP, "192.0.2.80", 80, *PLAIN, ("198.51.100.0/24",)
    )
    loaded = loadable(V4, render_service(make.port(frontends=[guarded]), make.SETTINGS, {}))
    service = "ip daddr . ip protocol . th dport"
    assert interim_firewall(V4, loaded).splitlines() == [
        f"add rule ip kube-proxy firewall {service} . ip saddr @firewall-allowed return",
        "add rule ip kube-proxy firewall drop",
        f"add rule ip kube-proxy firewall-check {service} @firewall-ips goto firewall",
        *(
            f"add {line}"
            for hook in ("prerouting", "output")
            for line in (
                f"chain ip kube-proxy filter-{hook}-pre-dnat "
                f"{{ type filter hook {hook} priority -110 ; }}",
                f"rule ip kube-proxy filter-{hook}-pre-dnat ct state new jump firewall-check",
            )
        ),
    ]
    assert interim_firewall(V6, loaded) == ""
    assert interim_firewall(V4, loadable(V4, rendered())) == ""
