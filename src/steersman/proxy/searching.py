"""A client of a DNS Service whose questions are asked again with search suffixes."""

from __future__ import annotations

from collections.abc import Sequence

from steersman.model.plan import Endpoint
from steersman.proxy.budget import Reservation
from steersman.proxy.dns import BrokenMessageError, failed, queries, restored
from steersman.proxy.udp import Client, Session, UdpListener

PORT_NAME = "dns"
"""Name of the Service ports that it is done for, as upstream did."""
_MOST = 64  # questions of one client that wait for answers


class SearchingSession(Session):
    """Asks until there is an answer, or no suffix is left."""

    def __init__(
        self,
        listener: UdpListener,
        client: Client,
        endpoint: Endpoint,
        reservation: Reservation,
        *,
        suffixes: Sequence[str],
    ) -> None:
        """Take what any session takes, and the suffixes to try."""
        super().__init__(listener, client, endpoint, reservation)
        self._suffixes = suffixes
        self._asked: dict[bytes, list[bytes]] = {}
        """By the number of a question: the client's query, and those still to try."""

    def send(self, data: bytes) -> None:
        """Ask as the client did, at first."""
        if len(self._asked) >= _MOST:
            del self._asked[next(iter(self._asked))]
        self._asked[data[:2]] = queries(data, self._suffixes)
        super().send(data)

    def datagram_received(self, data: bytes, addr: tuple[object, ...]) -> None:
        """Ask again, or answer the question that the client asked."""
        waiting = self._asked.get(data[:2])
        if waiting is None:
            super().datagram_received(data, addr)
            return
        query, *left = waiting
        if failed(data) and left:
            self._asked[data[:2]] = [query, *left[1:]]
            super().send(left[0])
            return
        del self._asked[data[:2]]
        try:
            answer = restored(data, query)
        except BrokenMessageError:
            answer = data
        super().datagram_received(answer, addr)
