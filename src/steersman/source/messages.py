"""The messages of Kubernetes objects in protobuf: a row for each field that is read. No I/O.

This is Python beside a JSON decoder in C, and takes three times as long (`benchmarks/wire.py`). Two
things keep it from being ten times:

- Half of the bytes are never looked at: managedFields, owners and uids of pods are skipped by their
  length, while a JSON decoder has to read them.
- Endpoints repeat. Without its address and its pod, an endpoint is one of a few hundred (node,
  zone, conditions, hints), so these bytes are looked up in a dict of what they decoded to. The same
  goes for ports. Equal parts are then one object, which also takes less memory.

The `protobuf` package parses ten times as fast as msgspec reads JSON (2.3 ms for 5,000 slices
of three endpoints, 22.7 ms), but to read its messages from Python then takes 58 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from steersman.model.kube import (
    Annotations,
    ClientIPConfig,
    EndpointConditions,
    EndpointHints,
    EndpointSlice,
    ForZone,
    KubeObject,
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
from steersman.source.protobuf import (
    Field,
    Memo,
    ProtobufError,
    Table,
    encoded,
    map_entry,
    text,
    wrapped,
)

# -- Values ----------------------------------------------------------------------------------------


def text_or_none(data: bytes) -> str | None:
    """Decode a text of Go that JSON leaves out if it is empty."""
    return data.decode() or None


def int32(number: int) -> int:
    """Convert a varint to a signed number, which must fit into 32 bits."""
    if number >> 63:
        number -= 1 << 64
    if not -(1 << 31) <= number < 1 << 31:
        raise ProtobufError(f"{number} does not fit into 32 bits")
    return number


def _int32_or_none(number: int) -> int | None:
    return int32(number) or None


class _Seconds(msgspec.Struct, frozen=True):
    seconds: int = 0


_SECONDS = Table(_Seconds, {1: Field("seconds", int, 0)})
_NO_TIME = -62135596800  # Go's zero time, in the year 1
_END_OF_TIME = 253402300800  # the year 10000, which RFC 3339 cannot name


def _time(data: bytes) -> str | None:
    """Decode a Time as JSON has it, in RFC 3339."""
    if not data:
        return None
    seconds = _SECONDS(data).seconds
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


class _Named:
    """Decodes the entries of labels or annotations to a struct of those that are read."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self._struct = struct
        self._indices = {
            name.encode(): index for index, name in enumerate(struct.__struct_encode_fields__)
        }

    def entry(self, data: bytes) -> tuple[int, str] | None:
        """Return the index of the struct's field and the value; None if it is not read."""
        # The key comes first, so most entries need not be decoded.
        if data[0] == 0x0A and data[1] < 128:
            end = 2 + data[1]
            index = self._indices.get(data[2:end])
            if index is None:
                return None
            if data[end] == 0x12 and data[end + 1] == len(data) - end - 2 < 128:
                return index, data[end + 2 :].decode()
        key, value = map_entry(data)
        index = self._indices.get(key)
        return None if index is None else (index, value.decode())

    def struct(self, entries: Iterable[tuple[int, str] | None] | None) -> Any:
        """Return the struct of these entries; None if there are none."""
        if entries is None:
            return None
        values: list[str | None] = [None] * len(self._indices)
        for entry in entries:
            if entry is not None:
                values[entry[0]] = entry[1]
        return self._struct(*values)


_labels, _annotations = _Named(Labels), _Named(Annotations)


def _object_meta(  # noqa: PLR0917 - the struct's fields
    name: str,
    namespace: str,
    uid: str,
    version: str,
    labels: Iterable[tuple[int, str] | None] | None,
    annotations: Iterable[tuple[int, str] | None] | None,
    created: str | None,
    deleted: str | None,
) -> ObjectMeta:
    known, read = _labels.struct(labels), _annotations.struct(annotations)
    return ObjectMeta(name, namespace, uid, version, known, read, created, deleted)


# -- Messages --------------------------------------------------------------------------------------
#
# Go leaves a number or a text that is not a pointer out of JSON if it is 0 or empty, but not out of
# protobuf: these are the rows with `_or_none`.

_TEXT = Memo(text)
_META_TABLE = Table(
    ObjectMeta,
    {
        1: Field("name", text),
        3: Field("namespace", text),
        5: Field("uid", text),
        6: Field("resource_version", text),
        8: Field("creation_timestamp", Memo(_time)),
        9: Field("deletion_timestamp", _time),
        11: Field("labels", _labels.entry, many=True),
        12: Field("annotations", _annotations.entry, many=True),
    },
    _object_meta,
)
_META_TAGS = (0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x32)


