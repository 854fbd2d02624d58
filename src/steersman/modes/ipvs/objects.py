"""Names of sets and chains, and the keys and values of this mode's kernel objects. Pure.

The names differ on purpose from those of upstream's ipvs mode and of every other mode: while one
mode replaces another, both are complete, and either can be removed without the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple, TypeAlias

import msgspec

from steersman.model.names import Family, Protocol
from steersman.model.plan import SourceClass, Verdict
from steersman.netfilter.iptables.names import FILTER, MANGLE, NAT

DEVICE = "kube-ipvs0"
"""The dummy interface that has the addresses of Services (behaviour 10)."""

SERVICES = "KUBE-IPVS-SERVICES"  # marks connections to be masqueraded
MARK_MASQ = "KUBE-IPVS-MARK-MASQ"
POSTROUTING = "KUBE-IPVS-POSTROUTING"
FORWARD = "KUBE-IPVS-FORWARD"
DROPS = "KUBE-IPVS-DROPS"
SOURCES = "KUBE-IPVS-SOURCES"  # the source ranges of guarded destinations
REJECTS = "KUBE-IPVS-REJECTS"
ACCESS = "KUBE-IPVS-ACCESS"  # rejects packets to assigned addresses on ports of no Service
HEALTH = "KUBE-IPVS-HEALTH"  # accepts health check node ports

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

# Roles of sets
PORTS = "PORTS"  # destinations at assigned addresses
ADDRESSES = "ADDRESSES"  # assigned addresses
GUARDED = "GUARDED"  # destinations with source ranges
ALLOWED = "ALLOWED"  # destinations and their source ranges
HEALTH_PORTS = "HEALTH"  # health check node ports
_ROLES = {PORTS: "hash:ip,port", ADDRESSES: "hash:ip", GUARDED: "hash:ip,port"}
_ROLES[ALLOWED] = "hash:ip,port,net"
_SHORT = {SourceClass.POD: "POD", SourceClass.NODE: "NODE", SourceClass.EXTERNAL: "OUTSIDE"}
_TREATMENT = {Verdict.FORWARD: "MASQ", Verdict.DROP: "DROP", Verdict.REJECT: "REJECT"}
_PREFIX = {Family.IPV4: "KUBE-IPVS-", Family.IPV6: "KUBE-6-IPVS-"}
_INET = {Family.IPV4: "inet", Family.IPV6: "inet6"}


class ServerKey(NamedTuple):
    """A virtual server of the kernel; its value is a Server."""

    protocol: Protocol
    address: str
    port: int


class SetKey(NamedTuple):
    """An ipset; its value is its type and family, as in `ipset create`."""

    set: str


class MemberKey(NamedTuple):
    """An entry of an ipset, protocols in numbers; its value is ""."""

    set: str
    entry: str


class DeviceKey(NamedTuple):
    """The interface that has the addresses of Services; its value is its kind."""

    device: str


Target: TypeAlias = tuple[str, int]
"""Address and port of a real server."""


class Server(msgspec.Struct, frozen=True):
    """The wanted or present state of a virtual server."""

    scheduler: str
    flags: int = 0
    """IP_VS_SVC_F_*, without those that the kernel adds."""
    timeout: int = 0
    """Persistence, in seconds."""
    assigned: bool = True
    """Whether its address is assigned to DEVICE; addresses of the node itself are not."""
    targets: tuple[Target, ...] = ()
    """Real servers that get new connections, sorted."""
    weights: tuple[int, ...] = ()
    """Their weights, in the same order; () if all are 1."""

    @property
    def weight_of(self) -> dict[Target, int]:
        """Weights by real server."""
        return dict(zip(self.targets, self.weights or repeat(1)))  # noqa: B905 - repeat is endless

    @property
    def settings(self) -> tuple[str, int, int]:
        """The part that the kernel keeps in the virtual server itself."""
        return self.scheduler, self.flags, self.timeout


@lru_cache
def role_set(role: str, family: Family) -> str:
    """Return the name of the set with a role: PORTS, ADDRESSES and so on."""
    return _PREFIX[family] + role


@lru_cache
def action_set(source: SourceClass, verdict: Verdict, family: Family) -> str:
    """Return the name of the set of destinations where a class of sources meets a verdict.

    For FORWARD it contains the destinations where the source is masqueraded.
    """
    return f"{_PREFIX[family]}{_SHORT[source]}-{_TREATMENT[verdict]}"


def all_sets(family: Family) -> Iterator[tuple[str, str]]:
    """Yield the name and type of every set of a family, as in `ipset create`."""
    for role, kind in _ROLES.items():
        yield role_set(role, family), f"{kind} family {_INET[family]}"
    yield role_set(HEALTH_PORTS, family), "bitmap:port range 0-65535"
    for source in SourceClass:
        for verdict in Verdict:
            name = action_set(source, verdict, family)
            yield name, f"hash:ip,port family {_INET[family]}"


OUR_SETS = frozenset(name for family in Family for name, _ in all_sets(family))
"""Names of this mode's sets; upstream's KUBE-IPVS-IPS is none of them."""

ADDRESS_SETS = frozenset(role_set(ADDRESSES, family) for family in Family)
"""Their entries follow from the virtual servers; an entry without one is an orphan."""
