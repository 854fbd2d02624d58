"""The sets and maps of our tables, and how their keys and values are packed. Pure.

One literal table says all there is; skeleton.py prints it, render.py fills it, wire.py sends it.
Keys of the mode's Ruleset are bytes: the number of the set, the family, then netfilter's own key
(every field padded to four bytes). That is what the kernel wants to see, hashes fast, and costs a
third of what tuples would with 100,000 elements held.
"""

from __future__ import annotations

import enum
import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from socket import AF_INET, AF_INET6, inet_pton
from typing import NamedTuple

from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint

TABLE = "kube-proxy"
"""Upstream's name, where operators look (behaviour 9)."""


class Kind(enum.IntEnum):
    """What a key of the Ruleset names; below CHAIN the elements of the fixed sets."""

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
    CHAIN = 32  # of one ServicePort: name; value what its rules do
    AFFINITY = 33  # a map of one ServicePort that the data path fills: name; no value
    MEMBERS = 34  # the set of its endpoints: name; no value
    MEMBER = 35  # an element of that set: name, NUL, key; no value
    SKELETON = 36  # the foundation of one family; value its text
    RULES = 37  # the rules that follow the settings of one family; value their text
    REMEMBERED = 38  # a client that sticks to an endpoint that is gone: map, NUL, client; only read
    RELAY = 39  # a socket on loopback: protocol, port; value the Listener (render_localhost.py)


class Form(enum.Enum):
    """What a set holds beside its keys."""

    SET = enum.auto()
    VERDICTS = enum.auto()  # value: chain to go to (or DROP, REJECT), NUL, comment
    ENDPOINTS = enum.auto()  # value: address and port, and whether it is here (pack_endpoints)
    INTERVALS = enum.auto()  # value: the end of the interval that the key begins


