"""HTTP/2: many requests on one connection, flow control, GOAWAY, PING, and limits."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from h2.errors import ErrorCodes
from h2.events import DataReceived, PingReceived, StreamReset, WindowUpdated
from h2.settings import SettingCodes
from hyperframe.frame import Frame

from steersman.source import http2_connection
from steersman.source.http import HttpClient
from steersman.source.http2_connection import READ_IDLE, WINDOW
from steersman.source.http_connection import HttpError, Request, UnansweredError
from tests.support.talking import OK, PATIENCE, answering, body_of, client, failure, get, serving
from tests.support.talking2 import REQUEST, Bare, Peer, answering2, bare, serving2
from tests.support.waiting import until

ASKED = Request("GET", "https", "server", "/", (), None)


async def test_requests_at_once_share_one_connection(tmp_path: Path) -> None:
    waiting: list[int] = []

    async def talk(peer: Peer) -> None:
        while True:
            waiting.append(await peer.request())
            if len(waiting) == 5:
                for number in reversed(waiting):
                    peer.answer(number, str(number).encode())

    async with serving2(talk, tmp_path) as server, client() as made:
        answers = await asyncio.gather(*(get(made, server.url, tls=server.tls) for _ in range(5)))
    assert sorted(int(body) for _, body in answers) == waiting
    assert server.visits == 1


async def test_http_1_1_where_the_server_does_not_offer_more(tmp_path: Path) -> None:
    async with serving2(answering2, tmp_path) as modern:
        modern.tls.check_hostname, modern.tls.verify_mode = False, ssl.CERT_NONE
        own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        own.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
        async with serving(answering(OK), own) as old, client() as made:
            url = old.url("https")
            for _ in range(2):
                found = await asyncio.gather(*(get(made, url, tls=modern.tls) for _ in range(3)))
                assert found == [(200, b"ok")] * 3
            assert old.visits == 3
            await get(made, modern.url, tls=modern.tls)
            assert modern.visits == 1


async def test_if_the_connection_cannot_be_opened_all_that_wait_for_it_hear_why() -> None:
    async def talk(visit: Any) -> None:
        await visit.gone()

    tls = ssl.create_default_context()
    async with serving(talk) as server, client(connect=0.3) as made:
        url = server.url("https")
        found = await asyncio.gather(*(failure(made, url, tls=tls) for _ in range(4)))
        assert {error.reason for error in found} == {"timeout"}
        assert server.visits == 1


async def test_if_the_request_that_connects_is_cancelled_another_one_connects(
    tmp_path: Path,
) -> None:
    async with serving2(answering2, tmp_path) as server, client() as made:
        first = asyncio.ensure_future(get(made, server.url, tls=server.tls))
        others = [asyncio.ensure_future(get(made, server.url, tls=server.tls)) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        assert await asyncio.gather(*others) == [(200, b"ok")] * 3


async def test_a_slow_reader_holds_back_its_own_answer_only(tmp_path: Path) -> None:
    size, sent = 8 * WINDOW, 0

    async def talk(peer: Peer) -> None:
        nonlocal sent
        slow = await peer.request()
        peer.answer(slow, b"", end=False)
        quick = 0
        while sent < size:
            room = min(
                peer.h2.local_flow_control_window(slow),
                peer.h2.max_outbound_frame_size,
                size - sent,
            )
            if room:
                peer.h2.send_data(slow, bytes(room), end_stream=sent + room == size)
                sent += room
                peer.flush()
            elif not quick:
                quick = await peer.request()
                peer.answer(quick)
            else:
                await peer.event(WindowUpdated)
        await peer.gone()

    async with serving2(talk, tmp_path) as server, client() as made:
        response = await made.request(server.url, patience=PATIENCE, tls=server.tls)
        await until(lambda: sent >= WINDOW)
        assert await get(made, server.url, tls=server.tls) == (200, b"ok")
        assert sent == WINDOW
        assert len(await body_of(response)) == size
        assert server.visits == 1


async def test_a_long_body_is_sent_as_the_server_takes_it(tmp_path: Path) -> None:
    body, received = bytes(300_000), bytearray()

    async def talk(peer: Peer) -> None:
        number = await peer.request()
        while len(received) < len(body):
            event = await peer.event(DataReceived)
            received.extend(event.data)
            peer.h2.acknowledge_received_data(event.flow_controlled_length, number)
            peer.flush()
        peer.answer(number)
        await peer.gone()

    async with serving2(talk, tmp_path) as server, client() as made:
        assert await get(made, server.url, tls=server.tls, body=body) == (200, b"ok")
    assert received == body


async def test_an_answer_before_the_end_of_the_body(tmp_path: Path) -> None:
    async def talk(peer: Peer) -> None:
        peer.answer(await peer.request())  # and the window is never opened
        reset = await peer.event(StreamReset)
        assert reset.error_code == ErrorCodes.NO_ERROR
        peer.answer(await peer.request(), b"next")
        await peer.gone()

    async with serving2(talk, tmp_path) as server, client() as made:
        assert await get(made, server.url, tls=server.tls, body=bytes(300_000)) == (200, b"ok")
        assert await get(made, server.url, tls=server.tls) == (200, b"next")
        assert server.visits == 1


async def test_goaway_lets_answers_end_and_later_requests_use_another_connection(
    tmp_path: Path,
) -> None:
    async def talk(peer: Peer) -> None:
        number = await peer.request()
        peer.answer(number, b"begun ", end=False)
        if peer.number == 1:
            peer.go_away(number)
            await until(lambda: server.visits == 2)
        peer.h2.send_data(number, b"ended", end_stream=True)
        peer.flush()
        await peer.gone()

    async with serving2(talk, tmp_path) as server, client() as made:
        first = await made.request(server.url, patience=PATIENCE, tls=server.tls)
        assert await first.read() == b"begun "
        await until(lambda: not all(c.usable for c in _shared(made)))
        assert await get(made, server.url, tls=server.tls) == (200, b"begun ended")
        assert await body_of(first) == b"ended"
        await until(lambda: server.open == 1)


def _shared(made: HttpClient) -> list[Any]:
    return [each for found in made._shared.values() for each in found]


@pytest.mark.parametrize("body", [None, b"new"])
async def test_what_a_server_did_not_take_is_sent_again(tmp_path: Path, body: bytes | None) -> None:
    async def talk(peer: Peer) -> None:
        first = await peer.request()
        peer.answer(first)
        if peer.number == 1:
            await peer.request()
            peer.go_away(first)
        await peer.gone()

    async with serving2(talk, tmp_path) as server, client() as made:
        for _ in range(2):
            assert await get(made, server.url, tls=server.tls, body=body) == (200, b"ok")
        assert server.visits == 2


@pytest.mark.parametrize("refusals", [1, 9])
async def test_a_refused_request_is_sent_again_once(tmp_path: Path, refusals: int) -> None:
    async def talk(peer: Peer) -> None:
        peer.answer(await peer.request())
        for _ in range(refusals):
            peer.h2.reset_stream(await peer.request(), ErrorCodes.REFUSED_STREAM)
            peer.flush()
        peer.answer(await peer.request())
        await peer.gone()

    async with serving2(talk, tmp_path) as server, client() as made:
        await get(made, server.url, tls=server.tls)
        if refusals == 1:
            assert await get(made, server.url, tls=server.tls, body=b"new") == (200, b"ok")
        else:
            error = await failure(made, server.url, tls=server.tls)
            assert (error.reason, str(error)) == ("connection", "the server refuses more requests")
        assert server.visits == 1


async def test_a_get_request_is_sent_again_if_the_connection_breaks_and_no_other(
    tmp_path: Path,
) -> None:
    async def talk(peer: Peer) -> None:
        peer.answer(await peer.request())
        if peer.number % 2:
            await peer.request()
        else:
            await answering2(peer)

    async with serving2(talk, tmp_path) as server, client() as made:
        await get(made, server.url, tls=server.tls)
        assert await get(made, server.url, tls=server.tls) == (200, b"ok")
        assert server.visits == 2
    async with serving2(talk, tmp_path) as server, client() as made:
        await get(made, server.url, tls=server.tls)
        error = await failure(made, server.url, tls=server.tls, body=b"new")
        assert str(error).startswith("the connection broke: ")
        assert server.visits == 1


async def test_a_break_in_the_middle_of_an_answer_follows_what_came(tmp_path: Path) -> None:
    async def talk(peer: Peer) -> None:
        peer.answer(await peer.request(), b"half", end=False)
        await peer.request()

    async with serving2(talk, tmp_path) as server, client() as made:
        response = await made.request(server.url, patience=PATIENCE, tls=server.tls)
        assert await response.read() == b"half"
        broken = asyncio.ensure_future(response.read())
        await failure(made, server.url, tls=server.tls, body=b"new")
        with pytest.raises(HttpError, match="broke in the middle of an answer"):
            await broken


async def test_as_many_requests_at_a_time_as_the_server_accepts(tmp_path: Path) -> None:
    arrived: list[int] = []

    async def talk(peer: Peer) -> None:
        numbers = [await peer.request(), await peer.request()]
        arrived.extend(numbers)
        await until(lambda: len(arrived) == 4)
        for number in numbers:
            peer.answer(number)
        await peer.gone()

    accepted = {SettingCodes.MAX_CONCURRENT_STREAMS: 2}
    async with serving2(talk, tmp_path, accepted) as server, client() as made:
        first = asyncio.ensure_future(get(made, server.url, tls=server.tls))
        await until(lambda: _shared(made) and _shared(made)[0]._most_streams == 2)
        rest = await asyncio.gather(*(get(made, server.url, tls=server.tls) for _ in range(3)))
        assert [await first, *rest] == [(200, b"ok")] * 4
        assert server.visits == 2


async def test_a_cancelled_request_leaves_the_others(tmp_path: Path) -> None:
    async def talk(peer: Peer) -> None:
        kept, cancelled = await peer.request(), await peer.request()
        reset = await peer.event(StreamReset)
        assert (reset.stream_id, reset.error_code) == (cancelled, ErrorCodes.CANCEL)
        peer.answer(kept)
        await peer.gone()

    async with serving2(talk, tmp_path) as server, client() as made:
        kept = asyncio.ensure_future(get(made, server.url, tls=server.tls))
        await until(lambda: _shared(made) and _shared(made)[0]._streams)
        cancelled = asyncio.ensure_future(get(made, server.url, tls=server.tls))
        await until(lambda: len(_shared(made)[0]._streams) == 2)
        cancelled.cancel()
        assert await kept == (200, b"ok")
        assert server.visits == 1


async def test_idle_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connection, "KEPT", 0.1)
    async with serving2(answering2, tmp_path) as server, client() as made:
        await get(made, server.url, tls=server.tls)
        await until(lambda: not server.open)
        await get(made, server.url, tls=server.tls)
        assert server.visits == 2


async def test_silence_of_one_answer_ends_it_and_not_the_connection(tmp_path: Path) -> None:
    async def talk(peer: Peer) -> None:
        await peer.request()
        await answering2(peer)

    async with serving2(talk, tmp_path) as server, client() as made:
        error = await failure(made, server.url, tls=server.tls, patience=0.2)
        assert (error.reason, "nothing came for 0.2 s" in str(error)) == ("timeout", True)
        assert await get(made, server.url, tls=server.tls) == (200, b"ok")
        assert server.visits == 1


# Without a network


async def asked(pair: Bare) -> asyncio.Task[http2_connection.Stream]:
    """Send a request that the server has received."""
    task = asyncio.ensure_future(pair.client.ask(ASKED, PATIENCE))
    await asyncio.sleep(0)
    pair.exchange()
    return task


class Hands:
    """A clock that the test moves, for the connection's timers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)


