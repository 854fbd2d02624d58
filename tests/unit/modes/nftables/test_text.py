"""Rulesets as text, and the elements that nft loads when it replaces a table."""

from __future__ import annotations

import pytest

from steersman.model.names import Family
from steersman.model.plan import (
    Frontend,
    FrontendKind,
)
from steersman.modes.nftables.layout import Kind, prefix
from steersman.modes.nftables.render import render_node, render_service
from steersman.modes.nftables.text import describe, interim_firewall, loadable
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import MASQUERADED, PLAIN, Actions


def test_objects_are_named_in_errors() -> None:
    keys = sorted(render_service(make.port([1], affinity=60), make.SETTINGS, {}))
    assert describe(keys[:2]) == (
        "element 10.96.0.10 . tcp . 80 of service-ips and 1 more in table ip kube-proxy"
    )
    said = {describe([key]).split(" ", 1)[0] for key in keys}
    assert said == {"element", "chain", "affinity", "members", "member"}
    table = describe([prefix(Kind.SKELETON, Family.IPV6)])
    assert table == "skeleton in table ip6 kube-proxy"


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