def _metadata(data: bytes) -> ObjectMeta:
    """Decode metadata: its first six texts at once, which the API server always writes in order."""
    try:
        generated = 2 + data[1]
        space = generated + 2 + data[generated + 1]
        link = space + 2 + data[space + 1]
        uid = link + 2 + data[link + 1]
        version = uid + 2 + data[uid + 1]
        rest = version + 2 + data[version + 1]
        lengths = (
            data[1]
            | data[generated + 1]
            | data[space + 1]
            | data[link + 1]
            | data[uid + 1]
            | data[version + 1]
        )
        tags = data[0], data[generated], data[space], data[link], data[uid], data[version]
    except IndexError:
        return _META_TABLE(data)
    if tags != _META_TAGS or lengths > 127 or rest > len(data):
        return _META_TABLE(data)
    return _META_TABLE.decode(
        data,
        rest,
        [
            data[2:generated].decode(),
            _TEXT(data[space + 2 : link]),
            data[uid + 2 : version].decode(),
            data[version + 2 : rest].decode(),
            None,
            None,
            None,
            None,
        ],
    )


_SERVICE_PORT = Table(
    ServicePort,
    {
        1: Field("name", text_or_none),
        2: Field("protocol", text_or_none),
        3: Field("port", int32, 0),
        5: Field("node_port", _int32_or_none, 0),
    },
)
_CLIENT_IP = Table(ClientIPConfig, {1: Field("timeout_seconds", int32, 0)})
_AFFINITY = Table(SessionAffinityConfig, {1: Field("client_ip", _CLIENT_IP)})
_SELECTOR = Selector()
_SERVICE_SPEC = Table(
    ServiceSpec,
    {
        1: Field("ports", Memo(_SERVICE_PORT), many=True),
        2: Field("selector", lambda _: _SELECTOR),
        3: Field("cluster_ip", text_or_none),
        4: Field("type", Memo(text_or_none)),
        5: Field("external_ips", text, many=True),
        7: Field("session_affinity", Memo(text_or_none)),
        9: Field("load_balancer_source_ranges", text, many=True),
        10: Field("external_name", text_or_none),
        11: Field("external_traffic_policy", Memo(text_or_none)),
        12: Field("health_check_node_port", _int32_or_none, 0),
        14: Field("session_affinity_config", Memo(_AFFINITY)),
        18: Field("cluster_ips", text, many=True),
        19: Field("ip_families", Memo(text), many=True),
        22: Field("internal_traffic_policy", Memo(text)),
    },
)
_INGRESS = Table(
    LoadBalancerIngress,
    {
        1: Field("ip", text_or_none),
        2: Field("hostname", text_or_none),
        3: Field("ip_mode", text),
    },
)
_LOAD_BALANCER = Table(LoadBalancerStatus, {1: Field("ingress", _INGRESS, many=True)})
_SERVICE_STATUS = Table(ServiceStatus, {1: Field("load_balancer", _LOAD_BALANCER)})
_SERVICE = Table(
    Service,
    {
        1: Field("metadata", _metadata),
        2: Field("spec", _SERVICE_SPEC),
        3: Field("status", Memo(_SERVICE_STATUS)),
    },
)
_CONDITIONS = Table(
    EndpointConditions,
    {
        1: Field("ready", bool, 0),
        2: Field("serving", bool, 0),
        3: Field("terminating", bool, 0),
    },
)
_FOR_ZONE = Table(ForZone, {1: Field("name", text)})
_HINTS = Table(
    EndpointHints,
    {1: Field("for_zones", _FOR_ZONE, many=True), 2: Field("for_nodes", _FOR_ZONE, many=True)},
)
_REFERENCE = Table(
    ObjectReference,
    {1: Field("kind", text), 2: Field("namespace", text), 3: Field("name", text)},
)
_ENDPOINT = Table(
    SliceEndpoint,
    {
        1: Field("addresses", text, many=True),
        2: Field("conditions", Memo(_CONDITIONS)),
        4: Field("target_ref", _REFERENCE),
        6: Field("node_name", Memo(text)),
        7: Field("zone", Memo(text)),
        8: Field("hints", Memo(_HINTS)),
    },
)
_REST = Memo(_ENDPOINT)
_USUAL = (0x0A, 0x22, 0x0A, 0x12, 0x1A)  # tags of address, pod, kind, namespace and name


