"""Laws of the iptables mode's pure half, on arbitrary ServicePlans."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from steersman.model.names import Family
from steersman.model.plan import ServicePlan
from steersman.model.ruleset import diff
from steersman.modes.iptables.parse import parse
from steersman.modes.iptables.render import Features, render_service
from steersman.modes.iptables.render_node import render_node
from steersman.modes.iptables.script import write_runs
from steersman.netfilter.iptables.names import RuleKey, printed_name
from steersman.netfilter.iptables.restore import LIMITS, Limits
from steersman.netfilter.iptables.saved import canonical
from tests.support.builders.plans import SETTINGS, key, random_plan
from tests.support.modes.iptables_tables import Tables
from tests.support.parts import examples

Rules = dict[RuleKey, str]
FEATURES = Features()


def plans(seed: int, count: int) -> list[ServicePlan]:
    rng = Random(seed)
    return [random_plan(rng, number, rng.choice(list(Family))) for number in range(count)]


def world(seed: int, count: int, split: bool = False) -> Rules:
    node = replace(SETTINGS, split_dispatch=split)
    want = render_node(node, FEATURES)
    for plan in plans(seed, count):
        want.update(render_service(plan, node, FEATURES))
    return want


seeds = st.integers(0, 1 << 32)


@settings(max_examples=examples(100))
@given(seeds)
def test_what_is_rendered_is_spelled_the_one_way(seed: int) -> None:
    for (family, *_), text in world(seed, 4).items():
        for rule in filter(None, text.split("\n")):
            assert canonical(rule, family) == rule


@settings(max_examples=examples(100))
@given(seeds, seeds, st.booleans(), st.sampled_from([LIMITS["legacy"], Limits(30, 40)]))
def test_applying_a_diff_leads_to_what_is_wanted(
    one: int, other: int, split: bool, limits: Limits
) -> None:
    """The restore input, carried out on a model of tables, reads back as the wanted Ruleset."""
    have: Rules = {}
    tables = Tables()
    for want in (world(one, 5), world(other, 5, split), world(one, 3), {}):
        for run in write_runs(diff(have, want), limits, {}):
            tables.restore(run.family, run.text)
        found: Rules = {}
        for family in (4, 6):
            found.update(parse(tables.save(family), family).ruleset)
        left = {k: v for k, v in found.items() if k[3] != "kubelet" and k[2] != "KUBE-FIREWALL"}
        wanted = {k: v for k, v in want.items() if k[3] != "kubelet" and k[2] != "KUBE-FIREWALL"}
        assert left == wanted
        have = {**want, **{k: v for k, v in found.items() if k not in left}}


@settings(max_examples=examples(100))
@given(seeds, seeds)
def test_keys_of_two_service_ports_never_meet(one: int, other: int) -> None:
    first = plans(one, 1)[0]
    second = random_plan(Random(other), 1, first.key.family)
    ours = render_service(first, SETTINGS, FEATURES)
    theirs = render_service(second, SETTINGS, FEATURES)
    assert not ours.keys() & theirs.keys()
    assert not ours.keys() & render_node(SETTINGS, FEATURES).keys()


@settings(max_examples=examples(100))
@given(st.text(), st.text())
def test_no_name_leaves_its_comment(service: str, port: str) -> None:
    name = key("ns/svc").name._replace(service=service, port=port)
    printed = printed_name(name)
    assert not set(printed) & set(' "\\\n\r\t')
    assert printed.isascii()


@settings(max_examples=examples(100))
@given(st.text(max_size=200), st.sampled_from([4, 6]))
def test_any_text_can_be_parsed(text: str, family: int) -> None:
    for table in ("nat", "filter"):
        parsed = parse(f"*{table}\n{text}\n-A KUBE-SERVICES {text}\n-A INPUT {text}", family)
        assert all(key[0] == family for key in parsed.ruleset)
