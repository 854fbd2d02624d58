"""Address families, protocols, and the names of Services and their ports."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias


class Family(enum.IntEnum):
    """An IP address family; the value is the version number in the IP header."""

    IPV4 = 4
    IPV6 = 6

    @property
    def kubernetes(self) -> str:
        """Kubernetes' spelling, as in `spec.ipFamilies` and `addressType`."""
        return "IPv4" if self is Family.IPV4 else "IPv6"

    @property
    def bits(self) -> int:
        """Length of an address, in bits."""
        return 32 if self is Family.IPV4 else 128


class Protocol(enum.StrEnum):
    """A transport protocol, in Kubernetes' spelling."""

    TCP = "TCP"
    UDP = "UDP"
    SCTP = "SCTP"

    @property
    def number(self) -> int:
        """IANA's protocol number, as in the IP header."""
        return _PROTOCOL_NUMBERS[self]


_PROTOCOL_NUMBERS = {Protocol.TCP: 6, Protocol.UDP: 17, Protocol.SCTP: 132}
PROTOCOL_BY_NUMBER: Mapping[int, Protocol] = {each.number: each for each in Protocol}
"""The inverse of `Protocol.number`."""


class ObjectName(NamedTuple):
    """Namespace and name of a Kubernetes object (namespace "" for cluster-scoped ones)."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ServicePortName(NamedTuple):
    """One port of one Service: the unit of planning and programming (behaviour 3)."""

    namespace: str
    service: str
    port: str
    protocol: Protocol

    @property
    def object_name(self) -> ObjectName:
        """The Service of this port."""
        return ObjectName(self.namespace, self.service)

    def __str__(self) -> str:
        """Return `ns/name:port`, or `ns/name` if the port has no name (behaviour 3)."""
        base = f"{self.namespace}/{self.service}"
        return f"{base}:{self.port}" if self.port else base


class PlanKey(NamedTuple):
    """A ServicePort in one address family: the owner of a ServicePlan and of its kernel objects."""

    name: ServicePortName
    family: Family

    def __str__(self) -> str:
        return f"{self.name} ({self.name.protocol}, {self.family.kubernetes})"


NODE = "the node"
"""The owner of the plan's node-wide part, and of its kernel objects."""
Owner: TypeAlias = PlanKey | str
"""The owner of a part of the plan and of kernel objects: a ServicePort in one family, or NODE."""

SCHEDULER_FLAGS = ("none", "sh-fallback", "sh-port", "mh-fallback", "mh-port")
"""Scheduler flags of IPVS in ipvsadm's words (`-b`), each for one scheduler; `none` clears them."""
