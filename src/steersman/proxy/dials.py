"""The connections that this process dials, so that it never relays to itself without end.

An endpoint may be an address of the proxy itself: a node port, another Service's address or a
proxy port. The process then accepts its own dial and, unless it recognises it, dials again. A dial
to another ServicePort is relayed once. A dial that is itself relayed, or one that comes back to the
ServicePort that made it, is refused.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection
from typing import Protocol as Interface
from typing import TypeAlias

from steersman.model.addresses import canonical_ip
from steersman.model.failover import Backend
from steersman.model.names import PlanKey, Protocol
from steersman.model.plan import Endpoint
from steersman.proxy.sockets import SocketAddress, wildcard

_Local: TypeAlias = tuple[Protocol, str, int]
_WILDCARDS = frozenset(map(wildcard, (False, True)))
log = logging.getLogger(__name__)


class Watch(Interface):
    """Takes note of how dials end."""

    def failed(
        self, owner: PlanKey, endpoint: Endpoint, client: str, error: OSError, answered_at: float
    ) -> None:
        """Note a dial that failed; the endpoint last answered then, by time.monotonic()."""

    def answered(self, owner: PlanKey, endpoint: Endpoint) -> None:
        """Note an answer."""


class Dial:
    """A socket that is, or is about to be, connected to an endpoint."""

    __slots__ = ("endpoint", "give_up", "local", "owner", "relayed", "socket")

    def __init__(
        self, sock: socket.socket, owner: PlanKey, endpoint: Endpoint, *, relayed: bool
    ) -> None:
        self.socket = sock
        self.owner = owner
        self.endpoint = endpoint
        self.relayed = relayed
        """It was made for a client that is a dial of this process, too."""
        self.local: _Local | None = None
        self.give_up: Callable[[], bool] | None = None
        """Lets it time out now, while it is being connected (TCP); False if it does already."""


class DialRegistry:
    """The dials of all listeners, by their local address."""

    def __init__(self) -> None:
        self._pending: dict[Dial, None] = {}
        """Dials whose local address is not known yet; most have none before connect()."""
        self._known: dict[_Local, list[Dial]] = {}
        self._reported: set[PlanKey] = set()
        self.watch: Watch | None = None
        """Who wants to know how dials end; None, and nothing is noted."""

    def __len__(self) -> int:
        """Return the number of dials."""
        return len(self._pending) + sum(map(len, self._known.values()))

    def add(
        self, sock: socket.socket, owner: PlanKey, endpoint: Endpoint, caller: Dial | None
    ) -> Dial:
        """Add a socket before it is connected; `caller` is its client if that is a dial, too."""
        dial = Dial(sock, owner, endpoint, relayed=caller is not None)
        self._pending[dial] = None
        return dial

    def remove(self, dial: Dial) -> None:
        """Remove a dial whose socket is closed, or is closed next. Idempotent."""
        self._pending.pop(dial, None)
        if dial.local is not None:
            dials = self._known[dial.local]
            dials.remove(dial)
            if not dials:
                del self._known[dial.local]
            dial.local = None

    def find(
        self,
        protocol: Protocol,
        peer: SocketAddress,
        reached: Callable[[], Collection[SocketAddress]] | None = None,
    ) -> Dial | None:
        """Return the dial that a client is; None if the client is another process.

        Args:
            protocol: of both.
            peer: the client's address.
            reached: tells the addresses by which the client may have reached the listener: another
                program's TCP socket may have the same local address if it is connected to
                another destination. None for UDP, where a local address has one socket.
        """
        # Local addresses are read here, and not after connect(): a dial can be accepted before
        # the task that dials runs again.
        for dial in tuple(self._pending):
            try:
                name: SocketAddress = dial.socket.getsockname()
            except OSError:  # on Windows it has none before connect()
                if dial.socket.fileno() < 0:  # closed; `remove` comes next
                    del self._pending[dial]
                continue
            if name[1] and name[0] not in _WILDCARDS:  # Windows has the address once connected
                del self._pending[dial]
                dial.local = (dial.owner.name.protocol, *_plain(name))
                self._known.setdefault(dial.local, []).append(dial)
        dials = self._known.get((protocol, *_plain(peer)), ())
        if reached is None:
            return next(iter(dials), None)
        # TCP: of the dials with this local address, the one to our address.
        found = {_plain(address) for address in reached()} if dials else ()
        return next((d for d in dials if (d.endpoint.ip, d.endpoint.port) in found), None)

    def refuses(self, caller: Dial, owner: PlanKey) -> bool:
        """Whether a ServicePort must not serve a dial of this process; logs the first refusal."""
        if not caller.relayed and caller.owner != owner:
            return False
        if caller.owner not in self._reported:
            self._reported.add(caller.owner)
            log.warning(
                "%s: endpoint %s leads back to this proxy, to %s; refusing its connections "
                "because they would be relayed in a loop; use addresses of servers as endpoints",
                caller.owner,
                caller.endpoint,
                owner,
            )
        return True

    def give_up(self, backends: Collection[Backend]) -> int:
        """Let the attempts to connect to endpoints time out now; return their number."""
        found = [*self._pending, *(dial for dials in self._known.values() for dial in dials)]
        given_up = 0
        for dial in found:
            where = Backend(dial.endpoint.ip, dial.endpoint.port, dial.owner.name.protocol)
            if dial.give_up is not None and where in backends:
                given_up += dial.give_up()
        return given_up

    def forget(self, owner: PlanKey) -> None:
        """Log the next refusal of a ServicePort again."""
        self._reported.discard(owner)


def _plain(address: SocketAddress) -> tuple[str, int]:
    """Return host and port; an IPv4-mapped address as IPv4, without a scope (`%eth0`)."""
    host = str(address[0]).partition("%")[0]
    return canonical_ip(host) or host, int(address[1])
