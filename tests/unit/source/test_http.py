"""Requests and answers of HTTP/1.1, with servers that behave and misbehave, over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from steersman.source import http_connection, route
from steersman.source.http_connection import HttpError
from tests.support.talking import (
    BEGINS,
    CHUNKED,
    OK,
    PATIENCE,
    Visit,
    answering,
    client,
    failure,
    get,
    once,
    serving,
)
from tests.support.waiting import until

# Requests


async def test_what_a_request_looks_like() -> None:
    heads: list[str] = []

    async def talk(visit: Visit) -> None:
        heads.append(await visit.head())
        await visit.say(OK)
        heads.append(await visit.head())
        heads.append((await visit.body(7)).decode())
        await visit.say(OK)

    async with serving(talk) as server, client(headers=[("Accept", "text/plain")]) as made:
        given = [("Impersonate-Group", "a"), ("Impersonate-Group", "ü"), ("accept", " x/y ")]
        url = f"{server.url()}/a b/%41?q=1"
        assert await get(made, url, params={"s": "!a=b,c d"}, headers=given) == (200, b"ok")
        assert await get(made, server.url(), body=b"{'a':1}") == (200, b"ok")
    lines = heads[0].split("\r\n")
    assert lines[0] == "GET /a%20b/%41?q=1&s=%21a%3Db%2Cc%20d HTTP/1.1"
    assert lines[1] == f"Host: 127.0.0.1:{server.port}"
    assert [line for line in lines if line.lower().startswith("accept")] == ["accept: x/y"]
    assert [line for line in lines if "Group" in line] == [
        "Impersonate-Group: a",
        "Impersonate-Group: ü",
    ]
    assert heads[1].startswith("POST / HTTP/1.1\r\n")
    assert "Content-Length: 7\r\n" in heads[1]
    assert heads[2] == "{'a':1}"


@pytest.mark.parametrize("value", ["one\ntwo", "one\r\nX: y", "\0", "a\x7f"])
async def test_a_header_that_cannot_be_sent_is_named_and_not_shown(value: str) -> None:
    async with serving(answering(OK)) as server, client() as made:
        error = await failure(made, server.url(), headers=[("Authorization", f"hidden{value}")])
        assert error.reason == "credentials"
        assert "the value of Authorization has a line break" in str(error)
        assert "hidden" not in str(error)
        assert not server.visits


@pytest.mark.parametrize(
    "url",
    [
        "ftp://10.0.0.1",
        "10.0.0.1:6443",
        "http://",
        "http://[::1",
        "http://host:99999",
        f"http://{'a' * 64}.example",
        "http://a..b",
        "",
    ],
)
@pytest.mark.parametrize("place", ["server", "proxy"])
async def test_what_is_no_url_is_said(url: str, place: str) -> None:
    if place == "proxy" and not url:
        return
    async with client() as made:
        if place == "proxy":
            error = await failure(made, "http://10.0.0.1", proxy=url)
        else:
            error = await failure(made, url)
        assert (error.reason, str(error)) == (
            "connect",
            f"{url!r} is not a URL such as https://10.0.0.1:6443",
        )


async def test_addresses_and_names_of_ipv6() -> None:
    heads: list[str] = []

    async def talk(visit: Visit) -> None:
        heads.append(await visit.head())
        await visit.say(OK)

    async with serving(talk, host="::1") as server, client() as made:
        assert await get(made, server.url(host="[::1]")) == (200, b"ok")
    assert heads[0].split("\r\n")[1] == f"Host: [::1]:{server.port}"
    zoned = route.Hop.of("http://[fe80::1%25eth0]", None)
    assert (zoned.host, zoned.header) == ("fe80::1%eth0", "[fe80::1]")


# Answers


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([OK], b"ok"),
        ([OK[:9], OK[9:30], OK[30:-1], OK[-1:]], b"ok"),
        ([CHUNKED + b"1\r\na\r\n", b"2;x=y\r\nbc\r", b"\n0\r\n\r\n"],
         b"abc"),
        ([CHUNKED + b"0\r\nTrailer: x\r\n\r\n"], b""),
        ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK], b"ok"),
        ([b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n"], b""),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
    ],
)  # fmt: skip
async def test_answers_and_the_use_of_their_connection(pieces: list[bytes], body: bytes) -> None:
    async with serving(answering(*pieces)) as server, client() as made:
        for _ in range(3):
            assert (await get(made, server.url()))[1] == body
        assert server.visits == 1


@pytest.mark.parametrize("begins", [BEGINS, BEGINS.replace(b"1.1", b"1.0")])
async def test_a_body_until_the_connection_ends(begins: bytes) -> None:
    async with serving(once(begins + b"\r\n", b"all of", b" it")) as server, client() as made:
        for _ in range(2):
            assert await get(made, server.url()) == (200, b"all of it")
        assert server.visits == 2


async def test_headers_of_an_answer() -> None:
    begins = BEGINS + b"X-A: 1\r\nx-a: 2\r\nX-B: \xff\r\nContent-Length: 0\r\n\r\n"
    async with serving(answering(begins)) as server, client() as made:
        response = await made.request(server.url(), patience=PATIENCE)
        assert response.content_type == "text/plain"
        assert (response.headers["x-a"], response.headers["x-b"]) == ("1, 2", "\ufffd")
        assert [await response.read() for _ in range(2)] == [b"", b""]


async def test_a_slow_reader_holds_the_server_back_and_gets_everything() -> None:
    sent, piece, pieces = 0, bytes(1 << 16), 512

    async def talk(visit: Visit) -> None:
        nonlocal sent
        await visit.head()
        await visit.say(BEGINS + b"Content-Length: %d\r\n\r\n" % (len(piece) * pieces))
        for _ in range(pieces):
            await visit.say(piece)
            sent += len(piece)

    async with serving(talk) as server, client() as made:
        response = await made.request(server.url(), patience=PATIENCE)
        before = -1
        while before != sent:  # until nothing more fits anywhere
            before = sent
            await asyncio.sleep(0.2)
        assert sent < len(piece) * pieces
        received, largest = 0, 0
        while chunk := await response.read():
            received, largest = received + len(chunk), max(largest, len(chunk))
        assert received == len(piece) * pieces
        assert largest <= http_connection._MOST_HELD + (256 << 10)  # asyncio reads this at a time


async def test_a_stream_arrives_as_it_is_sent() -> None:
    go_on = asyncio.Event()

    async def talk(visit: Visit) -> None:
        await visit.head()
        await visit.say(CHUNKED + b"")
        for _ in range(3):
            await visit.say(b"3\r\none\r\n", b"3\r\ntwo\r\n")
            await go_on.wait()
            go_on.clear()
        await visit.gone()

    async with serving(talk) as server, client() as made:
        response = await made.request(server.url(), patience=PATIENCE)
        for _ in range(3):
            received = b""
            while received != b"onetwo":
                received += await response.read()
            go_on.set()
        response.close()
        await until(lambda: not server.open)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([b"\x15\x03\x01\x00\x02\x02\x16"], r"not HTTP: b'\x15\x03\x01\x00\x02\x02\x16'"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], r"not HTTP: b'SSH-2.0-OpenSSH_9.2\r\n'"),
        ([b"hello\r\n\r\n"], r"not HTTP: b'hello\r\n\r\n'"),
        ([b"y" * 9999] * 99, "not HTTP: a head or a line has more than 65536 bytes"),
        ([b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n" * 99] * 999], "a line has more than 65536 bytes"),
        ([b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n"], "not HTTP: illegal header line"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"], "not HTTP: bad Content-Length"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"],
         "not HTTP: conflicting Content-Length headers"),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"], "not HTTP: "),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" * 50], "no answer comes after many of 1xx"),
        ([b"HTTP/1.1 200 O"], "the connection broke in the middle of an answer"),
        ([], "the connection broke: the server closed it without an answer"),
        ([BEGINS + b"Content-Length: 9\r\n\r\n", b"short"], "in the middle of an answer"),
        ([CHUNKED, b"9\r\nshort"],
         "in the middle of an answer"),
        ([CHUNKED, b"1\r\nxy\r\n"], "malformed chunk footer"),
        ([CHUNKED + b"zz\r\n"], "illegal chunk header"),
        ([CHUNKED + b"1" * 99999], "not HTTP: "),
        ([BEGINS + b"Content-Length: 1\r\n\r\nlonger"], "longer than its headers say"),
    ],
)  # fmt: skip
async def test_answers_that_are_none(pieces: list[bytes], says: str) -> None:
    async with serving(once(*pieces)) as server, client() as made:
        error = await failure(made, server.url())
        assert (error.reason, says in str(error)) == ("connection", True), error


CHUNKS = b"3;name=value\r\none\r\n00A \r\n0123\r\n6789\r\n1\r\n\n\r\n0\r\nA: b\r\nC: d\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, len(CHUNKS)])
async def test_chunks_are_the_same_wherever_they_are_cut(size: int) -> None:
    pieces = [CHUNKS[at : at + size] for at in range(0, len(CHUNKS), size)]
    async with serving(answering(CHUNKED, *pieces)) as server, client() as made:
        for _ in range(2):
            assert await get(made, server.url()) == (200, b"one0123\r\n6789\n")
        assert server.visits == 1


@pytest.mark.parametrize("size", [b"", b"-1", b"+1", b"0x1", b"1_0", b" 1", b"1" * 99, b"\xb2"])
async def test_what_int_takes_is_not_always_the_size_of_a_chunk(size: bytes) -> None:
    answer = CHUNKED + b"1\r\na\r\n" + size + b"\r\nb\r\n"
    async with serving(once(answer)) as server, client() as made:
        error = await failure(made, server.url())
        assert "the answer is not HTTP" in str(error)


async def test_trailers_without_end() -> None:
    trailers = [b"0\r\n", *[b"A: b\r\n" * 1000] * 20]
    async with serving(once(CHUNKED, *trailers)) as server, client() as made:
        error = await failure(made, server.url())
        assert "a head or a line has more than 65536 bytes" in str(error)


async def test_what_came_before_an_error_is_given_before_it() -> None:
    begins = CHUNKED + b"3\r\none\r\n3\r\ntwo\r\nzz\r\n"
    async with serving(once(begins)) as server, client() as made:
        response = await made.request(server.url(), patience=PATIENCE)
        assert await response.read() == b"onetwo"
        for _ in range(2):
            with pytest.raises(HttpError, match="illegal chunk header"):
                await response.read()


async def test_a_reset_does_not_complete_a_body_without_a_length() -> None:
    received = asyncio.Event()

    async def talk(visit: Visit) -> None:
        await visit.head()
        await visit.say(BEGINS + b"\r\nhalf")
        await received.wait()
        visit.reset()

    async with serving(talk) as server, client() as made:
        response = await made.request(server.url(), patience=PATIENCE)
        assert await response.read() == b"half"
        received.set()
        with pytest.raises(HttpError, match="the connection broke"):
            await response.read()


async def test_silence_is_limited_and_slow_bytes_are_not() -> None:
    async def silent(visit: Visit) -> None:
        await visit.head()
        if visit.number > 1:
            await visit.say(BEGINS + b"Content-Length: 9\r\n\r\n1")
        await visit.gone()

    async def slow(visit: Visit) -> None:
        await visit.head()
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nslow":
            await visit.say(bytes([byte]))
            await asyncio.sleep(0.15)

    async with serving(silent) as server, client() as made:
        for _ in range(2):  # before an answer, and within one
            error = await failure(made, server.url(), patience=0.2)
            assert error.reason == "timeout"
            assert str(error) == "the server stopped sending: nothing came for 0.2 s"
    async with serving(slow) as server, client() as made:
        assert await get(made, server.url(), patience=5.0) == (200, b"slow")


async def test_time_in_which_nobody_reads_is_not_silence() -> None:
    first = asyncio.Event()

    async def talk(visit: Visit) -> None:
        await visit.head()
        await visit.say(BEGINS + b"Content-Length: 4\r\n\r\n12")
        await first.wait()
        await visit.say(b"34")

    async with serving(talk) as server, client() as made:
        response = await made.request(server.url(), patience=4.0)
        assert await response.read() == b"12"
        await asyncio.sleep(4.2)  # as long as it takes: the patience is over
        asyncio.get_running_loop().call_later(0.1, first.set)
        assert await response.read() == b"34"
