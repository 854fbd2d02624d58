"""A connection for HTTP/1.1 on asyncio: one request at a time, timeouts, tunnels.

h11 writes requests and reads answers; this keeps what arrives, and wakes the request that waits
for it. Beyond _MOST_HELD bytes that nobody has taken, the kernel keeps what comes, and the server
waits.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import h11

from steersman import __version__
from steersman.source.route import Hop, Route
from steersman.source.tls import tls_words

AGENT = f"steersman/{__version__}"
"""The User-Agent header."""
MAX_HEAD = 64 << 10
"""Bytes of the head of an answer: its status and headers."""
KEPT = 15.0
"""Seconds that an idle connection is kept."""
_MOST_HELD = 128 << 10
_ARRIVAL = 64 << 10
"""Bytes that are taken from the kernel, or from TLS, at once."""
MOST_INFORMATIONAL = 10
"""Answers of 1xx before the answer."""
_SHOWN = 60  # bytes of something that is not HTTP, for the message


class HttpError(Exception):
    """There is no answer, or not all of it; the message says why."""

    def __init__(self, reason: str, message: str) -> None:
        """Make an error.

        Args:
            reason: connect, tls, timeout, connection or credentials; for metrics.
        """
        super().__init__(message)
        self.reason = reason


class UnansweredError(HttpError):
    """The connection ended before the first byte of an answer."""

    def __init__(self, reason: str, message: str, *, unprocessed: bool = False) -> None:
        """Make an error; `unprocessed` if the server says that it did nothing."""
        super().__init__(reason, message)
        self.unprocessed = unprocessed


class Request(NamedTuple):
    """A request, for each version of HTTP."""

    method: str
    scheme: str
    host: str
    target: str
    """Path and query; a whole URL for a proxy."""
    headers: Sequence[tuple[bytes, bytes]]
    """Without Host."""
    body: bytes | None


class Answer(Protocol):
    """An answer whose body is still to be read, of each version of HTTP."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    """Names are in lower case."""

    async def read(self) -> bytes:
        """Return all bytes of the body that have come, at least one; b"" at its end.

        Raises:
            HttpError: the connection broke, or is silent; all that came before it was returned.
        """
        ...

    def wait_up_to(self, seconds: float) -> None:
        """Change how long the server may be silent."""
        ...

    def close(self) -> None:
        """End it, whatever is under way."""
        ...


class Arrivals:
    """Lets one task wait until something arrives."""

    def __init__(self, patience: float = 0.0) -> None:
        """Set the seconds that the server may be silent."""
        self.patience = patience
        self._waiter: asyncio.Future[bool] | None = None
        """Gets whether something arrived."""

    def wake(self) -> None:
        """End the wait."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    async def wait(self) -> None:
        """Wait for `wake`.

        Raises:
            HttpError: nothing came in time.
        """
        loop, patience = asyncio.get_running_loop(), self.patience
        self._waiter = loop.create_future()
        # Each event of a watch is waited for: asyncio.timeout takes several times as long.
        timer = loop.call_later(patience, self._give_up)
        try:
            if not await self._waiter:
                why = f"the server stopped sending: nothing came for {patience:g} s"
                raise HttpError("timeout", why)
        finally:
            timer.cancel()
            self._waiter = None

    def _give_up(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)