def _endpoint(data: bytes) -> SliceEndpoint:
    """Decode an endpoint: look up all of it but the address and the pod, see the module's text.

    The API server writes fields in order: address, conditions, hostname, pod, then the rest.
    Whatever looks different is decoded field by field. About 1.5 times as fast as that.
    """
    try:
        lengths = data[1]
        after = at = 2 + lengths
        if data[at] == 0x12:  # conditions
            lengths |= data[at + 1]
            at += 2 + data[at + 1]
        rest = data[after:at]
        if data[at] == 0x1A:  # the hostname
            lengths |= data[at + 1]
            at += 2 + data[at + 1]
        # The pod: kind, namespace and name are its first fields.
        length, start = data[at + 1], at + 2
        if length > 127:
            length, start = length & 127 | data[start] << 7, start + 1
            lengths |= data[start - 1]
        end = start + length
        space = start + 2 + data[start + 1]
        name = space + 2 + data[space + 1]
        stop = name + 2 + data[name + 1]
        lengths |= data[start + 1] | data[space + 1] | data[name + 1]
        tags = data[0], data[at], data[start], data[space], data[name]
    except IndexError:
        return _ENDPOINT(data)
    if tags != _USUAL or lengths > 127 or stop > end or end > len(data):
        return _ENDPOINT(data)
    known = _REST(rest + data[end:])
    if known.addresses is not None or known.target_ref is not None:  # fields in another order
        return _ENDPOINT(data)
    return SliceEndpoint(
        [data[2:after].decode()],
        known.conditions,
        known.node_name,
        known.zone,
        known.hints,
        ObjectReference(
            _TEXT(data[start + 2 : space]),
            _TEXT(data[space + 2 : name]),
            data[name + 2 : stop].decode(),
        ),
    )


_SLICE_PORT = Table(
    SlicePort,
    {
        1: Field("name", text),
        2: Field("protocol", text),
        3: Field("port", int32, 0),
    },
)
_SLICE = Table(
    EndpointSlice,
    {
        1: Field("metadata", _metadata),
        2: Field("endpoints", _endpoint, many=True),
        3: Field("ports", Memo(_SLICE_PORT), many=True),
        4: Field("address_type", _TEXT),
    },
)
_NODE_SPEC = Table(
    NodeSpec,
    {
        1: Field("pod_cidr", text_or_none),
        5: Field(
            "taints", Table(Taint, {1: Field("key", text), 3: Field("effect", text)}), many=True
        ),
        7: Field("pod_cidrs", text, many=True),
    },
)
_ADDRESS = Table(NodeAddress, {1: Field("type", text), 2: Field("address", text)})
_NODE = Table(
    Node,
    {
        1: Field("metadata", _metadata),
        2: Field("spec", _NODE_SPEC),
        3: Field("status", Table(NodeStatus, {5: Field("addresses", _ADDRESS, many=True)})),
    },
)
_SERVICE_CIDR = Table(
    ServiceCIDR,
    {
        1: Field("metadata", _metadata),
        2: Field("spec", Table(ServiceCIDRSpec, {1: Field("cidrs", text, many=True)})),
    },
)

OBJECTS: Mapping[str, Callable[[bytes], KubeObject]] = {
    "Service": _SERVICE,
    "EndpointSlice": _SLICE,
    "Node": _NODE,
    "ServiceCIDR": _SERVICE_CIDR,
}
"""Decoders by kind."""


# -- Events ----------------------------------------------------------------------------------------


def _micro_time(moment: str) -> bytes:
    """Encode a MicroTime that is in RFC 3339."""
    when = datetime.fromisoformat(moment)
    fields = {"seconds": (1, None), "nanos": (2, None)}
    return encoded({"seconds": int(when.timestamp()), "nanos": when.microsecond * 1000}, fields)


_EVENT: Mapping[str, tuple[int, Any]] = {
    "metadata": (1, {"name": (1, str.encode), "namespace": (3, str.encode)}),
    "eventTime": (2, _micro_time),
    "reportingController": (4, str.encode),
    "reportingInstance": (5, str.encode),
    "action": (6, str.encode),
    "reason": (7, str.encode),
    "regarding": (
        8,
        {
            "kind": (1, str.encode),
            "namespace": (2, str.encode),
            "name": (3, str.encode),
            "uid": (4, str.encode),
            "apiVersion": (5, str.encode),
        },
    ),
    "note": (10, str.encode),
    "type": (11, str.encode),
}


def encoded_event(event: Mapping[str, Any]) -> bytes:
    """Return the body that creates an events.k8s.io/v1 Event, given as JSON has it."""
    fields = {name: each for name, each in event.items() if name not in ("apiVersion", "kind")}
    return wrapped("events.k8s.io/v1", "Event", encoded(fields, _EVENT))
