"""Names, keys and values of the objects in our tables, byte by byte. Pure.

A key of the mode's Ruleset is bytes: the form that the kernel takes, fast to hash, and a third of
the size of tuples with 100,000 elements held.

    offset 0     1        2
           kind  family   fields of netfilter's own key, each padded to four bytes

    fields of service-endpoints     address (4 or 16)  protocol (1)  port (2)  slot (4)
    value of an endpoint's slot     address (4 or 16)  port (2)  0  local (1)
    key of a named object           its name; of a MEMBER: name of the set, NUL, address, port
    value in a verdict map          chain (or DROP, REJECT), NUL, comment

The literal table SETS declares the fixed sets: skeleton.py prints it, render.py fills it, wire.py
sends it. Only this module knows offsets within keys and values; the others use its accessors
(tests/test_architecture.py).
"""

from __future__ import annotations

import base64
import enum
import re
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from operator import itemgetter
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import NamedTuple

from steersman.model.hashes import sha256
from steersman.model.names import Family, PlanKey, Protocol
from steersman.model.plan import Endpoint

TABLE = "kube-proxy"
"""Upstream's name, where operators look (behaviour 9)."""


class Kind(enum.IntEnum):
    """Kinds of objects in the Ruleset; those below CHAIN are elements of the fixed sets."""

    CLUSTER_IPS = 1
    NODEPORT_IPS = 2
    SERVICE_IPS = 3
    SERVICE_NODEPORTS = 4
    SERVICE_ENDPOINTS = 5
    NODEPORT_ENDPOINTS = 6
    POD_SERVICE_IPS = 7
    NODE_SERVICE_IPS = 8
    EXTERNAL_SERVICE_IPS = 9
    POD_NODEPORTS = 10
    NODE_NODEPORTS = 11
    EXTERNAL_NODEPORTS = 12
    NO_ENDPOINT_SERVICES = 13
    NO_ENDPOINT_NODEPORTS = 14
    FIREWALL_IPS = 17
    FIREWALL_ALLOWED = 18
    HAIRPIN_CONNECTIONS = 19
    AFFINITY_IPS = 21
    AFFINITY_NODEPORTS = 22
    CHAIN = 32  # chain of a ServicePort: name; value: its rules in words (render.py)
    AFFINITY = 33  # map of a ServicePort that the data path fills: name; no value
    MEMBERS = 34  # set of a ServicePort's endpoints: name; no value
    MEMBER = 35  # element of that set: name, NUL, endpoint; no value
    SKELETON = 36  # foundation of one family; value: its text
    RULES = 37  # rules that depend on the settings of one family; value: their text
    STALE_AFFINITY = 38  # entry for an endpoint that is gone: map, NUL, client; only ever read
    LAZY = 40  # rules that only some elements need, with a base chain: name of the first chain
    RELAY = 39  # socket on loopback: protocol, port; value: its ListenerPlan (relay.py)


class Form(enum.Enum):
    """Form of a set: which values its keys have."""

    SET = enum.auto()  # value: comment
    VERDICTS = enum.auto()  # value: chain to go to (or DROP, REJECT), NUL, comment
    ENDPOINTS = enum.auto()  # value: address, port and locality (pack_endpoints)
    INTERVALS = enum.auto()  # value: end of the interval; the key is its beginning


