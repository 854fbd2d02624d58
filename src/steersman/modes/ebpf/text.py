"""What the maps hold, in Kubernetes' words: a line per object, for people and for tests. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from steersman.model.addresses import join_host_port
from steersman.model.names import PROTOCOL_BY_NUMBER, Family
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.layout import ENDPOINT_SIZE, Kind, print_address

_CLASSES = ("pods", "node", "others")
_VERDICTS = ("to", "dropped", "rejected")


def describe(item: tuple[bytes, bytes]) -> str:
    """Say in a line what one object of the Ruleset is."""
    key, value = item
    kind, rest = Kind(key[:1]), key[1:]
    match kind:
        case Kind.SERVICE:
            return f"service {rest.decode()}: {_service(value)}"
        case Kind.FRONTEND:
            return f"frontend {frontend_name(rest)}: {_frontend(value)}"
        case Kind.RANGE:
            return f"range {_cidr(rest[:17])} may use {rest[17:].decode()}"
        case Kind.NODE_IP:
            return f"node port address {print_address(rest)}"
        case Kind.PREFIX:
            pods = int.from_bytes(rest[:4], "big") == layout.PREFIXES_PODS
            return f"{'pods are in' if pods else 'ServiceCIDR'} {_cidr(rest[4:])}"
        case Kind.CONFIG:
            return f"configuration flags {layout.NODE_VALUE.unpack(value)[2]}"
        case Kind.MAGLEV:
            return f"table of {rest.decode()}"
        case Kind.PROGRAMS:
            return f"programs {value.hex()}"


def frontend_name(key: bytes) -> str:
    """Print a frontend_key."""
    address, port, protocol = layout.FRONTEND_KEY.unpack(key)
    name = PROTOCOL_BY_NUMBER.get(protocol, str(protocol))
    if address in layout.UNSPECIFIED.values():
        family = "IPv4" if address == layout.UNSPECIFIED[Family.IPV4] else "IPv6"
        return f"node port {port}/{name} {family}"
    return f"{join_host_port(print_address(address), port)}/{name}"


def endpoint_name(packed: bytes) -> str:
    """Print a packed endpoint."""
    return join_host_port(print_address(packed[:16]), int.from_bytes(packed[16:18], "big"))


def _service(value: bytes) -> str:
    own = layout.split_service(value)
    parts = [f"{pool} {_list(ends)}" for pool, ends in (("all", own.cluster), ("local", own.local))]
    return ", ".join([*parts, *([f"affinity {own.seconds} s"] if own.seconds else ())])


def _list(ends: bytes) -> str:
    names = [endpoint_name(ends[n : n + 18]) for n in range(0, len(ends), ENDPOINT_SIZE)]
    return f"[{' '.join(names)}]"


def _frontend(value: bytes) -> str:
    actions, flags = layout.FRONTEND_VALUE.unpack_from(value)
    said = list(_actions(actions))
    if flags & layout.FRONTEND_RANGES:
        said.append("source ranges")
    return f"{value[layout.FRONTEND_VALUE.size :].decode()}, {', '.join(said)}"


def _actions(actions: int) -> Iterator[str]:
    for place, who in enumerate(_CLASSES):
        action = actions >> 4 * place & 15
        verdict = _VERDICTS[action & 3]
        if verdict == "to":
            verdict = "to local" if action & layout.ACTION_LOCAL else "to all"
            verdict += " masqueraded" if action & layout.ACTION_MASQUERADE else ""
        yield f"{who} {verdict}"


def _cidr(packed: bytes) -> str:
    address = print_address(packed[1:])
    return f"{address}/{packed[0] - (0 if ':' in address else 96)}"
