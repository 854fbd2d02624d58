"""What upstream had in the kernel for one world of objects, against what we would put there."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from steersman.compile.planner import compile_all
from steersman.model.findings import Finding
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.kube import KINDS
from steersman.model.plan import NodePlan
from steersman.model.ruleset import diff
from steersman.modes.iptables.mode import IptablesMode
from steersman.modes.iptables.parse import parse
from steersman.modes.iptables.render import Features, render_service
from steersman.modes.iptables.render_node import render_node
from steersman.netfilter.iptables.names import RuleKey
from steersman.netfilter.iptables.saved import canonical
from steersman.source.objects import decode_value
from steersman.source.store import Store
from tests.support.builders.store import replace_objects
from tests.support.data import RECORDED

GOLDEN = RECORDED / "golden"
SAVED = {4: GOLDEN / "iptables/iptables-save.txt", 6: GOLDEN / "iptables/ip6tables-save.txt"}
NOT_IN_THE_WORLD = "default/kubernetes"
PROXY_NAME = "service.kubernetes.io/service-proxy-name"


@pytest.mark.parametrize("family", SAVED)
def test_upstreams_rules_are_spelled_as_ours(family: int) -> None:
    rules = [line for line in SAVED[family].read_text().split("\n") if line.startswith("-A ")]
    assert rules
    assert [canonical(rule, family) for rule in rules] == rules
    assert not parse(SAVED[family].read_text(), family).spellings


def test_every_chain_equals_upstreams() -> None:
    upstream: dict[RuleKey, str] = {}
    for family, file in SAVED.items():
        upstream.update(parse(file.read_text(), family).ruleset)
    plan = _plan()
    features = Features(nfacct=True)
    ours = dict(render_node(plan.settings, features))
    for service in plan.services.values():
        ours.update(render_service(service, plan.settings, features))
    change = diff(upstream, ours)
    assert not change.added
    assert not change.changed
    assert all(NOT_IN_THE_WORLD in key[3] + value for key, value in change.removed.items()), (
        change.removed
    )
    assert len(ours) > 250


def _plan() -> NodePlan:
    store = Store("peer-node")
    world = yaml.safe_load((GOLDEN / "objects-from-api.yaml").read_text())["items"]
    world.append(yaml.safe_load((GOLDEN / "node.yaml").read_text()))
    for kind in KINDS:
        decoded = [decode_value(kind, o) for o in world if o["kind"] == kind and _watched(o)]
        replace_objects(store, kind, [o for o in decoded if not isinstance(o, Finding)])
    config = NodeConfig("peer-node", cluster_cidrs=("10.244.0.0/16", "fd00:10:244::/56"))
    interfaces = {"lo": ("127.0.0.1/8", "::1/128"), "eth0": ("10.250.1.2/24",)}
    facts = HostFacts("peer-node", interfaces)
    return compile_all(store.snapshot, config, facts, IptablesMode.traits)


def _watched(value: dict[str, Any]) -> bool:
    return PROXY_NAME not in (value["metadata"].get("labels") or {})
