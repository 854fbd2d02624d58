"""Diffs as commands of nft, in an order in which each one is valid."""

from __future__ import annotations

from typing import Any

from steersman.host.exec import SubprocessExec
from steersman.model.names import Family
from steersman.model.ruleset import diff
from steersman.modes.nftables.layout import Kind, element_key, named, prefix
from steersman.modes.nftables.mode import NftablesMode
from steersman.modes.nftables.script import script
from tests.support.builders import nftables_plans as make
from tests.support.lab.nft import render

MODE = NftablesMode(SubprocessExec())


def world(*plans: Any) -> dict[bytes, Any]:
    return render(MODE, plans)


def commands(have: dict[bytes, Any], want: dict[bytes, Any]) -> list[str]:
    return script(have, diff(have, want)).splitlines()


def test_a_new_table_is_made_whole_and_an_old_one_is_deleted() -> None:
    want = world(make.port([0, 1]))
    lines = commands({}, want)
    assert lines[:2] == ["add table ip kube-proxy", "delete table ip kube-proxy"]
    assert any(
        line.startswith("add element ip kube-proxy service-ips { 10.96.0.10") for line in lines
    )
    assert "add element ip kube-proxy cluster-ips { 10.96.0.10 }" in lines
    assert commands(want, {}) == ["delete table ip kube-proxy", "delete table ip6 kube-proxy"]
    assert commands(want, want) == []


def test_an_endpoint_that_goes_takes_what_followed_from_it() -> None:
    one, two = world(make.port([0, 1])), world(make.port([1]))
    lines = commands(one, two)
    pair = "10.244.0.0 . 10.244.0.0 . tcp . 8080"
    assert f"delete element ip kube-proxy hairpin-connections {{ {pair} }}" in lines
    assert not any("cluster-ips" in line for line in lines)
    verbs = [line.split()[0] for line in lines]
    assert verbs == sorted(verbs, reverse=True)  # deleted before added


def test_affinity_has_maps_and_sets_and_its_rules_are_comments() -> None:
    without, with_it = world(make.port([1])), world(make.port([1], affinity=600))
    lines = commands(without, with_it)
    assert any("nft cannot write these rules" in line for line in lines)
    (made,) = [line for line in lines if "flags dynamic,timeout" in line]
    assert made.startswith("add map ip kube-proxy affinity-")
    (made,) = [line for line in lines if line.startswith("add set ")]
    assert made.endswith("{ typeof ip daddr . th dport ; }")
    assert any("# lookup tcp" in line for line in lines)
    chain = next(line for line in lines if "# lookup" in line).split()[4]
    back = commands(with_it, without)
    flushed, deleted = f"flush chain ip kube-proxy {chain}", f"delete chain ip kube-proxy {chain}"
    leads = next(n for n, line in enumerate(back) if line.startswith("delete element"))
    assert leads < back.index(flushed) < back.index(deleted)
    sets = [line for line in back if line.startswith(("delete map", "delete set"))]
    assert len(sets) == 2
    assert "nft cannot write" in "\n".join(commands({}, with_it))


def test_members_and_stale_entries_go_unless_their_set_goes() -> None:
    old = world(make.port([1, 3], affinity=600))
    new = world(make.port([1], affinity=600))
    members = [line for line in commands(old, new) if "endpoints-" in line or "members" in line]
    assert [line for line in members if "delete element" in line and "10.244.0.3 . 8080" in line]
    memory = next(key for key in new if key[0] == Kind.AFFINITY)
    stale = {**new, element_key(memory, bytes((10, 0, 0, 9))): b""}
    (line,) = commands(stale, new)
    assert line.endswith("{ 10.0.0.9 }")
    bare = world(make.port([1]))
    assert not any("{ 10.0.0.9 }" in line for line in commands(stale, bare))


def test_ranges_are_deleted_as_ranges() -> None:
    key = prefix(Kind.FIREWALL_ALLOWED, Family.IPV4)
    key += bytes((10, 96, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0, 192, 0, 2, 0))
    base = world()
    (line,) = commands({**base, key: bytes((192, 0, 2, 255))}, base)
    assert line.endswith("{ 10.96.0.1 . tcp . 80 . 192.0.2.0-192.0.2.255 }")


def test_changed_rules_of_the_node_are_refilled() -> None:
    base = world()
    rules = prefix(Kind.RULES, Family.IPV4)
    lines = commands({**base, rules: "# others"}, base)
    assert "\n".join(lines) + "\n" == base[rules]


def test_sockets_are_no_part_of_it() -> None:
    base = world()
    assert commands(base, {**base, named(Kind.RELAY, Family.IPV4, "x"): object()}) == []
