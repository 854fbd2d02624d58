"""Keys and values of the BPF maps, and the keys of the mode's Ruleset. Pure.

The structs are those of c/structs.h; the loader compares the two before it loads. This is the only
module that knows where something is in a key or value. Addresses of both families take 16 bytes,
IPv4 as ::ffff:a.b.c.d; ports are in network order, all other numbers in that of the machine. An
endpoint is packed as address and port, 18 bytes.
"""

from __future__ import annotations

import enum
import ipaddress
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

from steersman.model.addresses import join_host_port
from steersman.model.hashes import blake2b
from steersman.model.names import Family, PlanKey
from steersman.model.plan import Action, Endpoint, Pool, Verdict

SIZES: dict[str, int] = {}
"""Size of each struct by its name in C."""
OFFSETS: dict[str, dict[str, int]] = {}
"""Offset of each field by struct and name in C."""


def _declare(name: str, fields: str, *, order: str = "=", **inside: int) -> struct.Struct:
    """Declare a struct of c/structs.h.

    Args:
        name: its name.
        fields: name and format of each, or the format of padding.
        order: of the bytes.
        inside: offsets of fields that the format of another one covers.
    """
    formats, offsets = order, dict[str, int]()
    for field in fields.split(", "):
        *names, code = field.split()
        offsets |= dict.fromkeys(names, struct.calcsize(formats))
        formats += code
    SIZES[name], OFFSETS[name] = struct.calcsize(formats), offsets | inside
    return struct.Struct(formats)


PRESENCE_BITS, PRESENCE_FACTOR = 16, 0x9E3779B1
L3_DEVICE_PLACES = 256

FRONTEND_KEY = _declare("frontend_key", "address 16s, port H, protocol B, 5x", order=">")
FRONTEND = _declare("frontend", "service I, actions H, flags B, x")
POOL = _declare("pool", "base I, count I")
SERVICE = _declare("service", "pools IIII, affinity_seconds I, zero I")
SLOT = _declare("slot", "address 18s, 6x", port=16)
NAME = _declare("service_name", "text 240s")
MEMBER_KEY = _declare("member_key", "service I, 4x, address 18s, 6x", port=24)
PREFIX = _declare("prefix", "length I, id I, address 16s")
DEVICE = _declare("device", "masquerade4 16s, masquerade6 16s, flags I, zero I")
CONFIG = _declare(
    "config",
    "host_cookie Q, node_ip4 16s, node_ip6 16s, flags I, first_port H, last_port H, "
    "pod_interface 16s, pod_prefix 16s, programs 16s",
)
FLOW_KEY = _declare(
    "flow_key",
    "source 16s, destination 16s, source_port 2s, destination_port 2s, protocol B, hook B, 2x",
)
FLOW = _declare("flow", "address 16s, last Q, port 2s, kind B, state B, service I")
TALLY = _declare("tally", "connections Q, packets_in Q, packets_out Q, bytes_in Q, bytes_out Q")
AFFINITY_KEY = _declare("affinity_key", "client 16s, service I, 4x")
AFFINITY = _declare("affinity", "address 16s, last Q, port 2s, 6x")
REVERSE_KEY = _declare("reverse_key", "cookie Q, endpoint 18s, 6x", port=24)
REVERSE = _declare("reverse", "frontend 18s, 6x", port=16)
PEER = _declare("peer", "endpoint 16s, frontend 16s, endpoint_port 2s, frontend_port 2s, 4x")
SOCKET_SLOT = _declare("socket_slot", "cookie Q, peer 16s16s2s2s, 12x")
WATCHING = _declare("watching", "until Q, answers Q, window Q, errors I, 4x")
HEALTH = _declare("health", "answered Q, window Q, events I, 4x")
ANSWER = _declare("answer", "endpoint 18s, 6x, time Q")
FAILURE = _declare("failure", "endpoint 16s, client 16s, time Q, port 2s, protocol B, kind B, 4x")
_declare("mark", "client B, served B")
_MARKS = SIZES["mark"] << PRESENCE_BITS
_declare("marks", f"trusted B, attached B, 6x, bare {L3_DEVICE_PLACES}s, places {_MARKS}s")

_OF_FAILURES = ("slot", "peer", "socket_slot", "watching", "health", "answer", "failure")
FAILURE_SIZES = {name: SIZES[name] for name in _OF_FAILURES}
"""Sizes of the structs in failures.bpf.c."""


