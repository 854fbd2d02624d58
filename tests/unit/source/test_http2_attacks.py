"""A hostile server ends its connection at most: no exception, little memory, no endless work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from h2.connection import H2Connection
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from steersman.source.http2_connection import MOST_OVERHEAD, WINDOW, Http2Connection, Stream
from steersman.source.http_connection import HttpError, Request
from tests.support.parts import examples
from tests.support.talking2 import REQUEST, Bare, Wire, bare

ASKED = Request("GET", "https", "server", "/", (), None)
ATTACKS = examples(5000)
UNUSED = H2Connection()
SEED = 2026


async def asked(pair: Bare) -> asyncio.Task[Stream]:
    task = asyncio.ensure_future(pair.client.ask(ASKED, 60.0))
    await asyncio.sleep(0)
    return task


async def whole(task: asyncio.Task[Stream]) -> None:
    while await (await task).read():
        pass


def headers(stream: int = REQUEST, *more: tuple[str, str], flags: tuple[str, ...] = ()) -> bytes:
    block = Encoder().encode([(":status", "200"), *more])
    return HeadersFrame(stream, data=block, flags=["END_HEADERS", *flags]).serialize()


# Floods


def _continuations() -> bytes:
    begin = HeadersFrame(REQUEST, data=b"").serialize()
    return begin + ContinuationFrame(REQUEST, data=b"").serialize() * 1000


def _bomb() -> bytes:
    """A header of 4,000 bytes in the dynamic table, and 4,000 references to it of a byte each."""
    encoder = Encoder()
    block = encoder.encode([(":status", "200"), ("x", "y" * 4000)])
    block += encoder.encode([("x", "y" * 4000)]) * 4000
    return HeadersFrame(REQUEST, data=block, flags=["END_HEADERS"]).serialize()


FLOODS: dict[str, Callable[[], bytes]] = {
    "SETTINGS": lambda: SettingsFrame(settings={3: 100}).serialize() * 20_000,
    "PING": lambda: PingFrame(opaque_data=bytes(8)).serialize() * 20_000,
    "RST_STREAM": lambda: RstStreamFrame(REQUEST, error_code=8).serialize() * 20_000,
    "WINDOW_UPDATE": lambda: WindowUpdateFrame(0, window_increment=1).serialize() * 20_000,
    "empty DATA": lambda: headers() + DataFrame(REQUEST).serialize() * 20_000,
    "padding": lambda: (
        headers() + DataFrame(REQUEST, pad_length=250, flags=["PADDED"]).serialize() * 999
    ),
    "GOAWAY": lambda: GoAwayFrame(last_stream_id=2**31 - 1).serialize() * 20_000,
    "CONTINUATION": _continuations,
    "header bomb": _bomb,
    "head without end": lambda: headers(REQUEST, *[("a", "b" * 1000)] * 100),
    "PUSH_PROMISE": lambda: PushPromiseFrame(
        REQUEST, 2, b"\x88", flags=["END_HEADERS"]
    ).serialize(),
    "unknown frames": lambda: b"\0\0\0\x77\0\0\0\0\0" * 20_000,
    "more than the window": lambda: headers() + DataFrame(REQUEST, bytes(60_000)).serialize() * 9,
    "a frame that is too large": lambda: (1 << 20).to_bytes(3) + b"\0\0\0\0\0\1" + bytes(1 << 20),
    "HTTP/1.1": lambda: b"HTTP/1.1 200 OK\r\n\r\n" + b"text" * 50_000,
}


@pytest.mark.parametrize("name", FLOODS)
async def test_floods_end_the_connection(name: str) -> None:
    pair = bare()
    task = await asked(pair)
    flood = FLOODS[name]()
    for start in range(0, len(flood), 16 << 10):
        pair.client.data_received(flood[start : start + (16 << 10)])
    assert pair.wire.closed
    assert not pair.client.usable
    assert len(pair.wire.sent) < 4 * MOST_OVERHEAD
    with pytest.raises(HttpError) as caught:
        await whole(task)
    assert caught.value.reason == "connection"


async def test_what_servers_do_is_no_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of PINGs, and a cancelled answer that goes on for as long as its window lets it."""
    pair = bare()
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    for _ in range(MOST_OVERHEAD // 17 * 2):
        pair.client.data_received(PingFrame(opaque_data=bytes(8)).serialize())
        now += 1.0
    task = await asked(pair)
    pair.client.data_received(headers())
    (await task).close()
    for _ in range(WINDOW // (16 << 10)):
        pair.client.data_received(DataFrame(REQUEST, bytes(16 << 10)).serialize())
    assert pair.client.usable


# At random


def random_frame(dice: random.Random) -> bytes:  # noqa: PLR0912 - kinds of frames
    """A frame that a server may send, or nearly, or noise."""
    stream = dice.choice([0, 1, 1, 1, 2, 3, dice.getrandbits(31)])
    size = dice.choice([0, 1, 8, 100, 5000])
    body = dice.randbytes(size)
    made: Frame
    match dice.randrange(11):
        case 0:
            made = DataFrame(stream or 1, body)
            if dice.random() < 0.3:
                made.flags.add("PADDED")
                made.pad_length = dice.randrange(256)
        case 1:
            pairs = [(":status", dice.choice(["200", "100", "", "-1", "abc"]))]
            pairs += [("content-length", dice.choice(["0", "5", "x"]))] * dice.randrange(3)
            pairs += [(dice.choice(["a", "A", ":path", ""]), "v\r\n")] * dice.randrange(2)
            made = HeadersFrame(stream or 1, Encoder().encode(pairs))
        case 2:
            made = HeadersFrame(stream or 1, body)
        case 3:
            made = ContinuationFrame(stream or 1, body)
        case 4:
            settings = {dice.randrange(9): dice.getrandbits(32) for _ in range(dice.randrange(5))}
            made = SettingsFrame(settings=settings)
        case 5:
            made = PingFrame(opaque_data=dice.randbytes(8))
        case 6:
            made = RstStreamFrame(stream or 1, error_code=dice.getrandbits(4))
        case 7:
            made = GoAwayFrame(last_stream_id=stream, error_code=dice.getrandbits(4))
        case 8:
            made = WindowUpdateFrame(stream, window_increment=dice.randrange(1, 2**31))
        case 9:
            made = PushPromiseFrame(stream or 1, 2, body)
        case _:
            return dice.randbytes(dice.randrange(1, 40))
    for flag in ("END_STREAM", "END_HEADERS", "ACK"):
        if dice.random() < 0.4 and any(flag == each.name for each in made.defined_flags):
            made.flags.add(flag)
    if isinstance(made, SettingsFrame) and "ACK" in made.flags:
        made.settings = {}
    data = bytearray(made.serialize())
    if dice.random() < 0.2:  # something in it is otherwise
        data[dice.randrange(len(data))] = dice.getrandbits(8)
    return bytes(data)


async def test_random_attacks_end_the_connection_at_most() -> None:
    """No exception comes out, memory is bounded, and who waits gets an answer or an error."""
    loop, dice = asyncio.get_running_loop(), random.Random(SEED)
    unhandled: list[object] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    ends = {"answer": 0, "failure": 0, "cut": 0}
    for _ in range(ATTACKS):
        pair = Bare(Http2Connection("server"), Wire(), UNUSED)
        pair.client.connection_made(pair.wire)
        pair.client.data_received(SettingsFrame().serialize())
        task = await asked(pair)
        if dice.random() < 0.5:
            pair.client.data_received(headers())
        for _ in range(dice.randrange(1, 12)):
            pair.client.data_received(random_frame(dice))
            await asyncio.sleep(0)
            held = sum(len(p) for s in pair.client._streams.values() for p in s._pieces)
            assert held <= WINDOW
        cut = not pair.wire.closed
        if cut:
            pair.client.connection_lost(None)
        try:
            await whole(task)
            ends["answer"] += 1
        except HttpError:
            ends["cut" if cut else "failure"] += 1
        assert not pair.client._streams
        assert not pair.client.usable
    assert not unhandled
    assert all(count > ATTACKS // 100 for count in ends.values()), ends
