"""Hypothesis strategies for worlds of Services, slices and nodes."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from steersman.model.failover import Backend, Ejection, Observation
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.kube import EndpointSlice, KubeObject, Node, Service
from steersman.model.names import ObjectName, Protocol
from steersman.source.store import Store
from tests.support.builders.objects import (
    CONFIG,
    FACTS,
    IPTABLES,
    NFTABLES,
    NODE,
    port,
    service,
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
    st.sampled_from(["Service", "EndpointSlice", "Node", "Ejection"]),
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
    if isinstance(event, tuple) and event[0] == "Ejection":
        # The first endpoint of the Service's slices, or none at the next time.
        service = ObjectName("shop", event[1])
        slices = store.snapshot.slices.get(service, ())
        ends = [
            (end.addresses[0], each.ports or ())
            for each in slices
            for end in each.endpoints or ()
            if end.addresses
        ]
        ejections = tuple(
            Ejection(Backend(ip, port.port, protocol), Observation.SILENT, 0, 10, 1)
            for ip, ports in ends[:1]
            for port in ports
            for protocol in Protocol
            if port.port and service not in store.snapshot.ejected
        )
        store.eject(service, ejections)
    elif isinstance(event, tuple):
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
