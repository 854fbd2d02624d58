"""A connection for HTTP/2 on asyncio: many requests at a time, flow control, PING, GOAWAY.

h2 reads and writes frames and checks them; this keeps what arrives for each request until it is
taken. A server may send WINDOW bytes of an answer before they are taken, so that a slow reader
holds back its own answer and no other one.

A server can be broken, or hostile: whatever it sends ends the connection at most. What cannot be
parsed ends it at once; frames that bring nothing (PING, SETTINGS, empty DATA) end it if there are
too many of them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    InformationalResponseReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.frame_buffer import FrameBuffer
from h2.settings import SettingCodes, Settings
from hyperframe.frame import DataFrame, Frame, GoAwayFrame

from steersman.source.http_connection import (
    KEPT,
    MAX_HEAD,
    MOST_INFORMATIONAL,
    Arrivals,
    HttpError,
    Receiver,
    Request,
    UnansweredError,
)
from steersman.source.tls import tls_words

WINDOW = 256 << 10
"""Bytes of an answer that may arrive before they are taken."""
READ_IDLE = 30.0
"""Seconds of silence after which a PING is sent (client-go's value)."""
PING_TIMEOUT = 15.0
"""Seconds that its answer may take (client-go's value)."""
MOST_OVERHEAD = 128 << 10
"""Bytes that bring nothing, in a period; a frame may be incomplete, which is half of it."""
_PERIOD = 10.0  # seconds
_FRAME = 64 << 10  # bytes of the largest frame that is accepted
_ALL_STREAMS = 1 << 20  # bytes of all answers before an update; they are taken as they arrive
_MOST_PIECES = 1000
_MOST_UNSENT = 1 << 20  # bytes that the server does not take
_PLAIN_DATA = bytes((DataFrame.type, 0))  # type and flags of a frame
_FIRST_STREAMS = 100  # requests at a time until the server has said how many it accepts


class _Frames(FrameBuffer):
    """Divides bytes into frames: those of events, DATA without flags, by a shorter way."""

    def __next__(self) -> Frame:
        data = self._data
        if len(data) < 9 or data[3:5] != _PLAIN_DATA or self._headers_buffer:
            return super().__next__()
        end = 9 + int.from_bytes(data[:3])
        self._validate_frame_length(end - 9)
        if len(data) < end:
            raise StopIteration
        frame = DataFrame(int.from_bytes(data[5:9]) & 0x7FFF_FFFF)
        frame.data, frame.body_len = bytes(data[9:end]), end - 9
        del data[:end]
        return frame


class _H2(H2Connection):
    """h2, which goes on after GOAWAY: requests that were accepted before it are answered."""

    MAX_CLOSED_STREAMS = 256  # they are remembered for late frames; 65,536 take megabytes

    def __init__(self) -> None:
        super().__init__(H2Configuration(client_side=True, header_encoding=None))
        self.incoming_buffer = _Frames(server=False)

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        event = ConnectionTerminated()
        event.error_code, event.last_stream_id = frame.error_code, frame.last_stream_id
        return [], [event]

    def _receive_frame(self, frame: Frame) -> list[Event]:
        """Take a frame; h2 prints each one for a log that nobody reads, which DATA are spared."""
        if not isinstance(frame, DataFrame) or frame.stream_id not in self.streams:
            return super()._receive_frame(frame)
        frames, events = self._receive_data_frame(frame)
        if frames:
            self._prepare_for_sending(frames)
        return events


class Http2Connection(Receiver):
    """A connection, which serves requests at the same time."""

    transport: asyncio.Transport

    def __init__(self, where: str) -> None:
        """Create the protocol; `where` is the server, for messages."""
        super().__init__()
        self._where = where
        self._loop = asyncio.get_running_loop()
        self._h2 = _H2()
        self._h2.local_settings = Settings(
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
                SettingCodes.MAX_FRAME_SIZE: _FRAME,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEAD,
            }
        )
        self._h2.max_inbound_frame_size = _FRAME
        self._streams: dict[int, Stream] = {}
        self._most_streams = _FIRST_STREAMS
        self._arrived = 0  # bytes of all streams since the last update of their window
        self._overhead = 0  # bytes of this period that brought nothing
        self._period_end = self._loop.time() + _PERIOD
        self._leaving = False  # no more requests
        self.ended = False
        """Whether the connection is closed."""
        self._idle: asyncio.TimerHandle | None = None  # closes it if nobody uses it
        self._heard = self._loop.time()
        self._pinged = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to speak HTTP/2."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_ALL_STREAMS)
        self._watchdog = self._loop.call_later(READ_IDLE, self._watch)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Give the parts of answers to their requests."""
        if self.ended:
            return
        now = self._heard = self._loop.time()
        if now >= self._period_end:
            self._overhead, self._period_end = 0, now + _PERIOD
        self._overhead += len(data)
        try:
            for event in self._h2.receive_data(data):
                self._handle(event)
            if self._arrived >= _ALL_STREAMS // 2:
                self._h2.increment_flow_control_window(self._arrived)
                self._arrived = 0
            self._flush()
        except Exception as error:  # the parser of what an attacker may send
            self._fail(HttpError("connection", f"the answer is not HTTP/2: {error}"))
            return
        if self._overhead > MOST_OVERHEAD:
            self._fail(HttpError("connection", "the server sends frames that bring nothing"))

    def connection_lost(self, error: Exception | None) -> None:
        """End all requests."""
        if isinstance(error, ssl.SSLError):
            self._fail(HttpError("tls", tls_words(error, self._where)))
        else:
            why = error or "the server closed it without an answer"
            self._fail(UnansweredError("connection", f"the connection broke: {why}"))

    # What frames do

    def _handle(self, event: Event) -> None:
        if isinstance(event, DataReceived):  # nearly all
            size = event.flow_controlled_length or 0
            self._arrived += size
            if event.data:
                self._overhead -= size + 9  # with the frame's header
                if (stream := self._streams.get(event.stream_id or 0)) is not None:
                    stream.received(event.data, size - len(event.data))
            return
        stream = self._streams.get(getattr(event, "stream_id", None) or 0)
        match event:
            case ResponseReceived() if stream is not None:
                self._overhead -= 1024
                stream.headers = [each for each in event.headers or () if each[0] != b":status"]
                stream.status = int(dict(event.headers or ())[b":status"])
                stream.arrivals.wake()
            case InformationalResponseReceived() if stream is not None:
                stream.informational += 1
                if stream.informational >= MOST_INFORMATIONAL:
                    why = "no answer comes after many of 1xx"
                    self._end(stream, HttpError("connection", why))
            case StreamEnded() if stream is not None:
                self._end(stream)
            case StreamReset() if stream is not None:
                self._reset(stream, event.error_code)
            case ConnectionTerminated():
                self._go_away(event)
            case RemoteSettingsChanged():
                self._most_streams = self._h2.remote_settings.max_concurrent_streams
                self._wake_all()
            case WindowUpdated():
                self._wake_all()

    def _wake_all(self) -> None:
        for stream in self._streams.values():
            stream.arrivals.wake()

    def _reset(self, stream: Stream, code: ErrorCodes | int | None) -> None:
        """End a request because the server does not answer it to its end."""
        if code == ErrorCodes.REFUSED_STREAM:
            error: HttpError = UnansweredError(
                "connection", "the server refuses more requests", unprocessed=True
            )
        else:
            name = code.name if isinstance(code, ErrorCodes) else code
            error = HttpError("connection", f"the server broke off its answer: {name}")
        self._end(stream, error)

    def _go_away(self, event: ConnectionTerminated) -> None:
        """Send no more requests; those up to the server's last one are still answered."""
        self._leaving = True
        for stream in list(self._streams.values()):
            if stream.number > (event.last_stream_id or 0):
                why = "the server shuts down and did not take the request"
                self._end(stream, UnansweredError("connection", why, unprocessed=True))
        self._stop_if_unused()

    def _end(self, stream: Stream, error: HttpError | None = None) -> None:
        del self._streams[stream.number]
        stream.end(error)
        self._stop_if_unused()

    def _stop_if_unused(self) -> None:
        if self._streams or self.ended:
            return
        if self._leaving:
            self.close()
        elif self._idle is None:
            self._idle = self._loop.call_later(KEPT, self.close)

    def _fail(self, error: HttpError) -> None:
        """End all requests and the connection."""
        if self.ended:
            return
        self.ended = True
        for timer in (self._idle, self._watchdog):
            if timer is not None:
                timer.cancel()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            if stream.status and isinstance(error, UnansweredError):
                why = "the connection broke in the middle of an answer"
                stream.end(HttpError("connection", why))
            else:
                # An exception of its own, as each is raised in another task.
                stream.end(type(error)(error.reason, str(error)))
        self.transport.write(self._h2.data_to_send())  # maybe a GOAWAY with the reason
        self.transport.abort()

    def _flush(self) -> None:
        if self.ended:
            return
        if data := self._h2.data_to_send():
            self.transport.write(data)
        if self.transport.get_write_buffer_size() > _MOST_UNSENT:
            self._fail(HttpError("connection", "the server takes nothing any more"))

    def _watch(self) -> None:
        """Ask for a sign of life after silence; close the connection if none comes."""
        now = self._loop.time()
        wait = READ_IDLE - (now - self._heard)
        if self._pinged > self._heard:
            why = f"the server is silent: nothing came for {now - self._heard:.0f} s after a PING"
            self._fail(HttpError("timeout", why))
            return
        if wait <= 0:
            self._pinged, wait = now, PING_TIMEOUT
            self._h2.ping(bytes(8))
            self._flush()
        if not self.ended:
            self._watchdog = self._loop.call_later(wait, self._watch)

    # What a request calls

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        if self.ended or self._leaving or self.transport.is_closing():
            return False
        spent = self._h2.highest_outbound_stream_id >= self._h2.HIGHEST_ALLOWED_STREAM_ID - 2
        return not spent and len(self._streams) < self._most_streams

    def close(self) -> None:
        """Close it at once, whatever is under way."""
        self._fail(UnansweredError("connection", "the connection was closed"))

    def retire(self) -> None:
        """Close it after the answers that are under way."""
        self._leaving = True
        self._stop_if_unused()

    async def ask(self, request: Request, patience: float) -> Stream:
        """Send a request; return the answer.

        Raises:
            HttpError: there is none; an UnansweredError if nothing of it came.
        """
        head = [
            (b":method", request.method.encode()),
            (b":scheme", request.scheme.encode()),
            (b":authority", request.host.encode()),
            (b":path", request.target.encode()),
            *((name.lower(), value) for name, value in request.headers),
        ]
        if not self.usable:
            raise UnansweredError("connection", "the connection was closed", unprocessed=True)
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        number = self._h2.get_next_available_stream_id()
        self._h2.send_headers(number, head, end_stream=request.body is None)
        stream = self._streams[number] = Stream(self, number, patience)
        try:
            self._flush()
            if request.body is not None:
                await self._send(stream, request.body)
            await stream.head()
        except BaseException:
            stream.close()
            raise
        return stream

    async def _send(self, stream: Stream, body: bytes) -> None:
        """Send a body as far as the server takes it, or until it has answered."""
        rest = memoryview(body)
        while not stream.ended:
            window = self._h2.local_flow_control_window(stream.number)
            room = min(window, self._h2.max_outbound_frame_size)
            if room > 0 or not rest:
                part, rest = rest[:room], rest[room:]
                self._h2.send_data(stream.number, bytes(part), end_stream=not rest)
                self._flush()
                if not rest:
                    return
            else:
                await stream.arrivals.wait()
        if stream.complete:
            self._h2.reset_stream(stream.number, ErrorCodes.NO_ERROR)
            self._flush()

    def taken(self, stream: Stream, size: int) -> None:
        """Let the server send more of an answer."""
        if not self.ended and not stream.ended:
            self._h2.increment_flow_control_window(size, stream.number)
            self._flush()

    def cancel(self, stream: Stream) -> None:
        """Tell the server to send no more of an answer."""
        if self._streams.get(stream.number) is stream:
            self._overhead -= WINDOW  # that may be under way
            self._h2.reset_stream(stream.number, ErrorCodes.CANCEL)
            self._flush()
            self._end(stream)


