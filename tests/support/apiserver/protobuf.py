"""Protobuf of the test API server: JSON values to messages and back, by a table of all fields.

The table is independent of the program's. As Go does, it writes a field marked `!` also if it is
absent, empty or 0: so messages have as many bytes as those of a real server.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tests.support.apiserver.world import KINDS, Object

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\0"
MALFORMED = b"\x0b"
"""The message of what should be an object in JSON, and is not: a field of an unused type."""

_SCHEMA = """
ObjectMeta: 1 name string! 2 generateName string! 3 namespace string! 4 selfLink string!
  5 uid string! 6 resourceVersion string! 7 generation int! 8 creationTimestamp Time!
  9 deletionTimestamp Time 10 deletionGracePeriodSeconds int 11 labels map 12 annotations map
  13 ownerReferences OwnerReference[] 14 finalizers string[] 17 managedFields ManagedFieldsEntry[]
OwnerReference: 1 kind string! 3 name string! 4 uid string! 5 apiVersion string! 6 controller bool
  7 blockOwnerDeletion bool
ManagedFieldsEntry: 1 manager string! 2 operation string! 3 apiVersion string! 4 time Time
  6 fieldsType string! 7 fieldsV1 FieldsV1 8 subresource string!
ListMeta: 1 selfLink string! 2 resourceVersion string! 3 continue string! 4 remainingItemCount int
Status: 1 metadata ListMeta! 2 status string! 3 message string! 4 reason string!
  5 details StatusDetails 6 code int!
StatusDetails: 1 name string! 2 group string! 3 kind string! 4 causes StatusCause[]
  5 retryAfterSeconds int! 6 uid string!
StatusCause: 1 reason string! 2 message string! 3 field string!
Service: 1 metadata ObjectMeta! 2 spec ServiceSpec! 3 status ServiceStatus!
ServiceSpec: 1 ports ServicePort[] 2 selector map 3 clusterIP string! 4 type string!
  5 externalIPs string[] 7 sessionAffinity string! 8 loadBalancerIP string!
  9 loadBalancerSourceRanges string[] 10 externalName string! 11 externalTrafficPolicy string!
  12 healthCheckNodePort int! 13 publishNotReadyAddresses bool!
  14 sessionAffinityConfig SessionAffinityConfig 17 ipFamilyPolicy string 18 clusterIPs string[]
  19 ipFamilies string[] 20 allocateLoadBalancerNodePorts bool 21 loadBalancerClass string
  22 internalTrafficPolicy string 23 trafficDistribution string
ServicePort: 1 name string! 2 protocol string! 3 port int! 4 targetPort IntOrString! 5 nodePort int!
  6 appProtocol string
SessionAffinityConfig: 1 clientIP ClientIPConfig
ClientIPConfig: 1 timeoutSeconds int
ServiceStatus: 1 loadBalancer LoadBalancerStatus! 2 conditions Condition[]
Condition: 1 type string! 2 status string! 3 observedGeneration int! 4 lastTransitionTime Time!
  5 reason string! 6 message string!
LoadBalancerStatus: 1 ingress LoadBalancerIngress[]
LoadBalancerIngress: 1 ip string! 2 hostname string! 3 ipMode string 4 ports PortStatus[]
PortStatus: 1 port int! 2 protocol string! 3 error string
EndpointSlice: 1 metadata ObjectMeta! 2 endpoints Endpoint[] 3 ports EndpointPort[]
  4 addressType string!
Endpoint: 1 addresses string[] 2 conditions EndpointConditions! 3 hostname string
  4 targetRef ObjectReference 6 nodeName string 7 zone string 8 hints EndpointHints
EndpointConditions: 1 ready bool 2 serving bool 3 terminating bool
EndpointHints: 1 forZones ForZone[] 2 forNodes ForZone[]
ForZone: 1 name string!
EndpointPort: 1 name string 2 protocol string 3 port int 4 appProtocol string
ObjectReference: 1 kind string! 2 namespace string! 3 name string! 4 uid string!
  5 apiVersion string! 6 resourceVersion string! 7 fieldPath string!
Node: 1 metadata ObjectMeta! 2 spec NodeSpec! 3 status NodeStatus!
NodeSpec: 1 podCIDR string! 2 externalID string! 3 providerID string! 4 unschedulable bool!
  5 taints Taint[] 7 podCIDRs string[]
Taint: 1 key string! 2 value string! 3 effect string! 4 timeAdded Time
NodeStatus: 3 phase string! 5 addresses NodeAddress[]
NodeAddress: 1 type string! 2 address string!
Pod: 1 metadata ObjectMeta!
ServiceCIDR: 1 metadata ObjectMeta! 2 spec ServiceCIDRSpec! 3 status ServiceCIDRStatus!
ServiceCIDRSpec: 1 cidrs string[]
ServiceCIDRStatus: 1 conditions Condition[]
Event: 1 metadata ObjectMeta! 2 eventTime Time! 4 reportingController string!
  5 reportingInstance string! 6 action string! 7 reason string! 8 regarding ObjectReference!
  10 note string! 11 type string!