class SetSpec(NamedTuple):
    """A set or map that exists all the time."""

    kind: Kind
    name: str
    fields: str
    """One letter per field of the key: a address, p protocol, t port, s slot."""
    form: Form
    counter: bool
    comment: str

    def key_size(self, family: Family) -> int:
        """Length of its keys, in bytes."""
        return sum(family.bits // 8 if field == "a" else 4 for field in self.fields)


def _spec(kind: Kind, fields: str, form: Form, comment: str, *, counter: bool = False) -> SetSpec:
    return SetSpec(kind, kind.name.lower().replace("_", "-"), fields, form, counter, comment)


SETS: Mapping[int, SetSpec] = {
    spec.kind: spec
    for spec in (
        _spec(Kind.CLUSTER_IPS, "a", Form.SET, "active ClusterIPs"),
        _spec(Kind.NODEPORT_IPS, "a", Form.SET, "IPs that accept NodePort traffic"),
        _spec(
            Kind.SERVICE_IPS,
            "apt",
            Form.VERDICTS,
            "ClusterIP, ExternalIP and LoadBalancer IP traffic",
            counter=True,
        ),
        _spec(Kind.SERVICE_NODEPORTS, "pt", Form.VERDICTS, "NodePort traffic", counter=True),
        _spec(Kind.SERVICE_ENDPOINTS, "apts", Form.ENDPOINTS, "endpoints by slot", counter=True),
        _spec(
            Kind.NODEPORT_ENDPOINTS, "pts", Form.ENDPOINTS, "endpoints of NodePorts", counter=True
        ),
        _spec(Kind.POD_SERVICE_IPS, "apt", Form.VERDICTS, "by source: local pods"),
        _spec(Kind.NODE_SERVICE_IPS, "apt", Form.VERDICTS, "by source: this node"),
        _spec(Kind.EXTERNAL_SERVICE_IPS, "apt", Form.VERDICTS, "by source: everyone else"),
        _spec(Kind.POD_NODEPORTS, "pt", Form.VERDICTS, "by source: local pods"),
        _spec(Kind.NODE_NODEPORTS, "pt", Form.VERDICTS, "by source: this node"),
        _spec(Kind.EXTERNAL_NODEPORTS, "pt", Form.VERDICTS, "by source: everyone else"),
        _spec(Kind.NO_ENDPOINT_SERVICES, "apt", Form.VERDICTS, "services that refuse or drop"),
        _spec(Kind.NO_ENDPOINT_NODEPORTS, "pt", Form.VERDICTS, "NodePorts that refuse or drop"),
        _spec(Kind.FIREWALL_IPS, "apt", Form.SET, "subject to LoadBalancerSourceRanges"),
        _spec(Kind.FIREWALL_ALLOWED, "apta", Form.INTERVALS, "LoadBalancerSourceRanges"),
        _spec(Kind.HAIRPIN_CONNECTIONS, "aapt", Form.SET, "endpoints that call themselves"),
        _spec(Kind.AFFINITY_IPS, "apt", Form.VERDICTS, "ClientIP affinity is learned here"),
        _spec(Kind.AFFINITY_NODEPORTS, "pt", Form.VERDICTS, "ClientIP affinity is learned here"),
    )
}
"""The fixed sets, by kind."""

PROTOCOLS = {protocol: bytes((protocol.number, 0, 0, 0)) for protocol in Protocol}
"""Protocols as fields of a key."""

SIZES = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""How many slots are drawn from; the smallest that holds all endpoints is taken (README)."""
LOCAL_SLOTS = 65536
"""First slot of the endpoints of Pool.LOCAL."""

_ADDRESS_FAMILIES = {Family.IPV4: int(AF_INET), Family.IPV6: int(AF_INET6)}
_PORT = struct.Struct(">H2x")
_SLOT = struct.Struct("=I")

FIRST_SLOTS = (_SLOT.pack(0), _SLOT.pack(LOCAL_SLOTS))
"""The first slots of Pool.CLUSTER and Pool.LOCAL, as fields of keys."""

DROP, REJECT = b"drop", b"continue"
"""Verdicts of `no-endpoint` maps: their rule goes on to reject. Unlike a goto, neither makes the
kernel walk through all chains and maps to look for loops, which takes 7 ms at 50,000 Services."""

CLUSTER_IP_SUFFIX = b" cluster IP"
"""End of the comments of clusterIPs: `cluster-ips` follows from these elements (derived.py)."""


def prefix(kind: Kind, family: Family) -> bytes:
    """Begin the keys of a set."""
    return bytes((kind, family))


def named(kind: Kind, family: Family, name: str) -> bytes:
    """Key of an object that has a name."""
    return prefix(kind, family) + name.encode()


def pack_address(address: str) -> bytes:
    """Address as a field of a key."""
    return inet_pton(AF_INET6 if ":" in address else AF_INET, address)


@lru_cache(maxsize=1024)
def pack_port(port: int) -> bytes:
    """Port as a field of a key."""
    return _PORT.pack(port)


@lru_cache(maxsize=1024)
def _pack_port_here(port: int) -> bytes:
    return _PORT.pack(port)[:-1] + b"\1"


def pack_endpoints(family: Family, endpoints: Iterable[Endpoint]) -> tuple[bytes, ...]:
    """Endpoints as the values of slots.

    The last byte says whether it runs on this node. That is padding behind the port, which the
    kernel keeps and gives back, but never looks at (nft_nat.c loads 16 bits): so what is there of
    an endpoint's locality is read back with it.
    """
    number = _ADDRESS_FAMILIES[family]
    return tuple(
        [
            inet_pton(number, end.ip)
            + (_pack_port_here(end.port) if end.local else pack_port(end.port))
            for end in endpoints
        ]
    )


def is_local(endpoint: bytes) -> bool:
    """Whether the endpoint of a slot runs on this node."""
    return endpoint[-1] != 0


def bare(endpoint: bytes) -> bytes:
    """Address and port of a slot's endpoint, wherever it runs: as packets have them."""
    return endpoint[:-1] + b"\0"


@cache
def _slot_keys(local: bool, size: int) -> tuple[bytes, ...]:
    first = LOCAL_SLOTS if local else 0
    return tuple(map(_SLOT.pack, range(first, first + size)))


@lru_cache(maxsize=1024)
def slot_keys(local: bool, count: int) -> tuple[bytes, ...]:
    """The slots that so many endpoints are drawn from, in the machine's byte order as from numgen.

    Args:
        local: whether of Pool.LOCAL.
        count: how many endpoints.
    """
    return _slot_keys(local, size_for(count))


def unpack_slot(key: bytes) -> int:
    """Slot in a key of an endpoint map."""
    slot: int = _SLOT.unpack_from(key, len(key) - 4)[0]
    return slot


@lru_cache(maxsize=1024)
def first_slot(slot: bytes) -> bytes:
    """The first slot of the pool that a slot is of; both as fields of keys."""
    return FIRST_SLOTS[unpack_slot(slot) >= LOCAL_SLOTS]


def size_for(count: int) -> int:
    """Number of slots to draw from for so many endpoints."""
    return SIZES[bisect_left(SIZES, count)]


@cache
def lb_chain(space: str, marking: str, local: bool, size: int) -> str:
    """Name of the fixed chain that draws an endpoint; all that it does is in its name.

    Args:
        space: "" for addresses, `np-` for node ports.
        marking: "" not masqueraded, `masquerade-` always, `cluster-` unless from a pod.
        local: whether from Pool.LOCAL.
        size: slots to draw from, of SIZES.
    """
    return f"{space}{marking}{'local-' if local else ''}lb-{size}"
