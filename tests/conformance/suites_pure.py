"""The conformance suites about pure values: one function per suite, a case at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from steersman.compile.endpoints import (
    EndpointsByPort,
    EndpointState,
    build_endpoints,
    categorize,
    local_ready_count,
)
from steersman.compile.node import detectors
from steersman.compile.service import PortSpec, PortSpecs, service_ports
from steersman.model.addresses import split_host_port
from steersman.model.inputs import DetectLocalMode, NodeConfig
from steersman.model.kube import EndpointSlice, Node, Service
from steersman.model.names import Family, ObjectName, ServicePortName
from steersman.model.plan import Endpoint, LocalDetector
from steersman.source.store import Store
from tests.conformance.flows_trace import trace_flow_case
from tests.conformance.world import Case, read
from tests.support.following import StoreFollower

FAMILIES = {"IPv4": Family.IPV4, "IPv6": Family.IPV6}


# topology_categorize


def topology_categorize(case: Case) -> None:
    """Inputs of the endpoint selection against its four outputs."""
    if "skipWhen" in case:  # a feature gate that is locked on
        return
    states = [endpoint_state(value) for value in case["endpoints"]]
    zone = case["topologyLabels"].get("topology.kubernetes.io/zone", "")
    found = categorize(states, _topology_spec(case["service"]), case["nodeName"], zone)
    expect = case["expect"]
    assert _printed(found.cluster) == set(expect["clusterEndpoints"] or ())
    assert _printed(found.local) == set(expect["localEndpoints"] or ())
    assert _printed(found.reachable) == set(expect["allReachableEndpoints"] or ())
    assert found.has_any is expect["hasAnyEndpoints"]


def _topology_spec(service: dict[str, Any]) -> PortSpec:
    return PortSpec(
        "10.0.0.1",
        80,
        node_port=service["nodePort"],
        external_ips=tuple(service["externalIPs"]),
        load_balancer_vips=tuple(service["loadBalancerVIPs"]),
        internal_policy_local=service["internalPolicyLocal"],
        external_policy_local=service["externalPolicyLocal"],
    )


def endpoint_state(value: dict[str, Any]) -> EndpointState:
    """Return an endpoint as the data spells it."""
    ip, port = split_host_port(value["endpoint"])
    return EndpointState(
        Endpoint(ip, port, value["isLocal"]),
        value["ready"],
        value["serving"],
        value["terminating"],
        tuple(value["zoneHints"] or ()),
        tuple(value["nodeHints"] or ()),
    )


def _printed(endpoints: tuple[Endpoint, ...]) -> set[str]:
    return {str(endpoint) for endpoint in endpoints}


# service_tracker


def service_tracker(case: Case) -> None:
    """A Service, or a history of Services, against ServicePorts and changed flags."""
    family = FAMILIES[case["ipFamily"]]
    if "service" in case:
        ports = service_ports(read(Service, case["service"]), family)
        assert _port_map(ports) == _expected_ports(case["expect"])
        return
    store, updated = _replay(case, lambda service: service_ports(service, family) or None)
    expect = case["expect"]
    ports = _all_ports(store, family)
    assert _port_map(ports) == _expected_ports(expect["servicePorts"])
    assert set(map(str, updated)) == set(expect["updatedServices"] or ())
    assert _health_ports(ports) == (expect["healthCheckNodePorts"] or {})


def _all_ports(store: Store, family: Family) -> PortSpecs:
    ports: PortSpecs = {}
    for service in store.snapshot.services.values():
        ports.update(service_ports(service, family))
    return ports


def _health_ports(ports: PortSpecs) -> dict[str, int]:
    return {
        str(name.object_name): spec.health_check_node_port
        for name, spec in ports.items()
        if spec.health_check_node_port
    }


def _key(name: ServicePortName) -> str:
    return f"{name.namespace}/{name.service}:{name.port}/{name.protocol.value}"


def _port_map(ports: PortSpecs) -> dict[str, tuple[Any, ...]]:
    return {_key(name): _port_row(spec) for name, spec in ports.items()}


def _port_row(spec: PortSpec) -> tuple[Any, ...]:
    return (
        spec.cluster_ip,
        spec.port,
        spec.protocol.value,
        spec.node_port,
        list(spec.external_ips),
        list(spec.load_balancer_vips),
        list(spec.load_balancer_source_ranges),
        spec.health_check_node_port,
        spec.session_affinity,
        spec.affinity_seconds,
        spec.external_policy_local,
        spec.internal_policy_local,
    )


_FIELDS = (
    "clusterIP",
    "port",
    "protocol",
    "nodePort",
    "externalIPs",
    "loadBalancerVIPs",
    "loadBalancerSourceRanges",
    "healthCheckNodePort",
    "sessionAffinityType",
    "stickyMaxAgeSeconds",
    "externalPolicyLocal",
    "internalPolicyLocal",
)


def _expected_ports(expect: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    lists = {"externalIPs", "loadBalancerVIPs", "loadBalancerSourceRanges"}
    return {
        key: tuple((row[f] or []) if f in lists else row[f] for f in _FIELDS)
        for key, row in expect.items()
    }


# Histories


def _replay(case: Case, sync_fields: Callable[[Service], object]) -> tuple[Store, set[ObjectName]]:
    """Replay a case's steps; return the Store, and the Services that the last `apply` updated.

    Upstream's flag of a Service says whether any differs from the last `apply`, and that of a slice
    whether this update changed something. The Store has the second one for both.
    """
    store = Store(case.get("nodeName") or "", sync_fields=sync_fields)
    follower, applied, updated = StoreFollower(store), dict[ObjectName, object](), set[ObjectName]()

    def present() -> dict[ObjectName, object]:
        return {name: sync_fields(each) for name, each in store.snapshot.services.items()}

    def pending() -> set[ObjectName]:
        now = present()
        return {name for name in {**applied, **now} if applied.get(name) != now.get(name)}

    for number, step in enumerate(case["steps"]):
        if step["op"] == "apply":
            updated = pending() | follower.take().endpoints
            applied = present()
            continue
        changed = _step(store, step, case["ipFamily"])
        if step["op"].endswith("Service"):
            changed = bool(pending())
        assert changed is step["changed"], f"step {number}: {step['op']} changed={changed}"
    return store, updated


def _step(store: Store, step: dict[str, Any], family: str) -> bool:
    kind: type[Service] | type[EndpointSlice] = (
        EndpointSlice if step["op"].endswith("EndpointSlice") else Service
    )
    obj = read(kind, step["object"])
    if isinstance(obj, EndpointSlice) and obj.address_type != family:
        return False  # one proxier per family there: slices go by addressType (behaviour 2)
    if step["op"].startswith("delete"):
        return store.delete(kind.__name__, obj.metadata.object_name)
    return store.upsert(obj)


# endpoints_tracker


def endpoints_tracker(case: Case) -> None:
    """A history of EndpointSlices against endpoints, changed flags and ready counts.

    `conntrackCleanupRequired` has no counterpart: stale entries follow from plans (behaviour 12).
    """
    store, updated = _replay(case, lambda service: service)
    expect, family = case["expect"], FAMILIES[case["ipFamily"]]
    node_name = case["nodeName"] or ""
    by_service = {
        name: build_endpoints(slices, family, node_name)
        for name, slices in store.snapshot.slices.items()
    }
    found: dict[str, tuple[EndpointState, ...]] = {}
    for name, ports in by_service.items():
        found |= _named(name.namespace, name.name, ports)
    assert found == {
        key: tuple(map(endpoint_state, rows)) for key, rows in expect["endpoints"].items()
    }
    assert set(map(str, updated)) == set(expect["updatedServices"] or ())
    counts = {str(name): local_ready_count(ports) for name, ports in by_service.items()}
    assert {k: n for k, n in counts.items() if n} == (expect["localReadyEndpoints"] or {})


def _named(
    namespace: str, service: str, ports: EndpointsByPort
) -> dict[str, tuple[EndpointState, ...]]:
    return {
        _key(ServicePortName(namespace, service, *port)): states
        for port, states in ports.items()
        if states
    }


# local_detectors


def local_detectors(case: Case) -> None:
    """Configuration of local detection against the match arguments of both families."""
    options = case["detectLocal"]
    if case["mode"] not in tuple(DetectLocalMode):  # refused before it gets here
        assert all(row["ifLocal"] is None for row in case["expect"].values())
        return
    config = NodeConfig(
        detect_local_mode=DetectLocalMode(case["mode"]),
        cluster_cidrs=tuple(options["ClusterCIDRs"] or ()),
        bridge_interface=options["BridgeInterface"],
        interface_name_prefix=options["InterfaceNamePrefix"],
    )
    node = read(Node, {"metadata": {"name": "n"}, "spec": {"podCIDRs": case["podCIDRs"]}})
    found, _ = detectors(config, node)
    for word, family in FAMILIES.items():
        assert _match(found[family], family) == {
            key: row
            for key, row in case["expect"][word].items()
            if key in ("ifLocal", "ifLocalNFT")
        }


def _match(detector: LocalDetector, family: Family) -> dict[str, list[str] | None]:
    """Spell a LocalDetector as iptables and nft match it."""
    saddr = "ip6" if family is Family.IPV6 else "ip"
    if detector.cidr:
        return {"ifLocal": ["-s", detector.cidr], "ifLocalNFT": [saddr, "saddr", detector.cidr]}
    if detector.interface:
        name = detector.interface
        return {"ifLocal": ["-i", name], "ifLocalNFT": ["iifname", name]}
    if detector.interface_prefix:
        prefix = detector.interface_prefix
        return {"ifLocal": ["-i", f"{prefix}+"], "ifLocalNFT": ["iifname", f"{prefix}*"]}
    return {"ifLocal": None, "ifLocalNFT": None}


SUITES: Mapping[str, Callable[[Case], None]] = {
    "topology_categorize": topology_categorize,
    "service_tracker": service_tracker,
    "endpoints_tracker": endpoints_tracker,
    "local_detectors": local_detectors,
    "packetflow": trace_flow_case,
}
"""By the `suite` name of a file."""