class Receiver(asyncio.BufferedProtocol):
    """A protocol with a buffer for what arrives.

    For one without, asyncio allocates 256 kB for each event of a watch, and gives them back: the
    kernel maps, clears and unmaps them.
    """

    def __init__(self) -> None:
        self._arriving = memoryview(bytearray(_ARRIVAL))

    def get_buffer(self, _: int) -> memoryview:
        """Return the buffer; the transport fills it and calls `buffer_updated` at once."""
        return self._arriving

    def buffer_updated(self, nbytes: int) -> None:
        """Take what has arrived."""
        self.data_received(bytes(self._arriving[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        raise NotImplementedError


class Connection(Receiver):
    """A connection, which serves one request at a time."""

    transport: asyncio.Transport

    def __init__(self, where: str, keep: Callable[[Connection], None]) -> None:
        """Create the protocol.

        Args:
            where: the server, for messages.
            keep: takes the connection after each answer.
        """
        super().__init__()
        self._where = where
        self._keep = keep
        self._connecting = True
        self._http = h11.Connection(h11.CLIENT)
        self._busy = False  # between a request and the end of its answer
        self._begun = b""  # the first bytes of the answer
        self._received: list[bytes] = []
        self._held = 0  # bytes of these
        self._paused = False
        self._ended = False  # the server sends no more
        self._lost = False
        self._all_taken = False  # and all that it sent was read
        self._reusable = True
        self._failure: Exception | None = None
        self._idle: asyncio.TimerHandle | None = None  # closes it if nobody uses it
        self.arrivals = Arrivals()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Keep bytes until they are taken."""
        if not self._busy and not self._connecting:
            self.close()  # unexpected: the next request must not take it for its answer
            return
        self._begun = self._begun or data[:_SHOWN]
        self._received.append(data)
        self._held += len(data)
        if self._held > _MOST_HELD and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self.arrivals.wake()

    def eof_received(self) -> None:
        """Note the end; asyncio then closes the connection."""
        self._ended = True
        self.arrivals.wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end, and whether it was a reset."""
        self._ended, self._lost, self._failure = True, True, error
        self._stop_idling()
        self.arrivals.wake()

    # What a request calls

    @property
    def usable(self) -> bool:
        """Whether another request can be sent, after `finish`."""
        return self._reusable and not self._ended and not self.transport.is_closing()

    @property
    def _surplus(self) -> bool:
        return bool(self._received or self._http.trailing_data[0])

    def close(self) -> None:
        """Close it at once, whatever is under way."""
        self._busy = False
        self._stop_idling()
        self.transport.abort()

    @property
    def negotiated(self) -> str:
        """The protocol that TLS has negotiated; "" for none."""
        secured = self.transport.get_extra_info("ssl_object")
        return (secured and secured.selected_alpn_protocol()) or ""

    def begin(self) -> None:
        """Speak HTTP/1.1 from now on."""
        self._connecting = False
        if self._received:
            self.close()  # nobody has asked for anything

    def hand_over(self, other: Receiver) -> None:
        """Give the connection to another protocol, with all that has happened on it."""
        self.transport.set_protocol(other)
        other.connection_made(self.transport)
        if data := self._take():
            other.data_received(data)
        if self._lost:
            other.connection_lost(self._failure)

    async def ask(self, request: Request, patience: float) -> Exchange:
        """Send a request; return the answer.

        Raises:
            HttpError: there is none, and the connection is closed; an UnansweredError if not a
                byte came.
        """
        headers = [(b"Host", request.host.encode()), *request.headers]
        head = h11.Request(method=request.method, target=request.target, headers=headers)
        try:
            return Exchange(await self._ask(head, request.body, patience), self, self._keep)
        except BaseException:
            self.close()
            raise

    async def _ask(self, request: h11.Request, body: bytes | None, patience: float) -> h11.Response:
        """Send a request; return the head of the answer. Raises as `ask`."""
        self._stop_idling()
        self._busy, self._begun, self.arrivals.patience = True, b"", patience
        self._http = http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        events = (request, h11.Data(data=body or b""), h11.EndOfMessage())
        self.transport.write(b"".join(http.send(event) or b"" for event in events))
        for _ in range(MOST_INFORMATIONAL):
            while (event := self.next_event()) is h11.NEED_DATA:
                await self.receive()
            if isinstance(event, h11.Response):
                return event
        raise HttpError("connection", "no answer comes after many of 1xx")

    def next_event(self) -> Any:
        """Return the next event of the answer; NEED_DATA if more has to arrive before.

        Raises:
            HttpError: what arrived is not HTTP, or the connection ended within it.
        """
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            http = self._begun.startswith(b"HTTP/")
            if self._all_taken and (http or not self._begun):
                raise self._broken() from None
            why = str(error if http else self._begun)
            if error.error_status_hint == 431:
                why = f"a head or a line has more than {MAX_HEAD} bytes"
            raise HttpError("connection", f"the answer is not HTTP: {why}") from None

    async def receive(self) -> None:
        """Wait for more of the answer, or for the end of the connection.

        Raises:
            HttpError: nothing came in time, or the connection broke.
        """
        if not self._received and not self._ended:
            await self.arrivals.wait()
        data = self._take()
        self._all_taken = not data
        if self._all_taken and self._failure is not None:
            raise self._broken()
        self._http.receive_data(data)

    def _broken(self) -> HttpError:
        """Return why the answer is not complete although the connection has ended."""
        if isinstance(self._failure, ssl.SSLError):
            return HttpError("tls", tls_words(self._failure, self._where))
        if self._begun:
            return HttpError("connection", "the connection broke in the middle of an answer")
        why = self._failure or "the server closed it without an answer"
        return UnansweredError("connection", f"the connection broke: {why}")

    def _take(self) -> bytes:
        """Return all that has come; b"" if there is nothing."""
        data = b"".join(self._received)
        self._received.clear()
        self._held = 0
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return data

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def finish(self) -> None:
        """End a request after all of its answer; the connection closes itself if it stays idle.

        Raises:
            HttpError: more came than the answer.
        """
        if self._surplus:
            raise HttpError("connection", "the answer is longer than its headers say")
        self._busy = False
        self._stop_idling()
        self._reusable = self._http.their_state is h11.DONE is self._http.our_state
        self._idle = asyncio.get_running_loop().call_later(KEPT, self.close)

    async def tunnel(self, route: Route, patience: float) -> None:
        """Have the proxy at the other end connect to the server, and begin TLS with that.

        Raises:
            HttpError: the proxy does not.
            OSError: TLS fails.
        """
        server = route.server
        headers = [("Host", str(server)), ("User-Agent", AGENT), *route.proxy_headers]
        request = h11.Request(method="CONNECT", target=str(server), headers=headers)
        head = await self._ask(request, None, patience)
        why = ""
        if not 200 <= head.status_code < 300:
            why = f"answers {head.status_code} {head.reason.decode('latin-1')}"
            if head.status_code == 407:
                why += "; give its user and password in its URL: http://USER:PASSWORD@HOST:PORT"
        elif self._surplus:
            why = "sends more than an answer"
        if why:
            raise HttpError("connect", f"cannot connect to {server}: proxy {route.proxy} {why}")
        self._busy, self._connecting = False, True
        self._stop_idling()
        await self.begin_tls(server)

    async def begin_tls(self, hop: Hop) -> None:
        """Speak TLS from now on.

        Raises:
            OSError: that fails; the connection is of no use any more.
        """
        assert hop.tls is not None
        secured = await asyncio.get_running_loop().start_tls(
            self.transport, self, hop.tls, server_hostname=hop.name
        )
        assert secured is not None
        self.transport = secured


class Exchange:
    """An answer in HTTP/1.1; implements `Answer`."""

    def __init__(
        self, head: h11.Response, connection: Connection, keep: Callable[[Connection], None]
    ) -> None:
        """Wrap a head; `keep` takes the connection once the body was read."""
        self.status = head.status_code
        self.headers: Sequence[tuple[bytes, bytes]] = list(head.headers)
        self._keep = keep
        self._connection: Connection | None = connection
        self._taken = False
        """Everything that has come was read."""
        self._failure: HttpError | None = None

    async def read(self) -> bytes:
        """Return all bytes of the body that have come: see Answer."""
        pieces: list[bytes] = []
        try:
            while self._connection is not None:
                if self._taken:
                    if pieces:
                        break
                    await self._connection.receive()
                event = self._connection.next_event()
                self._taken = event is h11.NEED_DATA
                if isinstance(event, h11.Data):
                    pieces.append(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    self._finish(self._connection)
        except HttpError as error:
            self.close()
            self._failure = error
        if self._failure is not None and not pieces:
            raise self._failure
        return b"".join(pieces)

    def _finish(self, connection: Connection) -> None:
        connection.finish()
        self._connection = None
        if connection.usable:
            self._keep(connection)
        else:
            connection.close()

    def wait_up_to(self, seconds: float) -> None:
        """Change how long the server may be silent."""
        if self._connection is not None:
            self._connection.arrivals.patience = seconds

    def close(self) -> None:
        """End it; its connection is closed unless the body was read to its end."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