async def test_a_ping_follows_silence_and_more_silence_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hands = Hands(monkeypatch)
    pair = bare()
    task = await asked(pair)
    hands.now += READ_IDLE - 1
    pair.client._watch()
    assert not pair.exchange()
    hands.now += 1
    pair.client._watch()
    assert isinstance(pair.exchange()[0], PingReceived)  # which answers
    hands.now += READ_IDLE
    pair.client._watch()
    assert isinstance(pair.server.receive_data(bytes(pair.wire.sent))[0], PingReceived)
    pair.server.data_to_send()  # the answer is lost
    hands.now += 15
    pair.client._watch()
    assert pair.wire.closed
    with pytest.raises(HttpError, match="the server is silent: nothing came for 45 s") as caught:
        await task
    assert caught.value.reason == "timeout"


async def test_windows_are_opened_by_padding_too() -> None:
    pair = bare()
    task = await asked(pair)
    pair.server.send_headers(REQUEST, [(":status", "200")])
    pair.exchange()
    stream = await task
    received = 0
    while received < 3 * WINDOW:
        while pair.server.local_flow_control_window(REQUEST) < 500:
            pair.exchange()
            assert await stream.read()
        pair.server.send_data(REQUEST, b"x" * 100, pad_length=255)
        received += 100
        pair.exchange()
        if received % 10_000 == 0:
            await stream.read()
    assert not pair.wire.closed