"""


class _Field(NamedTuple):
    number: int
    name: str
    type: str
    many: bool
    always: bool


def _parsed(schema: str) -> dict[str, list[_Field]]:
    found = {}
    for text in re.split(r"\n(?! )", schema.strip()):
        name, _, fields = text.partition(":")
        found[name] = [
            _Field(int(number), field, type_, marks == "[]", marks == "!")
            for number, field, type_, marks in re.findall(r"(\d+) (\w+) (\w+)(\[\]|!|)", fields)
        ]
    return found


_FIELDS = _parsed(_SCHEMA)


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def encoded(type_: str, value: Any) -> bytes:  # noqa: PLR0912 - the types
    """A message of JSON's value."""
    match type_:
        case "string":
            return b"\xff" if isinstance(value, int | dict) else str(value or "").encode()
        case "Time":
            return _time(value)
        case "FieldsV1":
            return field(1, json.dumps(value, separators=(",", ":")).encode())
        case "IntOrString":
            text = value if isinstance(value, str) else ""
            number = value if isinstance(value, int) else 0
            return b"\x08" + varint(bool(text)) + b"\x10" + varint(number) + field(3, text.encode())
    if not isinstance(value, dict | None):
        return MALFORMED
    out = b""
    for each in _FIELDS[type_]:
        given = (value or {}).get(each.name)
        if each.many and not isinstance(given, list | None):
            out += field(each.number, MALFORMED)
        elif each.type == "map":
            for key, item in sorted((given or {}).items()):
                out += field(each.number, field(1, key.encode()) + field(2, item.encode()))
        elif each.many:
            out += b"".join(field(each.number, encoded(each.type, one)) for one in given or ())
        elif given is None and not each.always:
            continue
        elif each.type in ("int", "bool") and isinstance(given, int | None):
            out += varint(each.number << 3) + varint(int(given or 0))
        elif each.type in ("int", "bool"):
            out += field(each.number, MALFORMED)
        else:
            out += field(each.number, encoded(each.type, given))
    return out


def _time(text: str | None) -> bytes:
    if not text:
        return b""
    when = datetime.fromisoformat(text)
    return b"\x08" + varint(int(when.timestamp())) + b"\x10" + varint(when.microsecond * 1000)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def fields_of(data: bytes) -> list[tuple[int, Any]]:
    """The fields of a message, of varints and of bytes."""
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        value, at = _read_varint(data, at)
        if tag & 7 == 2:
            found.append((tag >> 3, data[at : at + value]))
            at += value
        else:
            found.append((tag >> 3, value))
    return found


def decoded(type_: str, data: bytes) -> Any:
    """JSON's value of a message, without fields that are empty."""
    match type_:
        case "string":
            return data.decode()
        case "Time":
            seconds, nanos = (*dict(fields_of(data)).values(), 0, 0)[:2]
            when = datetime.fromtimestamp(seconds, UTC).replace(microsecond=nanos // 1000)
            return when.isoformat().replace("+00:00", "Z") if data else None
        case "FieldsV1":
            return json.loads(fields_of(data)[0][1])
        case "IntOrString":
            kind, number, text = (value for _, value in fields_of(data))
            return text.decode() if kind else number
    known = {each.number: each for each in _FIELDS[type_]}
    value: Object = {}
    for number, item in fields_of(data):
        each = known[number]
        if each.type == "map":
            key, text = (part.decode() for _, part in fields_of(item))
            value.setdefault(each.name, {})[key] = text
        elif each.type in ("int", "bool"):
            value[each.name] = bool(item) if each.type == "bool" else item
        elif each.many:
            value.setdefault(each.name, []).append(decoded(each.type, item))
        else:
            value[each.name] = decoded(each.type, item)
    return value


def body(kind: str, api_version: str, message: bytes) -> bytes:
    type_meta = field(1, api_version.encode()) + field(2, kind.encode())
    # Unknown: typeMeta, raw, contentEncoding, contentType
    return MAGIC + field(1, type_meta) + field(2, message) + field(3, b"") + field(4, b"")


def message_of(data: bytes) -> bytes:
    """The message in a body."""
    assert data.startswith(MAGIC)
    return bytes(dict(fields_of(data[len(MAGIC) :]))[2])


def body_of(value: Object) -> bytes:
    """The body of an object, a list or a Status."""
    kind, api_version = value.get("kind", ""), value.get("apiVersion", "v1")
    item = kind.removesuffix("List")
    if kind.endswith("List") and item in KINDS:
        items = (field(2, encoded(item, each)) for each in value.get("items", ()))
        message = field(1, encoded("ListMeta", value["metadata"])) + b"".join(items)
    else:
        message = encoded(kind, value) if kind else b""
    return body(kind, api_version, message)


def frame_of(event: Object) -> bytes:
    """An event of a watch."""
    raw = field(1, body_of(event["object"]))
    message = field(1, event["type"].encode()) + field(2, raw)
    return len(message).to_bytes(4) + message
