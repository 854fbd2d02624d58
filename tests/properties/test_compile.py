"""Laws of compile: incremental equals full, and what every plan promises to the modes."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from steersman.compile.actions import DROP, REJECT
from steersman.compile.claims import claim_of
from steersman.compile.plan import Planner, compile_all
from steersman.compile.ports import plan_ports, read_ports
from steersman.compile.trace import Flow, trace
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import EndpointSlice, KubeObject, Node, Service
from steersman.model.names import Family, ObjectName, Protocol
from steersman.model.plan import NodePlan, ServicePlan, SourceClass, Traits, Verdict
from steersman.source.store import Store
from tests.support.builders.objects import (
    CONFIG,
    FACTS,
    IPTABLES,
    NFTABLES,
    NODE,
    port,
    service,
    settings_of,
)

# Few values each, so that objects meet and clash.
NAMES = st.sampled_from(["a", "b", "c", "d"])
ADDRESSES = st.sampled_from(["10.96.0.1", "10.96.0.2", "10.96.0.003", "fd00::1", "fd00::2", "bad"])
NUMBERS = st.sampled_from([80, 81, 30000, 30001, 0, 70000])
PROTOCOLS = st.sampled_from(["TCP", "UDP", "SCTP", None, "QUIC"])
POLICIES = st.sampled_from(["Cluster", "Local", None, "local"])
ZONES = st.lists(st.sampled_from(["z1", "z2"]), max_size=2)
TIMES = st.sampled_from([None, "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"])
RANGES = st.sampled_from(["192.168.0.0/16", "203.0.113.0/24", "0.0.0.0/0", "fd00::/8", "bad"])


def objects(kind: type[KubeObject], **fields: Any) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(fields).map(lambda value: msgspec.convert(value, kind))


PORTS = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["http", "dns", None]),
            "port": NUMBERS,
            "protocol": PROTOCOLS,
            "nodePort": NUMBERS,
        }
    ),
    max_size=3,
)
SERVICES = objects(
    Service,
    metadata=st.fixed_dictionaries(
        {"name": NAMES, "namespace": st.just("shop"), "creationTimestamp": TIMES}
    ),
    spec=st.fixed_dictionaries(
        {
            "type": st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]),
            "clusterIP": ADDRESSES,
            "ipFamilies": st.sampled_from([None, ["IPv4"], ["IPv6", "IPv4"], ["IPv7"]]),
            "clusterIPs": st.lists(ADDRESSES, max_size=2),
            "ports": PORTS,
            "externalIPs": st.lists(ADDRESSES, max_size=2),
            "sessionAffinity": st.sampled_from(["None", "ClientIP", None]),
            "internalTrafficPolicy": POLICIES,
            "externalTrafficPolicy": POLICIES,
            "healthCheckNodePort": NUMBERS,
            "loadBalancerSourceRanges": st.lists(RANGES, max_size=2),
        }
    ),
    status=st.fixed_dictionaries(
        {
            "loadBalancer": st.fixed_dictionaries(
                {"ingress": st.lists(st.fixed_dictionaries({"ip": ADDRESSES}), max_size=2)}
            )
        }
    ),
)
ENDPOINTS = st.fixed_dictionaries(
    {
        "addresses": st.lists(
            st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.10", "fd00:10::1", "bad"]), max_size=2
        ),
        "nodeName": st.sampled_from([NODE, "other", None]),
        "conditions": st.fixed_dictionaries(
            {
                key: st.sampled_from([True, False, None])
                for key in ("ready", "serving", "terminating")
            }
        ),
        "hints": st.fixed_dictionaries(
            {
                "forZones": ZONES.map(lambda zones: [{"name": zone} for zone in zones]),
                "forNodes": st.sampled_from([None, [], [{"name": NODE}], [{"name": "other"}]]),
            }
        ),
    }
)
SLICES = objects(
    EndpointSlice,
    metadata=st.fixed_dictionaries(
        {
            "name": st.sampled_from(["s1", "s2", "s3", "s4", "s5"]),
            "namespace": st.just("shop"),
            "labels": NAMES.map(lambda name: {"kubernetes.io/service-name": name}),
        }
    ),
    addressType=st.sampled_from(["IPv4", "IPv4", "IPv6", "FQDN"]),
    endpoints=st.lists(ENDPOINTS, max_size=4),
    ports=PORTS,
)
NODES = objects(
    Node,
    metadata=st.fixed_dictionaries(
        {
            "name": st.just(NODE),
            "labels": st.sampled_from(
                [{"topology.kubernetes.io/zone": "z1"}, {"topology.kubernetes.io/zone": "z2"}, {}]
            ),
        }
    ),
    status=st.sampled_from(
        [
            {"addresses": []},
            {"addresses": [{"type": "InternalIP", "address": "203.0.113.7"}]},
            {"addresses": [{"type": "InternalIP", "address": "fd00::7"}]},
        ]
    ),
)
OBJECTS = SERVICES | SERVICES | SLICES | SLICES | NODES
DELETIONS = st.tuples(
    st.sampled_from(["Service", "EndpointSlice", "Node"]),
    st.sampled_from(["a", "b", "c", "s1", "s2", "s3", NODE]),
)
MACHINES = st.sampled_from(
    [FACTS, msgspec.structs.replace(FACTS, ipv6=False), HostFacts(NODE, {"lo": ("127.0.0.1/8",)})]
)
BATCHES = st.lists(
    st.tuples(st.lists(OBJECTS | DELETIONS, max_size=6), MACHINES, st.booleans()), max_size=6
)
CONFIGS = st.sampled_from(
    [
        msgspec.structs.replace(CONFIG, bind_address="0.0.0.0"),
        NodeConfig(node_name=NODE, allow_service_external_ips=False, masquerade_all=True),
    ]
)
TRAITS = st.sampled_from([IPTABLES, NFTABLES])


def take(store: Store, event: KubeObject | tuple[str, str]) -> None:
    if isinstance(event, tuple):
        kind, name = event
        store.delete(kind, ObjectName("" if kind == "Node" else "shop", name))
    else:
        store.upsert(event)


def service_like(name: str, created: str | None, vip: str, number: int, check: int) -> Service:
    return service(
        name,
        created=created,
        type="LoadBalancer",
        clusterIP=vip,
        externalTrafficPolicy="Local",
        healthCheckNodePort=check,
        ports=[port(nodePort=number)],
    )


SMALL_NUMBERS = st.sampled_from([30000, 30001])
CLASHING = st.builds(
    service_like,
    st.sampled_from("abc"),
    TIMES,
    st.sampled_from(["10.96.0.1", "10.96.0.2"]),
    SMALL_NUMBERS,
    SMALL_NUMBERS,
)
GONE = st.tuples(st.just("Service"), st.sampled_from("abc"))
ONE_BY_ONE = st.lists(CLASHING | CLASHING | GONE, max_size=12).map(
    lambda events: [([event], FACTS, False) for event in events]
)


@settings(max_examples=200, deadline=None)
@given(BATCHES | ONE_BY_ONE, CONFIGS, TRAITS)
def test_incremental_equals_full(
    batches: list[tuple[list[Any], HostFacts, bool]], config: NodeConfig, traits: Traits
) -> None:
    """An update makes the plan that a fresh Planner makes which succeeds the one of before."""
    store, planner = Store(NODE), Planner(config, traits)
    followed: dict[Any, ServicePlan] = {}  # what a mode that hears only of changes would have
    for events, facts, everything in batches:
        for event in events:
            take(store, event)
        dirty = store.take().services
        before = planner.plan.settings if followed else None
        fresh = Planner(config, traits)
        fresh.succeed(planner)
        fresh.update(store.snapshot, facts, (), everything=True)
        full = fresh.plan
        change = planner.update(store.snapshot, facts, dirty, everything)
        assert planner.plan == full
        assert change.settings_changed or before is None or before == full.settings
        assert not change.removed & change.changed.keys()
        for key in change.removed:
            del followed[key]
        followed |= change.changed
        assert followed == full.services


def world(events: list[KubeObject]) -> Snapshot:
    store = Store(NODE)
    for event in events:
        store.upsert(event)
    return store.snapshot


@settings(max_examples=200, deadline=None)
@given(st.lists(OBJECTS, max_size=10), CONFIGS, TRAITS, st.randoms(use_true_random=False))
def test_a_plan_keeps_its_promises_and_order_does_not_matter(
    events: list[KubeObject], config: NodeConfig, traits: Traits, shuffled: Any
) -> None:
    cluster = world(events)
    plan = compile_all(cluster, config, FACTS, traits)
    claims = [
        claim_of(key, frontend)
        for key, service_plan in plan.services.items()
        for frontend in service_plan.frontends
    ]
    assert len(claims) == len(set(claims))
    for key, service_plan in plan.services.items():
        assert key == service_plan.key
        keeps_its_promises(service_plan, plan)
    # A Node keeps what it has lost: of its history, only the outcome has to be the same.
    last = [cluster.node] if cluster.node else []
    final = {(type(e), e.metadata.object_name): e for e in [*events, *last]}
    again = list(final.values())
    shuffled.shuffle(again)
    assert compile_all(world(again), config, FACTS, traits) == plan


def keeps_its_promises(plan: ServicePlan, node: NodePlan) -> None:
    for listed in (plan.cluster, plan.local, plan.reachable):
        assert list(listed) == sorted(set(listed), key=str)
        assert all((":" in endpoint.ip) is (plan.key.family is Family.IPV6) for endpoint in listed)
    assert set(plan.reachable) == {*plan.cluster, *plan.local}
    assert bool(plan.cluster) is plan.uses_cluster
    assert bool(plan.local) is plan.uses_local
    assert all(endpoint.local for endpoint in plan.local)
    for frontend in plan.frontends:
        assert 0 < frontend.port < 65536
        for action in (frontend.pod, frontend.node, frontend.external):
            if action.verdict is Verdict.FORWARD:
                assert plan.pool(action.pool)
            else:
                assert action in (DROP, REJECT)
        if not node.settings.family(plan.key.family).detector:
            assert frontend.pod == frontend.external


@settings(max_examples=100, deadline=None)
@given(SERVICES, st.lists(SLICES, max_size=3))
def test_any_service_compiles_alone(obj: Service, slices: list[EndpointSlice]) -> None:
    asked = read_ports(obj, settings_of(), allow_external_ips=True)
    plans, findings = plan_ports(asked, slices, settings_of(), "z1")
    assert all(key == plan.key for key, plan in plans.items())
    assert all(finding.reason and finding.field for finding in findings)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(OBJECTS, max_size=8),
    TRAITS,
    st.sampled_from([*SourceClass, "10.0.0.1", "192.168.0.2", "fd00:10::1", "::1", "junk"]),
    ADDRESSES | st.sampled_from(["192.168.0.2", "127.0.0.1", "::1"]),
    NUMBERS,
    st.sampled_from(Protocol),
)
def test_every_flow_has_a_decision_with_reasons(
    events: list[KubeObject],
    traits: Traits,
    source: str,
    destination: str,
    number: int,
    protocol: Protocol,
) -> None:
    plan = compile_all(world(events), CONFIG, FACTS, traits)
    decision = trace(plan, Flow(source, destination, number, protocol))
    assert decision.reasons
    assert bool(decision.endpoints) is (decision.verdict == "forward")
    if decision.plan is not None:
        assert decision.frontend in plan.services[decision.plan].frontends
        assert set(decision.endpoints) <= set(plan.services[decision.plan].reachable)