class SetSpec(NamedTuple):
    """A set or map that exists all the time."""

    kind: Kind
    fields: str
    """One letter per field of the key: a address, p protocol, t port, s slot."""
    form: Form
    comment: str
    counter: bool = False
    """True if its elements count packets: of each connection, the first."""

    @property
    def name(self) -> str:
        """Return its name in the kernel."""
        return self.kind.name.lower().replace("_", "-")

    def key_size(self, family: Family) -> int:
        """Return the length of its keys in the kernel, in bytes."""
        return sum(family.bits // 8 if field == "a" else 4 for field in self.fields)


_SERVICE_IPS = "ClusterIP, ExternalIP and LoadBalancer IP traffic"
SETS: Mapping[int, SetSpec] = {
    spec.kind: spec
    for spec in (
        # Addresses: clusterIPs in use (derived.py), and those that serve node ports.
        SetSpec(Kind.CLUSTER_IPS, "a", Form.SET, "active ClusterIPs"),
        SetSpec(Kind.NODEPORT_IPS, "a", Form.SET, "IPs that accept NodePort traffic"),
        # New connections start here: the chain for a destination, then one of its slots.
        SetSpec(Kind.SERVICE_IPS, "apt", Form.VERDICTS, _SERVICE_IPS, True),
        SetSpec(Kind.SERVICE_NODEPORTS, "pt", Form.VERDICTS, "NodePort traffic", True),
        SetSpec(Kind.SERVICE_ENDPOINTS, "apts", Form.ENDPOINTS, "endpoints by slot", True),
        SetSpec(Kind.NODEPORT_ENDPOINTS, "pts", Form.ENDPOINTS, "endpoints of NodePorts", True),
        # The chain for a class of sources, if they differ.
        SetSpec(Kind.POD_SERVICE_IPS, "apt", Form.VERDICTS, "by source: local pods"),
        SetSpec(Kind.NODE_SERVICE_IPS, "apt", Form.VERDICTS, "by source: this node"),
        SetSpec(Kind.EXTERNAL_SERVICE_IPS, "apt", Form.VERDICTS, "by source: everyone else"),
        SetSpec(Kind.POD_NODEPORTS, "pt", Form.VERDICTS, "by source: local pods"),
        SetSpec(Kind.NODE_NODEPORTS, "pt", Form.VERDICTS, "by source: this node"),
        SetSpec(Kind.EXTERNAL_NODEPORTS, "pt", Form.VERDICTS, "by source: everyone else"),
        # Destinations that the filter chains drop or reject, or check the source of.
        SetSpec(Kind.NO_ENDPOINT_SERVICES, "apt", Form.VERDICTS, "services that refuse or drop"),
        SetSpec(Kind.NO_ENDPOINT_NODEPORTS, "pt", Form.VERDICTS, "NodePorts that refuse or drop"),
        SetSpec(Kind.FIREWALL_IPS, "apt", Form.SET, "subject to LoadBalancerSourceRanges"),
        SetSpec(Kind.FIREWALL_ALLOWED, "apta", Form.INTERVALS, "LoadBalancerSourceRanges"),
        # After DNAT: connections to masquerade, and to learn affinity from.
        SetSpec(Kind.HAIRPIN_CONNECTIONS, "aapt", Form.SET, "endpoints that call themselves"),
        SetSpec(Kind.AFFINITY_IPS, "apt", Form.VERDICTS, "ClientIP affinity is learned here"),
        SetSpec(Kind.AFFINITY_NODEPORTS, "pt", Form.VERDICTS, "ClientIP affinity is learned here"),
    )
}
"""The fixed sets, by kind."""


class MapGroup(NamedTuple):
    """The maps for frontends on addresses, or for those on node ports."""

    name: str
    """"" or `np-`, as in the names of chains."""
    dispatch: Kind
    endpoints: Kind
    refused: Kind
    affinity: Kind
    by_source: tuple[Kind, Kind, Kind]
    """Of pods, this node, everyone else."""


MAP_GROUPS = (
    MapGroup(
        "",
        Kind.SERVICE_IPS,
        Kind.SERVICE_ENDPOINTS,
        Kind.NO_ENDPOINT_SERVICES,
        Kind.AFFINITY_IPS,
        (Kind.POD_SERVICE_IPS, Kind.NODE_SERVICE_IPS, Kind.EXTERNAL_SERVICE_IPS),
    ),
    MapGroup(
        "np-",
        Kind.SERVICE_NODEPORTS,
        Kind.NODEPORT_ENDPOINTS,
        Kind.NO_ENDPOINT_NODEPORTS,
        Kind.AFFINITY_NODEPORTS,
        (Kind.POD_NODEPORTS, Kind.NODE_NODEPORTS, Kind.EXTERNAL_NODEPORTS),
    ),
)
FRONTEND_KINDS = tuple([int(group.dispatch) for group in MAP_GROUPS])
ENDPOINT_KINDS = tuple([int(group.endpoints) for group in MAP_GROUPS])
"""As plain numbers: comparing with a member of an enum takes three times as long (Python 3.11)."""

PROTOCOLS = {protocol: bytes((protocol.number, 0, 0, 0)) for protocol in Protocol}
"""Protocols as fields of a key."""
_PROTOCOL_NAMES = {protocol.number: protocol.lower() for protocol in Protocol}

SIZES = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""Numbers of slots that a chain can choose from; it has the smallest that holds all endpoints."""
LOCAL_SLOTS = 65536
"""First slot of the endpoints of Pool.LOCAL."""

_ADDRESS_FAMILIES = {Family.IPV4: int(AF_INET), Family.IPV6: int(AF_INET6)}
_PORT = struct.Struct(">H2x")
_SLOT = struct.Struct("=I")  # the machine's byte order, as from `numgen`

FIRST_SLOTS = (_SLOT.pack(0), _SLOT.pack(LOCAL_SLOTS))
"""First slots of Pool.CLUSTER and Pool.LOCAL, as fields of keys."""

DROP, REJECT = b"drop", b"continue"
"""Verdicts of `no-endpoint` maps: their rule goes on to reject. Unlike a goto, neither makes the
kernel walk through all chains and maps to look for loops, which takes 7 ms at 50,000 Services."""

CLUSTER_IP_SUFFIX = b" cluster IP"
"""End of the comments of clusterIPs: elements of `cluster-ips` are derived from these."""


# Keys


kind_of: Callable[[bytes], int] = itemgetter(0)
"""Return the kind of a key, as a plain number."""
prefix_of: Callable[[bytes], bytes] = itemgetter(slice(2))
"""Return kind and family: the prefix that all keys of one set share."""
fields_of: Callable[[bytes], bytes] = itemgetter(slice(2, None))
"""Return netfilter's own key, or an object's name: all that is behind kind and family."""
family_number: Callable[[bytes], int] = itemgetter(1)
"""Return the family of a key as a plain number (equal to its Family)."""


def key_behind(start: bytes) -> Callable[[bytes], bytes]:
    """Return a function from a key to netfilter's own key, behind `start`."""
    return itemgetter(slice(len(start), None))


def family_of(key: bytes) -> Family:
    """Return the family of the table that has the object of a key."""
    return Family(key[1])


@cache
def prefix(kind: int, family: int) -> bytes:
    """Return the first two bytes of the keys of a kind."""
    return bytes((kind, family))


def named(kind: Kind, family: Family, name: str) -> bytes:
    """Return the key of an object that has a name."""
    return prefix(kind, family) + name.encode()


def name_of(key: bytes) -> str:
    """Return the name in the key of a named object; of an element, that of its set."""
    return key[2:].partition(b"\0")[0].decode()


_ELEMENT_KINDS = {Kind.MEMBERS: Kind.MEMBER, Kind.AFFINITY: Kind.STALE_AFFINITY}
_SET_KINDS = {element: bytes((kind,)) for kind, element in _ELEMENT_KINDS.items()}


def element_key(set_key: bytes, own: bytes = b"") -> bytes:
    """Return the key of an element of a ServicePort's set: that of the set, then netfilter's."""
    return bytes((_ELEMENT_KINDS[Kind(set_key[0])],)) + set_key[1:] + b"\0" + own


def split_element(key: bytes) -> tuple[bytes, bytes]:
    """Split the key of an element of a ServicePort's set, as `element_key` joins it."""
    name, _, own = key[1:].partition(b"\0")
    return _SET_KINDS[Kind(key[0])] + name, own


def printed_fields(key: bytes) -> list[str]:
    """Return the fields of the key of a fixed set's element, as nft prints them."""
    fields, at, width = [], 2, Family(key[1]).bits // 8
    for field in SETS[key[0]].fields:
        size = width if field == "a" else 4
        word = key[at : at + size]
        at += size
        match field:
            case "a":
                fields.append(unpack_address(word))
            case "p":
                fields.append(_PROTOCOL_NAMES[word[0]])
            case "t":
                fields.append(str(int.from_bytes(word[:2], "big")))
            case _:
                fields.append(str(unpack_slot(word)))
    return fields


def pack_address(address: str) -> bytes:
    """Return an address as a field of a key."""
    return inet_pton(AF_INET6 if ":" in address else AF_INET, address)


def unpack_address(data: bytes) -> str:
    """Return a field of a key as an address."""
    return inet_ntop(AF_INET if len(data) == 4 else AF_INET6, data)


@lru_cache(maxsize=1024)
def pack_port(port: int) -> bytes:
    """Return a port as a field of a key."""
    return _PORT.pack(port)


def unpack_slot(key: bytes) -> int:
    """Return the slot at the end of an endpoint map's key."""
    slot: int = _SLOT.unpack_from(key, len(key) - 4)[0]
    return slot


@cache
def _slots_of_size(local: bool, size: int) -> tuple[bytes, ...]:
    first = LOCAL_SLOTS if local else 0
    return tuple(map(_SLOT.pack, range(first, first + size)))


@lru_cache(maxsize=1024)
def slot_keys(local: bool, count: int) -> tuple[bytes, ...]:
    """Return the slots that a number of endpoints is chosen from, as fields of keys.

    Args:
        local: True for Pool.LOCAL.
        count: number of endpoints; there may be more slots.
    """
    return _slots_of_size(local, size_for(count))


def pool_key(key: bytes) -> bytes:
    """Return the key of the first slot of a pool, given the key of any of its slots."""
    return key[:-4] + FIRST_SLOTS[unpack_slot(key) >= LOCAL_SLOTS]


def is_first_slot(key: bytes) -> bool:
    """Return whether a key is that of a pool's first slot."""
    return key[0] in ENDPOINT_KINDS and key[-4:] in FIRST_SLOTS


def size_for(count: int) -> int:
    """Return the number of slots that so many endpoints are chosen from."""
    return SIZES[bisect_left(SIZES, count)]


# Values


def pack_endpoints(family: Family, endpoints: Iterable[Endpoint]) -> tuple[bytes, ...]:
    """Return endpoints as the values of slots.

    The last byte is 1 for an endpoint on this node. That is padding behind the port, which the
    kernel keeps and gives back but never looks at (nft_nat.c loads 16 bits), so a restart reads
    the locality back with the endpoint.
    """
    number = _ADDRESS_FAMILIES[family]
    return tuple(
        [
            inet_pton(number, end.ip)
            + (pack_port(end.port)[:-1] + b"\1" if end.local else pack_port(end.port))
            for end in endpoints
        ]
    )


def unpack_endpoint(endpoint: bytes) -> tuple[str, int]:
    """Return address and port of a slot's value or a set's member."""
    return unpack_address(endpoint[:-4]), int.from_bytes(endpoint[-4:-2], "big")


is_local: Callable[[bytes], int] = itemgetter(-1)
"""Return whether the endpoint of a slot runs on this node."""


def without_locality(endpoint: bytes) -> bytes:
    """Return address and port of a slot's endpoint as packets have them."""
    return endpoint[:-1] + b"\0"


def interval_end(key: bytes, address: bytes) -> bytes:
    """Return the last key of an interval, given its first key and its value."""
    return key[: -len(address)] + address


def hairpin_key(key: bytes, endpoint: bytes) -> bytes:
    """Return the key in `hairpin-connections` of a slot's endpoint that calls itself."""
    address, protocol, port = endpoint[:-4], key[-12:-8], without_locality(endpoint)[-4:]
    return prefix(Kind.HAIRPIN_CONNECTIONS, key[1]) + address * 2 + protocol + port


def cluster_ip_key(key: bytes) -> bytes:
    """Return the key in `cluster-ips` of a frontend's address."""
    return prefix(Kind.CLUSTER_IPS, key[1]) + key[2:-8]


# Identities of counters


_FRONTEND_OF = {group.endpoints: group.dispatch for group in MAP_GROUPS}
_FRONTEND_OF[Kind.RELAY] = Kind.SERVICE_NODEPORTS


def counted_key(key: bytes, value: bytes) -> bytes:
    """Return the identity of an element's counter, which a replacement does not change.

    For an endpoint: the pool and the endpoint, as slots change hands and endpoints can move to
    this node. For all others: the key.
    """
    return pool_key(key) + without_locality(value) if key[0] in ENDPOINT_KINDS else key


def split_counted_key(counted: bytes) -> tuple[bytes, bytes]:
    """Split a counter's identity into the key of the frontend, or set of members, and endpoint.

    The endpoint of a frontend's own counter is b"".
    """
    kind, family = counted[0], counted[1]
    if kind == Kind.MEMBER:
        return split_element(counted)
    if kind not in _FRONTEND_OF:
        return counted, b""
    size = Family(family).bits // 8 + 4
    return prefix(_FRONTEND_OF[Kind(kind)], family) + counted[2 : -size - 4], counted[-size:]


# Names of chains and sets


@cache
def lb_chain(group: str, marking: str, local: bool, size: int) -> str:
    """Return the name of the fixed chain that chooses an endpoint; the name says all it does.

    Args:
        group: "" for addresses, `np-` for node ports.
        marking: "" not masqueraded, `masquerade-` always, `cluster-` unless from a pod.
        local: True to choose from Pool.LOCAL.
        size: slots to choose from, one of SIZES.
    """
    return f"{group}{marking}{'local-' if local else ''}lb-{size}"


def without_size(verdict: bytes) -> bytes:
    """Return what the name of a chain in a verdict says, but for the number of slots."""
    chain = verdict.partition(b"\0")[0]
    return chain.rpartition(b"-")[0] if b"lb-" in chain else chain


_NAME_LIMIT = 200  # the kernel takes 255 bytes, prefixes included
_UNUSUAL = re.compile(r"[^\w./-]", re.ASCII)
LEARN_CHAIN = "affinity-learn"
"""Chain that finds a connection's ServicePort, and prefix of the chains that learn for one."""


POOLS = {False: "cluster", True: "local"}
"""Words for the pools in the values of chains; True for Pool.LOCAL."""


def base_name(key: PlanKey) -> str:
    """Return upstream's name of a ServicePort in chain names (behaviour 9).

    Kubernetes allows up to 63 letters, digits, `-` and `.` in names; a manifest may hold anything.
    Only names of ServicePorts have a slash.
    """
    name = key.name
    full = f"{name.namespace}/{name.service}/{name.protocol.lower()}/{name.port}"
    digest = base64.b32encode(sha256(full.encode(errors="replace")).digest()[:5]).decode()
    whole = f"{digest}-{_UNUSUAL.sub('_', full)}"
    return whole if len(whole) <= _NAME_LIMIT else whole[: _NAME_LIMIT - 4] + "/..."


def own_set_name(kind: Kind, base: str, local: bool) -> str:
    """Return the name of a ServicePort's map from clients to endpoints, or set of endpoints.

    Args:
        kind: AFFINITY or MEMBERS.
        base: base name of the ServicePort.
        local: True for Pool.LOCAL.
    """
    return f"{kind.name.lower()}-{'local-' if local else ''}{base}"


def own_set_kind(name: str) -> Kind | None:
    """Return the kind of a ServicePort's map or set, by its name; None for all others."""
    kind = {"affinity": Kind.AFFINITY, "members": Kind.MEMBERS}.get(name.partition("-")[0])
    return kind if "/" in name else None


def other_set(key: bytes) -> bytes:
    """Return the key of the set of endpoints that may be in a map, or the other way round."""
    kind = Kind.MEMBERS if key[0] == Kind.AFFINITY else Kind.AFFINITY
    return named(kind, family_of(key), f"{kind.name.lower()}-{name_of(key).partition('-')[2]}")


def base_name_of(chain: str) -> str:
    """Return the ServicePort's base name in the name of one of its chains."""
    learns = chain.startswith(f"{LEARN_CHAIN}-")
    return chain.partition(f"{LEARN_CHAIN}-" if learns else "affinity-")[2]