async def test_data_cost_no_text_for_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = bare()
    task = await asked(pair)
    pair.server.send_headers(REQUEST, [(":status", "200")])
    pair.exchange()
    stream = await task
    pair.server.send_data(REQUEST, b"event", end_stream=True)
    with monkeypatch.context() as changed:
        changed.setattr(Frame, "__repr__", lambda _: pytest.fail("a frame was printed"))
        pair.exchange()
    assert (await stream.read(), await stream.read()) == (b"event", b"")


async def test_tiny_pieces_are_held_together() -> None:
    pair = bare()
    task = await asked(pair)
    pair.server.send_headers(REQUEST, [(":status", "200")])
    for _ in range(5000):
        pair.server.send_data(REQUEST, b"x")
    pair.exchange()
    stream = await task
    assert len(stream._pieces) < 1000
    assert await stream.read() == b"x" * 5000


async def test_many_answers_of_1xx_are_none() -> None:
    pair = bare()
    task = await asked(pair)
    for _ in range(10):
        pair.server.send_headers(REQUEST, [(":status", "103")])
    pair.exchange()
    with pytest.raises(HttpError, match="after many of 1xx"):
        await task


async def test_an_answer_that_the_server_breaks_off() -> None:
    pair = bare()
    task = await asked(pair)
    pair.server.reset_stream(REQUEST, ErrorCodes.INTERNAL_ERROR)
    pair.exchange()
    with pytest.raises(HttpError, match="broke off its answer: INTERNAL_ERROR"):
        await task
    assert pair.client.usable


