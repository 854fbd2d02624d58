"""Keys and values of the BPF maps, and the keys of the mode's Ruleset. Pure.

The structs are those of c/structs.h; the loader compares the two before it loads (object.py).
Addresses of both families take 16 bytes, IPv4 as ::ffff:a.b.c.d; ports are in network order.
"""

from __future__ import annotations

import enum
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

from steersman.model.names import Family, PlanKey
from steersman.model.plan import Action, Endpoint, Pool, Verdict

FRONTEND_KEY = struct.Struct(">16sHB5x")
FRONTEND = struct.Struct("=IHBx")
POOL = struct.Struct("=II")
SERVICE = struct.Struct("=IIIIII")
SLOT = struct.Struct("=18s6x")
NAME = struct.Struct("=240s")
MEMBER_KEY = struct.Struct("=I4x18s6x")
PREFIX = struct.Struct("=II16s")
DEVICE = struct.Struct("=16s16sII")
CONFIG = struct.Struct("=Q16s16sIHH16s16s16s")
FLOW_KEY = struct.Struct("=16s16s4sBB2x")
FLOW = struct.Struct("=16sQ2sBBI")
TALLY = struct.Struct("=QQQQQ")
AFFINITY_KEY = struct.Struct("=16sI4x")
REVERSE_KEY = struct.Struct("=Q18s6x")
REVERSE = struct.Struct("=18s6x")
AFFINITY = struct.Struct("=16sQ2s6x")
PEER = struct.Struct("=16s16s2s2s4x")
SEAT = struct.Struct("=Q16s16s2s2s12x")
MARK_BITS, MARK_FACTOR = 16, 0x9E3779B1
BARE_PLACES = 256

SIZES: Mapping[str, int] = {
    "frontend_key": FRONTEND_KEY.size,
    "frontend": FRONTEND.size,
    "pool": POOL.size,
    "service": SERVICE.size,
    "slot": SLOT.size,
    "service_name": NAME.size,
    "member_key": MEMBER_KEY.size,
    "prefix": PREFIX.size,
    "device": DEVICE.size,
    "config": CONFIG.size,
    "flow_key": FLOW_KEY.size,
    "flow": FLOW.size,
    "reverse_key": REVERSE_KEY.size,
    "reverse": REVERSE.size,
    "tally": TALLY.size,
    "affinity_key": AFFINITY_KEY.size,
    "affinity": AFFINITY.size,
    "peer": PEER.size,
    "seat": SEAT.size,
    "mark": 4,
    "marks": 8 + BARE_PLACES + (4 << MARK_BITS),
}
"""Size of each struct by its name in C."""
OFFSETS: Mapping[str, Mapping[str, int]] = {
    "frontend_key": {"address": 0, "port": 16, "protocol": 18},
    "frontend": {"service": 0, "actions": 4, "flags": 6},
    "pool": {"base": 0, "count": 4},
    "service": {"pools": 0, "affinity_seconds": 16},
    "slot": {"address": 0, "port": 16},
    "member_key": {"service": 0, "address": 8, "port": 24},
    "prefix": {"length": 0, "id": 4, "address": 8},
    "device": {"masquerade4": 0, "masquerade6": 16, "flags": 32},
    "config": {
        "host_cookie": 0,
        "node_ip4": 8,
        "node_ip6": 24,
        "flags": 40,
        "first_port": 44,
        "last_port": 46,
        "pod_interface": 48,
        "pod_prefix": 64,
        "programs": 80,
    },
    "flow_key": {
        "source": 0,
        "destination": 16,
        "source_port": 32,
        "destination_port": 34,
        "protocol": 36,
        "hook": 37,
    },
    "flow": {"address": 0, "last": 16, "port": 24, "kind": 26, "state": 27, "service": 28},
    "reverse_key": {"cookie": 0, "endpoint": 8, "port": 24},
    "reverse": {"frontend": 0, "port": 16},
    "tally": {
        "connections": 0,
        "packets_in": 8,
        "packets_out": 16,
        "bytes_in": 24,
        "bytes_out": 32,
    },
    "affinity_key": {"client": 0, "service": 16},
    "affinity": {"address": 0, "last": 16, "port": 24},
    "peer": {"endpoint": 0, "frontend": 16, "endpoint_port": 32, "frontend_port": 34},
    "seat": {"cookie": 0, "peer": 8},
    "mark": {"served": 2},
    "marks": {"trusted": 0, "filling": 1, "attached": 2, "bare": 8, "places": 8 + BARE_PLACES},
}
"""Where the fields are that we read or write."""


