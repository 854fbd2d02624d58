"""The messages of Kubernetes objects in protobuf: a row for each field that is read. No I/O.

Two things keep decoding cheap (`benchmarks/wire.py`):

- Half of the bytes are never looked at: managedFields, owners and uids of pods are skipped by their
  length, while a JSON decoder has to read them.
- Parts that repeat, such as the conditions of endpoints, have a memo: they are looked up by their
  bytes. Equal parts are then one object, which also takes less memory.

The `protobuf` package parses ten times as fast as msgspec reads JSON (2.3 ms for 5,000 slices
of three endpoints, 22.7 ms), but to read its messages from Python then takes 58 ms.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from steersman.model.kube import (
    Annotations,
    ClientIPConfig,
    EndpointConditions,
    EndpointHints,
    EndpointSlice,
    ForZone,
    Labels,
    LoadBalancerIngress,
    LoadBalancerStatus,
    Node,
    NodeAddress,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    ObjectReference,
    Selector,
    Service,
    ServiceCIDR,
    ServiceCIDRSpec,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
    SessionAffinityConfig,
    SliceEndpoint,
    SlicePort,
    Taint,
)
from steersman.source.protobuf import Entries, Field, Kind, ProtobufError, Table


class _Seconds(msgspec.Struct, frozen=True):
    seconds: int = 0


_SECONDS = Table(_Seconds, {1: Field("seconds", Kind.UINT64)})
_NO_TIME = -62135596800  # Go's zero time, in the year 1
_END_OF_TIME = 253402300800  # the year 10000, which RFC 3339 cannot name


def _time(data: bytes) -> str | None:
    """Decode a Time as JSON has it, in RFC 3339."""
    if not data:
        return None
    seconds = _SECONDS.decode(data).seconds
    if seconds >> 63:
        seconds -= 1 << 64
    if seconds == _NO_TIME:
        return None
    if not _NO_TIME < seconds < _END_OF_TIME:
        raise ProtobufError(f"{seconds} seconds is no time")
    moment = time.gmtime(seconds)
    return (
        f"{moment.tm_year:04}-{moment.tm_mon:02}-{moment.tm_mday:02}T"
        f"{moment.tm_hour:02}:{moment.tm_min:02}:{moment.tm_sec:02}Z"
    )


# Go leaves a number or a text that is not a pointer out of JSON if it is 0 or empty, but not out of
# protobuf: these are the rows of a Kind that ends in `_OR_NONE`.

_META = Table(
    ObjectMeta,
    {
        1: Field("name", Kind.TEXT),
        3: Field("namespace", Kind.TEXT),
        5: Field("uid", Kind.TEXT),
        6: Field("resource_version", Kind.TEXT),
        8: Field("creation_timestamp", _time, memo=True),
        9: Field("deletion_timestamp", _time),
        11: Field("labels", Entries(Labels)),
        12: Field("annotations", Entries(Annotations)),
    },
)
_SERVICE_PORT = Table(
    ServicePort,
    {
        1: Field("name", Kind.TEXT_OR_NONE),
        2: Field("protocol", Kind.TEXT_OR_NONE),
        3: Field("port", Kind.INT32),
        5: Field("node_port", Kind.INT32_OR_NONE),
    },
)
_CLIENT_IP = Table(ClientIPConfig, {1: Field("timeout_seconds", Kind.INT32)})
_AFFINITY = Table(SessionAffinityConfig, {1: Field("client_ip", _CLIENT_IP)})
_SERVICE_SPEC = Table(
    ServiceSpec,
    {
        1: Field("ports", _SERVICE_PORT, many=True, memo=True),
        2: Field("selector", Table(Selector, {})),
        3: Field("cluster_ip", Kind.TEXT_OR_NONE),
        4: Field("type", Kind.TEXT_OR_NONE),
        5: Field("external_ips", Kind.TEXT, many=True),
        7: Field("session_affinity", Kind.TEXT_OR_NONE),
        9: Field("load_balancer_source_ranges", Kind.TEXT, many=True),
        10: Field("external_name", Kind.TEXT_OR_NONE),
        11: Field("external_traffic_policy", Kind.TEXT_OR_NONE),
        12: Field("health_check_node_port", Kind.INT32_OR_NONE),
        14: Field("session_affinity_config", _AFFINITY, memo=True),
        18: Field("cluster_ips", Kind.TEXT, many=True),
        19: Field("ip_families", Kind.TEXT, many=True),
        22: Field("internal_traffic_policy", Kind.TEXT),
    },
)
_INGRESS = Table(
    LoadBalancerIngress,
    {
        1: Field("ip", Kind.TEXT_OR_NONE),
        2: Field("hostname", Kind.TEXT_OR_NONE),
        3: Field("ip_mode", Kind.TEXT),
    },
)
_LOAD_BALANCER = Table(LoadBalancerStatus, {1: Field("ingress", _INGRESS, many=True)})
_SERVICE_STATUS = Table(ServiceStatus, {1: Field("load_balancer", _LOAD_BALANCER)})
_SERVICE = Table(
    Service,
    {
        1: Field("metadata", _META),
        2: Field("spec", _SERVICE_SPEC),
        3: Field("status", _SERVICE_STATUS, memo=True),
    },
)
_CONDITIONS = Table(
    EndpointConditions,
    {
        1: Field("ready", Kind.BOOL),
        2: Field("serving", Kind.BOOL),
        3: Field("terminating", Kind.BOOL),
    },
)
_FOR_ZONE = Table(ForZone, {1: Field("name", Kind.TEXT)})
_HINTS = Table(
    EndpointHints,
    {1: Field("for_zones", _FOR_ZONE, many=True), 2: Field("for_nodes", _FOR_ZONE, many=True)},
)
_REFERENCE = Table(
    ObjectReference,
    {1: Field("kind", Kind.TEXT), 2: Field("namespace", Kind.TEXT), 3: Field("name", Kind.TEXT)},
)
_ENDPOINT = Table(
    SliceEndpoint,
    {
        1: Field("addresses", Kind.TEXT, many=True),
        2: Field("conditions", _CONDITIONS, memo=True),
        4: Field("target_ref", _REFERENCE),
        6: Field("node_name", Kind.TEXT),
        7: Field("zone", Kind.TEXT),
        8: Field("hints", _HINTS, memo=True),
    },
)
_SLICE_PORT = Table(
    SlicePort,
    {
        1: Field("name", Kind.TEXT),
        2: Field("protocol", Kind.TEXT),
        3: Field("port", Kind.INT32),
    },
)
_SLICE = Table(
    EndpointSlice,
    {
        1: Field("metadata", _META),
        2: Field("endpoints", _ENDPOINT, many=True),
        3: Field("ports", _SLICE_PORT, many=True, memo=True),
        4: Field("address_type", Kind.TEXT),
    },
)
_NODE_SPEC = Table(
    NodeSpec,
    {
        1: Field("pod_cidr", Kind.TEXT_OR_NONE),
        5: Field(
            "taints",
            Table(Taint, {1: Field("key", Kind.TEXT)}),
            many=True,
        ),
        7: Field("pod_cidrs", Kind.TEXT, many=True),
    },
)
_ADDRESS = Table(NodeAddress, {1: Field("type", Kind.TEXT), 2: Field("address", Kind.TEXT)})
_NODE = Table(
    Node,
    {
        1: Field("metadata", _META),
        2: Field("spec", _NODE_SPEC),
        3: Field("status", Table(NodeStatus, {5: Field("addresses", _ADDRESS, many=True)})),
    },
)
_SERVICE_CIDR = Table(
    ServiceCIDR,
    {
        1: Field("metadata", _META),
        2: Field("spec", Table(ServiceCIDRSpec, {1: Field("cidrs", Kind.TEXT, many=True)})),
    },
)

OBJECTS: Mapping[str, Table[Any]] = {
    "Service": _SERVICE,
    "EndpointSlice": _SLICE,
    "Node": _NODE,
    "ServiceCIDR": _SERVICE_CIDR,
}
"""Tables by kind."""
