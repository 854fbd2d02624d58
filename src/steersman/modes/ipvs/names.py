"""Names of sets and chains, the keys of kernel objects and what is kept under them. Pure.

Names differ from those of upstream's ipvs mode and of every other mode on purpose: while one mode
replaces another both are complete, and either can be removed without the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple, TypeAlias

import msgspec

from steersman.model.names import Family, Protocol
from steersman.model.plan import SourceClass, Verdict
from steersman.netfilter.names import FILTER, MANGLE, NAT

DEVICE = "kube-ipvs0"
"""The dummy interface that holds the addresses of Services (behaviour 10)."""

SERVICES = "KUBE-IPVS-SERVICES"
MARK_MASQ = "KUBE-IPVS-MARK-MASQ"
POSTROUTING = "KUBE-IPVS-POSTROUTING"
FORWARD = "KUBE-IPVS-FORWARD"
DROPS = "KUBE-IPVS-DROPS"
SOURCES = "KUBE-IPVS-SOURCES"
REJECTS = "KUBE-IPVS-REJECTS"
ACCESS = "KUBE-IPVS-ACCESS"
HEALTH = "KUBE-IPVS-HEALTH"

CHAINS = frozenset(
    {
        (NAT, SERVICES),
        (NAT, MARK_MASQ),
        (NAT, POSTROUTING),
        (MANGLE, DROPS),
        (MANGLE, SOURCES),
        (FILTER, REJECTS),
        (FILTER, ACCESS),
        (FILTER, HEALTH),
        (FILTER, FORWARD),
    }
)
"""Every chain of this mode (table, name); all belong to the node."""

PORTS = "PORTS"
ADDRESSES = "ADDRESSES"
GUARDED = "GUARDED"
ALLOWED = "ALLOWED"
HEALTH_PORTS = "HEALTH"
_ROLES = {PORTS: "hash:ip,port", ADDRESSES: "hash:ip", GUARDED: "hash:ip,port"}
_ROLES[ALLOWED] = "hash:ip,port,net"
_SHORT = {SourceClass.POD: "POD", SourceClass.NODE: "NODE", SourceClass.EXTERNAL: "OUTSIDE"}
_TREATMENT = {Verdict.FORWARD: "MASQ", Verdict.DROP: "DROP", Verdict.REJECT: "REJECT"}
_PREFIX = {Family.IPV4: "KUBE-IPVS-", Family.IPV6: "KUBE-6-IPVS-"}
_INET = {Family.IPV4: "inet", Family.IPV6: "inet6"}


class ServerKey(NamedTuple):
    """A virtual server of the kernel."""

    protocol: Protocol
    address: str
    port: int


class SetKey(NamedTuple):
    """An ipset; its value is its type and family, as in `create`."""

    set: str


class MemberKey(NamedTuple):
    """An entry of an ipset, protocols in numbers; its value is ""."""

    set: str
    entry: str


class DeviceKey(NamedTuple):
    """The interface that holds addresses; its value is its kind."""

    device: str


Target: TypeAlias = tuple[str, int]
"""Address and port of a real server."""


class Server(msgspec.Struct, frozen=True):
    """What a virtual server is."""

    scheduler: str
    flags: int = 0
    """IP_VS_SVC_F_*, without those that the kernel adds."""
    timeout: int = 0
    """Persistence, in seconds."""
    held: bool = True
    """The address is one of DEVICE; addresses of the node itself are not."""
    targets: tuple[Target, ...] = ()
    """Real servers that get new connections, sorted."""
    weights: tuple[int, ...] = ()
    """Theirs, in the same order; () where all are 1."""

    @property
    def weighed(self) -> dict[Target, int]:
        """Weights by real server."""
        return dict(zip(self.targets, self.weights or repeat(1)))  # noqa: B905 - repeat is endless

    @property
    def settings(self) -> tuple[str, int, int]:
        """What the kernel keeps of the virtual server itself."""
        return self.scheduler, self.flags, self.timeout


@lru_cache
def role_set(role: str, family: Family) -> str:
    """Name of the set with a role of its own: PORTS, ADDRESSES and so on."""
    return _PREFIX[family] + role


@lru_cache
def action_set(source: SourceClass, verdict: Verdict, family: Family) -> str:
    """Name of the set of destinations at which a class of sources is treated in one way.

    For FORWARD it holds those at which the source is rewritten.
    """
    return f"{_PREFIX[family]}{_SHORT[source]}-{_TREATMENT[verdict]}"


def all_sets(family: Family) -> Iterator[tuple[str, str]]:
    """Every set of a family: its name, and its type as in `ipset create`."""
    for role, kind in _ROLES.items():
        yield role_set(role, family), f"{kind} family {_INET[family]}"
    yield role_set(HEALTH_PORTS, family), "bitmap:port range 0-65535"
    for source in SourceClass:
        for verdict in Verdict:
            name = action_set(source, verdict, family)
            yield name, f"hash:ip,port family {_INET[family]}"


_OURS = frozenset(name for family in Family for name, _ in all_sets(family))


ADDRESS_SETS = frozenset(role_set(ADDRESSES, family) for family in Family)
"""Their entries follow from what virtual servers hold; found without one, they have no owner."""


def is_our_set(name: str) -> bool:
    """Whether a set belongs to this mode; upstream's KUBE-IPVS-IPS does not."""
    return name in _OURS