class Kind(bytes, enum.Enum):
    """First byte of a Ruleset key: the kind of the object. The rest of the key follows it."""

    FRONTEND = b"F"  # frontend_key; value: actions, flags, name of the ServicePort
    SERVICE = b"S"  # name of the ServicePort; value: seconds, size of the cluster pool, endpoints
    RANGE = b"R"  # CIDR, name of the ServicePort; no value
    NODE_IP = b"N"  # an address that serves node ports; no value
    PREFIX = b"P"  # id and CIDR of the node; no value
    CONFIG = b"C"  # nothing; value: a config without cookie and programs
    MAGLEV = b"M"  # name of the ServicePort; value: table of its cluster pool (render.py)
    PROGRAMS = b"A"  # nothing; value: digest of the attached object


BYTE_ORDER: Literal["little", "big"] = sys.byteorder
"""Of this machine, and so of every number in the maps except addresses and ports."""
ADDRESS_SIZE = 16
ENDPOINT_SIZE = 18
_PORT_END = 19  # of port and protocol in a frontend_key
IPV4_PREFIX = bytes(10) + b"\xff\xff"
"""First bytes of an IPv4 address in 16 bytes."""
UNSPECIFIED: Mapping[Family, bytes] = {Family.IPV4: IPV4_PREFIX + bytes(4), Family.IPV6: bytes(16)}
"""Address in the frontend of a node port."""

# Numbers of c/constants.h.
FRONTEND_RANGES = 1
FRONTEND_CLUSTER_IP = 2
FRONTEND_MARKER = 4

CONFIG_DETECTOR_CIDR = 1
CONFIG_DETECTOR_DEVICE = 2
CONFIG_LOCALHOST_NODE_PORTS = 4
CONFIG_GUARD_NODE_PORTS = 8
CONFIG_FAST_PATH = 16

DEVICE_POD = 1
DEVICE_NO_ETHERNET = 2
DEVICE_XDP = 4
DEVICE_PEER = 8

PREFIXES_PODS = 0xFFFFFFFC
PREFIXES_SERVICE_CIDRS = 0xFFFFFFFF

ACTION_LOCAL = 4
ACTION_MASQUERADE = 8
VERDICTS: Mapping[Verdict, int] = {Verdict.FORWARD: 0, Verdict.DROP: 1, Verdict.REJECT: 2}

COUNTERS = (
    "socket_forwarded",
    "socket_rejected",
    "socket_dropped",
    "packet_forwarded",
    "packet_rejected",
    "packet_dropped",
    "dropped_by_ranges",
    "dropped_unassigned",
    "dropped_no_flow",
    "dropped_no_endpoint",
    "errors_translated",
    "bind_refused",
    "fragments",
    "flows_made",
    "flows_ended",
    "flows_expired",
    "dropped_loopback",
    "packet_accelerated",
    "packet_fast",
)
"""Events that the programs count, in the order of `enum counter`."""

# Values of the Ruleset: FrontendValue, ServiceValue, and a config without cookie and programs.
FRONTEND_VALUE = struct.Struct("=HB")
SERVICE_VALUE = struct.Struct("=II")
NODE_VALUE = struct.Struct("=16s16sI16s16s")
_HASH_SIZE = 8  # bytes, in names that are too long
_CIDR_SIZE = 1 + ADDRESS_SIZE
_PREFIX_NUMBER_SIZE = 4
# Bits of a trie's key before the address: its number.
_PREFIX_FIXED_BITS = 32
_FLOW_PROTOCOL_AT = OFFSETS["flow_key"]["protocol"]
_FLOW_KIND_AT, _FLOW_STATE_AT = OFFSETS["flow"]["kind"], OFFSETS["flow"]["state"]
# First bytes of an affinity's client that is a network namespace; its cookie follows.
_NETNS_CLIENT = b"\xff" * 8