class Kind(bytes, enum.Enum):
    """First byte of a key of the Ruleset: what it names, and what follows in the key."""

    FRONTEND = b"F"  # frontend_key; value: actions, flags, name of the ServicePort
    SERVICE = b"S"  # name of the ServicePort; value: seconds, size of the cluster pool, endpoints
    RANGE = b"R"  # prefix, name of the ServicePort; no value
    NODE_IP = b"N"  # an address that serves node ports; no value
    PREFIX = b"P"  # id and prefix of the node; no value
    CONFIG = b"C"  # nothing; value: a config without cookie and programs
    MAGLEV = b"M"  # name of the ServicePort; value: table of its cluster pool (maglev.py)
    PROGRAMS = b"A"  # nothing; value: digest of the attached object


BYTE_ORDER: Literal["little", "big"] = sys.byteorder
"""Of this machine, and so of every number in the maps but for addresses and ports."""
UNSPECIFIED: Mapping[Family, bytes] = {
    Family.IPV4: bytes(10) + b"\xff\xff" + bytes(4),
    Family.IPV6: bytes(16),
}
"""Address of a node port's frontend."""

FRONTEND_RANGES = 1
FRONTEND_CLUSTER_IP = 2
FRONTEND_MARKER = 4

CONFIG_DETECTOR_CIDR = 1
CONFIG_DETECTOR_DEVICE = 2
CONFIG_LOCALHOST_NODE_PORTS = 4
CONFIG_GUARD_NODE_PORTS = 8

DEVICE_POD = 1
DEVICE_NO_ETHERNET = 2
DEVICE_XDP = 4

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
)
"""What the programs count, in the order of `enum counter`."""

FRONTEND_VALUE = struct.Struct("=HB")
SERVICE_VALUE = struct.Struct("=II")
ENDPOINT_SIZE = 18
NODE_VALUE = struct.Struct("=16s16sI16s16s")


class ServiceValue(NamedTuple):
    """What the Ruleset says of a ServicePort, taken apart."""

    seconds: int
    """Of affinity; 0 for none."""
    cluster: bytes
    """Packed endpoints of Pool.CLUSTER, 18 bytes each."""
    local: bytes


def pack_address(address: str) -> bytes:
    """Pack a canonical address of either family into 16 bytes."""
    if ":" in address:
        return socket.inet_pton(socket.AF_INET6, address)
    return UNSPECIFIED[Family.IPV4][:12] + socket.inet_aton(address)


def print_address(packed: bytes) -> str:
    """Print 16 bytes as the canonical address that they are."""
    if packed[:12] == UNSPECIFIED[Family.IPV4][:12]:
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return str(ipaddress.IPv6Address(packed))


def pack_endpoint(endpoint: Endpoint) -> bytes:
    """Pack address and port."""
    return pack_address(endpoint.ip) + endpoint.port.to_bytes(2, "big")


def pack_cidr(cidr: str) -> bytes:
    """Pack a canonical CIDR: its length in a 16-byte address, then that address."""
    address, _, length = cidr.partition("/")
    return bytes((int(length) + (0 if ":" in address else 96),)) + pack_address(address)


def pack_action(action: Action) -> int:
    """Pack an Action into its four bits."""
    local = ACTION_LOCAL if action.pool is Pool.LOCAL else 0
    return VERDICTS[action.verdict] | local | (ACTION_MASQUERADE if action.masquerade else 0)


def service_name(key: PlanKey) -> bytes:
    """Name of a ServicePort in the maps: `NAMESPACE/NAME:PORT PROTOCOL FAMILY`."""
    return f"{key.name} {key.name.protocol} {key.family.kubernetes}".encode()


def split_service(value: bytes) -> ServiceValue:
    """Take the value of a Kind.SERVICE apart."""
    seconds, count = SERVICE_VALUE.unpack_from(value)
    start, middle = SERVICE_VALUE.size, SERVICE_VALUE.size + count * ENDPOINT_SIZE
    return ServiceValue(seconds, value[start:middle], value[middle:])


def join_service(value: ServiceValue) -> bytes:
    """Join what `split_service` takes apart."""
    head = SERVICE_VALUE.pack(value.seconds, len(value.cluster) // ENDPOINT_SIZE)
    return head + value.cluster + value.local