async def test_a_server_that_takes_nothing_is_left() -> None:
    pair = bare()
    pair.wire.unsent = 2 << 20
    task = await asked(pair)
    with pytest.raises(HttpError, match="the server takes nothing any more"):
        await task


async def test_a_connection_that_closed_meanwhile_takes_no_request() -> None:
    pair = bare()
    pair.client.close()
    with pytest.raises(UnansweredError) as caught:
        await pair.client.ask(ASKED, PATIENCE)
    assert caught.value.unprocessed


async def test_a_retired_connection_ends_after_its_answers() -> None:
    pair = bare()
    task = await asked(pair)
    pair.client.retire()
    assert not pair.client.usable
    assert not pair.wire.closed
    pair.server.send_headers(REQUEST, [(":status", "204")], end_stream=True)
    pair.exchange()
    assert (await task).status == 204
    assert pair.wire.closed


async def test_what_goes_on_after_many_requests_is_bounded() -> None:
    pair = bare()
    for number in range(1, 2000, 2):
        task = await asked(pair)
        pair.server.send_headers(number, [(":status", "204")], end_stream=True)
        pair.exchange()
        await task
    assert not pair.client._streams
    assert len(pair.client._h2._closed_streams) <= 256


async def test_events_after_goaway_in_the_same_bytes_are_received() -> None:
    pair = bare()
    task = await asked(pair)
    pair.server.close_connection(last_stream_id=REQUEST)
    away = pair.server.data_to_send()
    other = bare()
    await asked(other)
    other.server.send_headers(REQUEST, [(":status", "200")])
    other.server.send_data(REQUEST, b"all of it", end_stream=True)
    pair.client.data_received(away + other.server.data_to_send())
    assert await (await task).read() == b"all of it"
    assert pair.wire.closed