class ServiceValue(NamedTuple):
    """The value of a ServicePort in the Ruleset."""

    seconds: int
    """Affinity timeout; 0 for none."""
    cluster: bytes
    """Packed endpoints of Pool.CLUSTER."""
    local: bytes
    """Packed endpoints of Pool.LOCAL."""

    @classmethod
    def unpack(cls, value: bytes) -> ServiceValue:
        """Take the value of a Kind.SERVICE apart."""
        seconds, count = SERVICE_VALUE.unpack_from(value)
        start, middle = SERVICE_VALUE.size, SERVICE_VALUE.size + count * ENDPOINT_SIZE
        return cls(seconds, value[start:middle], value[middle:])

    def pack(self) -> bytes:
        """Return the value of a Kind.SERVICE."""
        head = SERVICE_VALUE.pack(self.seconds, len(self.cluster) // ENDPOINT_SIZE)
        return head + self.cluster + self.local

    def endpoints(self) -> Iterator[bytes]:
        """Yield the packed endpoints of both pools."""
        return cut(self.cluster + self.local)


class FrontendValue(NamedTuple):
    """The value of a frontend in the Ruleset."""

    actions: int
    """Four bits for each SourceClass."""
    flags: int
    """FRONTEND_*."""
    service: bytes
    """Name of the ServicePort."""

    @classmethod
    def unpack(cls, value: bytes) -> FrontendValue:
        """Take the value of a Kind.FRONTEND apart."""
        actions, flags = FRONTEND_VALUE.unpack_from(value)
        return cls(actions, flags, value[FRONTEND_VALUE.size :])

    def pack(self) -> bytes:
        """Return the value of a Kind.FRONTEND."""
        return FRONTEND_VALUE.pack(self.actions, self.flags) + self.service


# Addresses, endpoints, numbers


def pack_address(address: str) -> bytes:
    """Pack a canonical address of either family into 16 bytes."""
    if ":" in address:
        return socket.inet_pton(socket.AF_INET6, address)
    return IPV4_PREFIX + socket.inet_aton(address)


def is_ipv4(packed: bytes) -> bool:
    """Whether 16 bytes (or a packed endpoint) are of IPv4."""
    return packed.startswith(IPV4_PREFIX)


def print_address(packed: bytes) -> str:
    """Print 16 bytes as a canonical address."""
    if is_ipv4(packed):
        return socket.inet_ntop(socket.AF_INET, packed[len(IPV4_PREFIX) :])
    return str(ipaddress.IPv6Address(packed))


def pack_endpoint(endpoint: Endpoint) -> bytes:
    """Pack address and port."""
    return pack_address(endpoint.ip) + endpoint.port.to_bytes(2, "big")


def split_endpoint(packed: bytes) -> tuple[bytes, int]:
    """Return the packed address and the port of an endpoint."""
    port = packed[ADDRESS_SIZE:ENDPOINT_SIZE]
    return packed[:ADDRESS_SIZE], int.from_bytes(port, "big")


def print_endpoint(packed: bytes) -> str:
    """Print a packed endpoint as address and port."""
    address, port = split_endpoint(packed)
    return join_host_port(print_address(address), port)


def without_prefix(packed: bytes) -> bytes:
    """Return an endpoint with the 4 bytes of an IPv4 address, as in model/conntrack.py."""
    return packed.removeprefix(IPV4_PREFIX)


def cut(endpoints: bytes) -> Iterator[bytes]:
    """Yield packed endpoints one by one."""
    return (endpoints[n : n + ENDPOINT_SIZE] for n in range(0, len(endpoints), ENDPOINT_SIZE))


def pack_cidr(cidr: str) -> bytes:
    """Pack a canonical CIDR: its length in a 16-byte address, then that address."""
    address, _, length = cidr.partition("/")
    return bytes((int(length) + (0 if ":" in address else 96),)) + pack_address(address)


def print_cidr(packed: bytes) -> str:
    """Print what `pack_cidr` packs."""
    address = print_address(packed[1:])
    return f"{address}/{packed[0] - (0 if ':' in address else 96)}"


def pack_action(action: Action) -> int:
    """Pack an Action into its four bits."""
    local = ACTION_LOCAL if action.pool is Pool.LOCAL else 0
    return VERDICTS[action.verdict] | local | (ACTION_MASQUERADE if action.masquerade else 0)


def number_key(number: int) -> bytes:
    """Return the key of an array, or of a hash by number."""
    return number.to_bytes(4, BYTE_ORDER)


def read_number(key: bytes) -> int:
    """Return the number of `number_key`."""
    return int.from_bytes(key, BYTE_ORDER)


# Keys of the Ruleset


def service_name(key: PlanKey) -> bytes:
    """Return the name of a ServicePort in the maps: `NAMESPACE/NAME:PORT PROTOCOL FAMILY`.

    Kubernetes allows shorter names only, but a manifest may hold any: then the name ends in a hash.
    """
    name = str(key.name).encode()
    end = f" {key.name.protocol} {key.family.kubernetes}".encode()
    room = NAME.size - len(end)
    if len(name) > room:
        short = name[: room - 2 * _HASH_SIZE - 1].decode(errors="ignore")
        name = f"{short}~{blake2b(name, digest_size=_HASH_SIZE).hexdigest()}".encode()
    return name + end


def kind_of(key: bytes) -> bytes:
    """Return the kind of an object, as bytes."""
    return key[:1]


def split_key(key: bytes) -> tuple[Kind, bytes]:
    """Return the kind of an object, and the rest of its key."""
    return Kind(key[:1]), key[1:]


ByKind: TypeAlias = defaultdict[bytes, list[tuple[bytes, bytes]]]
"""Keys without their kind, and values, by the kind as bytes."""


def by_kind(objects: Mapping[bytes, bytes]) -> ByKind:
    """Sort objects by kind, in one pass over all of them."""
    found: ByKind = defaultdict(list)
    for key, value in objects.items():
        found[key[:1]].append((key[1:], value))
    return found


def split_range(rest: bytes) -> tuple[bytes, bytes]:
    """Return the CIDR and the ServicePort of a Kind.RANGE, given its key without the kind."""
    return rest[:_CIDR_SIZE], rest[_CIDR_SIZE:]


def node_prefix(number: int, cidr: bytes) -> bytes:
    """Return the key of a Kind.PREFIX without the kind."""
    return number.to_bytes(_PREFIX_NUMBER_SIZE, "big") + cidr


def split_node_prefix(rest: bytes) -> tuple[int, bytes]:
    """Return the number and the CIDR of a Kind.PREFIX, given its key without the kind."""
    return int.from_bytes(rest[:_PREFIX_NUMBER_SIZE], "big"), rest[_PREFIX_NUMBER_SIZE:]


# Keys and values of the maps


def pack_prefix(number: int, cidr: bytes) -> bytes:
    """Return a key of the trie `prefixes`."""
    return PREFIX.pack(_PREFIX_FIXED_BITS + cidr[0], number, cidr[1:])


def unpack_prefix(key: bytes) -> tuple[int, bytes]:
    """Return the number and the CIDR of a key of the trie `prefixes`."""
    length, number, address = PREFIX.unpack(key)
    return number, bytes((length - _PREFIX_FIXED_BITS,)) + address


def address_of(key: bytes) -> bytes:
    """Return the address that a frontend_key or a key of `node_ips` starts with."""
    return key[:ADDRESS_SIZE]


def port_of(key: bytes) -> bytes:
    """Return port and protocol of a frontend_key, packed."""
    return key[ADDRESS_SIZE:_PORT_END]


def cut_ports(ports: bytes) -> Iterator[bytes]:
    """Yield what `port_of` has returned, from a list that is joined."""
    size = _PORT_END - ADDRESS_SIZE
    return (ports[n : n + size] for n in range(0, len(ports), size))


def unpack_name(value: bytes) -> bytes:
    """Return the name of a ServicePort in a value of `names`."""
    return value.rstrip(b"\0")


def flow_key(source: bytes, destination: bytes, protocol: int, hook: int) -> bytes:
    """Return the key of a flow between two packed endpoints."""
    ports = source[ADDRESS_SIZE:], destination[ADDRESS_SIZE:]
    addresses = source[:ADDRESS_SIZE], destination[:ADDRESS_SIZE]
    return FLOW_KEY.pack(*addresses, *ports, protocol, hook)


def flow_protocol(key: bytes) -> int:
    """Return the protocol of a flow_key."""
    return key[_FLOW_PROTOCOL_AT]


def flow_kind(value: bytes) -> int:
    """Return the kind of a flow."""
    return value[_FLOW_KIND_AT]


def flow_state(value: bytes) -> int:
    """Return the state of a flow."""
    return value[_FLOW_STATE_AT]


def netns_client(cookie: int) -> bytes:
    """Return the client of affinities that is a network namespace."""
    return _NETNS_CLIENT + cookie.to_bytes(8, BYTE_ORDER)


def netns_of_client(client: bytes) -> int | None:
    """Return the cookie of an affinity's client; None if the client is an address."""
    if not client.startswith(_NETNS_CLIENT):
        return None
    return int.from_bytes(client[len(_NETNS_CLIENT) :], BYTE_ORDER)
