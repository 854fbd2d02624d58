"""Connections to a Service as they are now, and the search for them.

Each mode keeps them elsewhere: in conntrack, in maps, in the process. A mode adds those that the
search wants, and the search keeps a limited number of them.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from steersman.model.conntrack import pack_socket
from steersman.model.names import Family, PlanKey
from steersman.model.plan import NodeSettings, ServicePlan

MOST_CONNECTIONS = 10_000
"""Connections that an answer may list."""


class ConnectionState(enum.StrEnum):
    """The part of its life that a connection is in, whatever its protocol."""

    OPENING = "opening"
    """Nobody has answered yet."""
    OPEN = "open"
    """Answered; or a UDP socket, of which the kernel does not tell whether it was answered."""
    CLOSING = "closing"
    """One end has said that it sends no more."""
    ENDED = "ended"
    """Over; only its entry is kept for a while."""


class OpenConnection(msgspec.Struct, frozen=True, rename="camel", order=True):
    """A connection of a client to a Service, or a flow of datagrams; sorted by endpoint."""

    endpoint: str
    """Address and port; "" if the connection was not sent to any."""
    client: str
    """Address and port; the address is 0.0.0.0 or :: for a socket that has none of its own."""
    frontend: str
    """The destination that the client used."""
    protocol: str
    state: ConnectionState
    source: str = ""
    """The client as the endpoint sees it, if that is another: an address of this node. "" also if
    the mode does not know."""
    age: float | None = None
    """Seconds since it began; None if nobody keeps that."""
    idle: float | None = None
    """Seconds without a packet; None if nobody keeps that."""


class ConnectionList(msgspec.Struct, frozen=True, rename="camel"):
    """The connections of a Service through one node."""

    mode: str
    rows: tuple[OpenConnection, ...]
    """The first ones by endpoint and client."""
    by_endpoint: Mapping[str, int]
    """The number of all, without those that have ended, by endpoint; "" for none."""
    ended: int
    """The number of those that have ended."""
    matching: int
    """The number of connections that `rows` has the first of."""


class ConnectionSearch:
    """The wanted connections, and those that were found."""

    def __init__(
        self,
        plans: Iterable[ServicePlan],
        settings: NodeSettings,
        most: int = MOST_CONNECTIONS,
        *,
        ended: bool = False,
    ) -> None:
        """Prepare to search for the connections of some plans.

        Args:
            plans: of the Service, one for each port and family.
            settings: of this node, which has the addresses of node ports.
            most: number of connections to keep.
            ended: whether to keep those that have ended, too.
        """
        self.owners: set[PlanKey] = set()
        """The ServicePorts, by family."""
        self._frontends: dict[Family, set[bytes]] = {}
        self._node_ports: dict[Family, set[bytes]] = {}
        self._local: set[bytes] = set()
        """Addresses of this node that serve node ports, packed."""
        self._most, self._with_ended = most, ended
        self._kept: list[OpenConnection] = []
        self._by_endpoint: Counter[str] = Counter()
        self._ended = 0
        for plan in plans:
            self.owners.add(plan.key)
            family, protocol = plan.key.family, bytes((plan.key.name.protocol.number,))
            for each in plan.frontends:
                if each.address:
                    packed = protocol + pack_socket(each.address, each.port)
                    self._frontends.setdefault(family, set()).add(packed)
                else:
                    port = protocol + each.port.to_bytes(2, "big")
                    self._node_ports.setdefault(family, set()).add(port)
        for own in map(settings.family, self._node_ports):
            serving = own.node_port_addresses
            addresses = own.local_addresses if serving is None else serving
            self._local |= {pack_socket(address, 0)[:-2] for address in addresses}

    def keys(self, family: Family) -> set[bytes]:
        """Return what destinations of a family begin with and end in.

        Each is a protocol number, then an address if it is not a node port, then a port.
        """
        return self._frontends.get(family, set()) | self._node_ports.get(family, set())

    @property
    def families(self) -> set[Family]:
        """The families of the wanted destinations."""
        return self._frontends.keys() | self._node_ports.keys()

    def wants(self, destination: bytes, *, translated: bool = True) -> bool:
        """Whether a connection is wanted.

        Args:
            destination: protocol number, address and port that the client used, packed.
            translated: whether it was sent to an endpoint. At a node port another program got it
                otherwise, such as a proxy of this process.
        """
        family = Family.IPV4 if len(destination) == 1 + 4 + 2 else Family.IPV6
        if destination in self._frontends.get(family, ()):
            return True
        port = destination[:1] + destination[-2:]
        if not translated or port not in self._node_ports.get(family, ()):
            return False
        address = destination[1:-2]
        return address in self._local or (family is Family.IPV4 and address[0] == 127)

    def add(self, found: OpenConnection) -> None:
        """Add a connection that is wanted."""
        if found.state is ConnectionState.ENDED:
            self._ended += 1
            if not self._with_ended:
                return
        else:
            self._by_endpoint[found.endpoint] += 1
        self._kept.append(found)
        if len(self._kept) > 2 * self._most:
            self._cut()

    def result(self, mode: str) -> ConnectionList:
        """Return the first connections, and the numbers of all."""
        self._cut()
        counts = dict(sorted(self._by_endpoint.items()))
        matching = sum(counts.values()) + (self._ended if self._with_ended else 0)
        return ConnectionList(mode, tuple(self._kept), counts, self._ended, matching)

    def _cut(self) -> None:
        """Keep the first ones."""
        self._kept = sorted(self._kept)[: self._most]
