"""What nft loads when it replaces a table that is not ours, until everything else is in."""

from __future__ import annotations

import pytest

from steersman.model.names import Family
from steersman.model.plan import Frontend, FrontendKind
from steersman.modes.diff import Diff
from steersman.modes.nftables.cluster_ips import ClusterIps
from steersman.modes.nftables.layout import Kind, prefix
from steersman.modes.nftables.render import render_node, render_service
from steersman.modes.nftables.takeover import hairpin_meanwhile, loadable
from steersman.modes.nftables.text import ruleset_text
from tests import nftables_plans as make

V4, V6 = Family.IPV4, Family.IPV6


def rendered(affinity: int = 0, actions: make.Actions = make.PLAIN) -> dict[bytes, object]:
    node_port = Frontend(FrontendKind.NODE_PORT, "", 30080, *actions)
    plan = make.plan([1, 2], frontends=[make.cluster_ip(actions), node_port], affinity=affinity)
    return {**render_node(make.SETTINGS), **render_service(plan, make.SETTINGS, {})}


@pytest.mark.parametrize(
    "actions", [make.PLAIN, make.MASQUERADED, make.UNMASQUERADED], ids=["plain", "all", "none"]
)
def test_affinity_is_left_out_and_all_else_is_as_without(actions: make.Actions) -> None:
    assert loadable(V4, rendered(60, actions)) == loadable(V4, rendered(0, actions))


def test_only_elements_of_the_family_are_loaded() -> None:
    everything = rendered(60)
    loaded = loadable(V4, everything)
    assert loaded.keys() < everything.keys()
    assert {key[1] for key in loaded} == {V4}
    assert loadable(V6, everything) == {}


def test_a_rule_masquerades_endpoints_that_reach_themselves() -> None:
    pairs = "10.244.0.1 . 10.244.0.1, 10.244.0.2 . 10.244.0.2"
    match = f"ip saddr . ip daddr {{ {pairs} }}"
    loaded = loadable(V4, rendered())
    assert hairpin_meanwhile(V4, loaded) == (
        f"add rule ip kube-proxy hairpin {match} masquerade fully-random\n"
    )


def test_no_rule_is_needed_where_nobody_reaches_itself_or_all_are_masqueraded() -> None:
    assert hairpin_meanwhile(V6, loadable(V4, rendered())) == ""
    assert hairpin_meanwhile(V4, loadable(V4, rendered(0, make.MASQUERADED))) == ""


def test_a_cluster_ip_is_known_as_long_as_one_port_has_it() -> None:
    one = render_service(make.plan(), make.SETTINGS, {})
    other_port = [make.cluster_ip(port=81)]
    two = render_service(make.plan(frontends=other_port), make.SETTINGS, {})
    known = ClusterIps()
    address = prefix(Kind.CLUSTER_IPS, V4) + bytes((10, 96, 0, 10))

    def done(change: Diff) -> Diff:
        counts = known.after(change)
        complete = known.complete(change, counts)
        known.keep(counts, set())
        return complete

    assert address in done(Diff(added=one)).added
    assert address not in done(Diff(added=two)).added
    assert address not in done(Diff(removed=one)).removed
    assert address in done(Diff(removed=two)).removed
    assert address in done(Diff(added=one)).added
    known.keep({}, {V4})  # its table was dropped
    assert address in done(Diff(added=one)).added


def test_other_addresses_are_no_cluster_ips() -> None:
    elsewhere = Frontend(FrontendKind.EXTERNAL_IP, "192.0.2.80", 80, *make.PLAIN)
    rendered = render_service(make.plan(frontends=[elsewhere]), make.SETTINGS, {})
    assert ClusterIps().loaded(rendered) == {}


def test_known_cluster_ips_are_loaded_with_their_elements() -> None:
    known = ClusterIps()
    plain = render_service(make.plan(), make.SETTINGS, {})
    assert ruleset_text(known.loaded(plain)) == (
        "add element ip kube-proxy cluster-ips { 10.96.0.10 }\n"
    )
    known.read({})
    change = Diff(added=plain)
    assert known.complete(change, known.after(change)) != change
