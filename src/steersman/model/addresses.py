"""IP addresses and CIDRs as canonical strings.

Kubernetes accepts IPv4 octets with leading zeros and reads them as decimal (behaviour 15); the
rest of the program only sees the canonical spelling. Addresses are strings, not `ipaddress`
objects: parsing one of those takes 3.4 us, and a large cluster has 100,000 of them.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton

from steersman.model.names import Family

_IPV4, _IPV6 = Family  # a member by name costs ten times as much (Python 3.11)


def canonical_ip(text: str) -> str | None:
    """Return the canonical spelling of an address, or None if `text` is not one.

    IPv4 octets may have leading zeros, read as decimal. An IPv4-mapped IPv6 address becomes the
    IPv4 address in it. A zone (`fe80::1%eth0`) is rejected. There is no cache: a cluster has more
    addresses than it would hold, and the common case takes 0.2 us.
    """
    try:
        if ":" in text:
            return _print_ipv6(inet_pton(AF_INET6, text))
        inet_pton(AF_INET, text)
    except ValueError:  # a NUL inside, or not encodable
        return None
    except OSError:  # it rejects leading zeros: whatever it accepts is canonical
        return None if ":" in text else _lenient_ipv4(text)
    return text


def _lenient_ipv4(text: str) -> str | None:
    octets = text.split(".")
    if len(octets) != 4 or not all(o.isascii() and o.isdigit() and len(o) < 64 for o in octets):
        return None
    numbers = [int(octet) for octet in octets]
    return ".".join(map(str, numbers)) if max(numbers) < 256 else None


def _print_ipv6(packed: bytes) -> str:
    if packed[:12] == b"\0" * 10 + b"\xff\xff":
        return inet_ntop(AF_INET, packed[12:])
    text = inet_ntop(AF_INET6, packed)
    return str(ipaddress.IPv6Address(packed)) if "." in text else text  # ::/96 prints dotted


def family_of(address: str) -> Family:
    """Return the family of a canonical address or CIDR."""
    return _IPV6 if ":" in address else _IPV4


def canonical_cidr(text: str) -> str | None:
    """Return `network/length` with the host bits masked, or None if `text` is not a CIDR."""
    address, _, length = text.partition("/")
    ip = canonical_ip(address)
    if ip is None or len(length) > 3 or not (length.isascii() and length.isdigit()):
        return None
    bits = int(length)
    if ":" in address and ":" not in ip:  # IPv4-mapped: the length counts the 96 mapped bits
        bits -= 96
    return _network(ip, bits) if 0 <= bits <= family_of(ip).bits else None


def _network(ip: str, bits: int) -> str:
    """Return the canonical CIDR of this length that contains a canonical address.

    There is no cache: a tenant may list 50,000 ranges, and the common case takes 0.6 us.
    """
    kind, width = (AF_INET6, 128) if ":" in ip else (AF_INET, 32)
    number = int.from_bytes(inet_pton(kind, ip), "big")
    host = number & ((1 << width - bits) - 1)
    if host:
        packed = (number - host).to_bytes(width // 8, "big")
        ip = _print_ipv6(packed) if width == 128 else inet_ntop(AF_INET, packed)
    return f"{ip}/{bits}"


def in_cidr(address: str, cidr: str) -> bool:
    """Whether a canonical CIDR contains a canonical address (of the same family)."""
    network, _, length = cidr.partition("/")
    return (":" in address) == (":" in network) and _network(address, int(length)) == cidr


@lru_cache(maxsize=16)
def networks_of(address: str) -> frozenset[str]:
    """Return all canonical CIDRs that contain a canonical address, to compare with many of them."""
    return frozenset(_network(address, bits) for bits in range(family_of(address).bits + 1))


def is_loopback(address: str) -> bool:
    """Whether a canonical address is in 127.0.0.0/8 or is ::1."""
    return address.startswith("127.") or address == "::1"


_SPECIAL = re.compile(r"(0\.0\.0\.0$|::$)|(127\.|::1$)|(169\.254\.|fe[89ab].:)|(224\.0\.0\.|ff.2:)")
_SPECIAL_STARTS = ("0.", "::", "127.", "169.", "224.", "fe", "ff")
_SPECIAL_NAMES = ("", "unspecified", "loopback", "link-local", "link-local multicast")
"""By the number of the group that matches."""


def special_range(address: str) -> str:
    """Return the special range of a canonical address, "" for a normal one.

    Endpoints and external IPs of these ranges are rejected, as by the API server's validation:
    such an address is another machine on each machine.
    """
    if not address.startswith(_SPECIAL_STARTS):  # nearly always, and faster than the expression
        return ""
    found = _SPECIAL.match(address)
    return _SPECIAL_NAMES[found.lastindex or 0] if found else ""


def join_host_port(address: str, port: int) -> str:
    """Return `address:port`, an IPv6 address in brackets: the printed form of an endpoint."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


_PASSWORD = re.compile(r"""(?<=://)[^/\s\0"'<>]*@""")


def without_password(text: str) -> str:
    """Hide user and password of each URL in a text, so that it can be logged."""
    return _PASSWORD.sub("***@", text) if "@" in text else text


def split_host_port(text: str) -> tuple[str, int]:
    """Split `address:port` or `[address]:port`.

    Raises:
        ValueError: the text is neither, or the port is out of range.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address with a port needs brackets, as in [::1]:80")
    address = canonical_ip(host)
    if not colon or address is None or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{text!r} is not ADDRESS:PORT")
    if not 0 < int(port) < 65536:
        raise ValueError(f"{text!r}: the port must be between 1 and 65535")
    return address, int(port)
