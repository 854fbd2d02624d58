"""The messages of Kubernetes objects in protobuf: the number of each field that is read. No I/O.

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
from steersman.source.protobuf import ProtobufError, Table, table, texts


class _Seconds(msgspec.Struct, frozen=True):
    seconds: int = 0


_SECONDS = table(_Seconds, seconds=1)
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


# Parts come before what has them.

texts(Labels)
texts(Annotations)
table(ObjectMeta, reads={"creation_timestamp": _time, "deletion_timestamp": _time},
      memo="creation_timestamp", name=1, namespace=3, uid=5, resource_version=6,
      creation_timestamp=8, deletion_timestamp=9, labels=11, annotations=12)  # fmt: skip

table(ServicePort, name=1, protocol=2, port=3, node_port=5)
table(ClientIPConfig, pointers="timeout_seconds", timeout_seconds=1)
table(SessionAffinityConfig, client_ip=1)
table(Selector)
table(ServiceSpec, pointers="internal_traffic_policy", memo="ports session_affinity_config",
      ports=1, selector=2, cluster_ip=3, type=4, external_ips=5, session_affinity=7,
      load_balancer_source_ranges=9, external_name=10, external_traffic_policy=11,
      health_check_node_port=12, session_affinity_config=14, cluster_ips=18, ip_families=19,
      internal_traffic_policy=22)  # fmt: skip
table(LoadBalancerIngress, pointers="ip_mode", ip=1, hostname=2, ip_mode=3)
table(LoadBalancerStatus, ingress=1)
table(ServiceStatus, load_balancer=1)

table(EndpointConditions, ready=1, serving=2, terminating=3)
table(ForZone, name=1)
table(EndpointHints, for_zones=1, for_nodes=2)
table(ObjectReference, kind=1, namespace=2, name=3)
table(SliceEndpoint, pointers="node_name zone", memo="conditions hints", addresses=1, conditions=2,
      target_ref=4, node_name=6, zone=7, hints=8)  # fmt: skip
table(SlicePort, pointers="name protocol port", name=1, protocol=2, port=3)

table(Taint, key=1)
table(NodeSpec, pod_cidr=1, taints=5, pod_cidrs=7)
table(NodeAddress, type=1, address=2)
table(NodeStatus, addresses=5)

table(ServiceCIDRSpec, cidrs=1)

OBJECTS: Mapping[str, Table[Any]] = {
    "Service": table(Service, memo="status", metadata=1, spec=2, status=3),
    "EndpointSlice": table(
        EndpointSlice, memo="ports", metadata=1, endpoints=2, ports=3, address_type=4
    ),
    "Node": table(Node, metadata=1, spec=2, status=3),
    "ServiceCIDR": table(ServiceCIDR, metadata=1, spec=2),
}
"""Tables by kind."""