class Stream:
    """A request and its answer; implements `Answer`."""

    def __init__(self, connection: Http2Connection, number: int, patience: float) -> None:
        """Create it; see `Http2Connection.ask`."""
        self._connection = connection
        self.number = number
        self.status = 0
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self.informational = 0
        self.arrivals = Arrivals(patience)
        self.ended = False
        """Whether the server sends no more."""
        self._failure: HttpError | None = None
        self._pieces: list[bytes] = []
        self._taken = 0  # bytes since the last update of the window

    def received(self, data: bytes, padding: int) -> None:
        """Keep a part of the body."""
        self._pieces.append(data)
        if len(self._pieces) >= _MOST_PIECES:  # each takes 33 bytes more than it holds
            self._pieces = [b"".join(self._pieces)]
        self._taken += padding
        self.arrivals.wake()

    def end(self, failure: HttpError | None) -> None:
        """Note the end of the answer."""
        self.ended, self._failure = True, failure
        self.arrivals.wake()

    @property
    def complete(self) -> bool:
        """Whether the server has sent all of its answer."""
        return self.ended and self._failure is None

    async def head(self) -> None:
        """Wait for status and headers.

        Raises:
            HttpError: there are none.
        """
        while not self.status:
            if self._failure is not None:
                raise self._failure
            await self.arrivals.wait()

    async def read(self) -> bytes:
        """Return all bytes of the body that have come: see Answer."""
        while not self._pieces and not self.ended:
            try:
                await self.arrivals.wait()
            except HttpError:
                self.close()
                raise
        if not self._pieces:
            if self._failure is not None:
                raise self._failure
            return b""
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._taken += len(data)
        if self._taken >= WINDOW // 2:
            self._connection.taken(self, self._taken)
            self._taken = 0
        return data

    def wait_up_to(self, seconds: float) -> None:
        """Change how long the server may be silent."""
        self.arrivals.patience = seconds

    def close(self) -> None:
        """End it; the connection serves other requests."""
        self._connection.cancel(self)
        self._pieces.clear()
