"""Connections for HTTP/1.1: used again, with several addresses, TLS, proxies, and cancelled."""

from __future__ import annotations

import asyncio
import base64
import gc
import socket
import ssl
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from steersman.source import http_connection
from steersman.source.http import HttpClient
from tests.support.apiserver.certificates import Authority
from tests.support.talking import (
    BEGINS,
    OK,
    PATIENCE,
    Visit,
    answering,
    body_of,
    client,
    descriptors,
    failure,
    get,
    once,
    serving,
)
from tests.support.waiting import until

# Connections


async def test_a_connection_is_used_again_after_the_whole_body_only() -> None:
    async with serving(answering(OK)) as server, client() as made:
        left = await made.request(server.url(), patience=PATIENCE)
        left.close()
        await until(lambda: not server.open)
        await get(made, server.url())
        await get(made, server.url())
        assert server.visits == 2


async def test_requests_at_once_have_connections_of_their_own() -> None:
    async with serving(answering(OK)) as server, client() as made:
        for _ in range(2):
            answers = await asyncio.gather(*(get(made, server.url()) for _ in range(5)))
            assert set(answers) == {(200, b"ok")}
        assert server.visits == 5


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "KEPT", 0.1)
    async with serving(answering(OK)) as server, client() as made:
        await get(made, server.url())
        await until(lambda: not server.open)
        await get(made, server.url())
        assert server.visits == 2


async def test_a_get_request_is_sent_again_if_the_server_closed_an_idle_connection() -> None:
    requests: list[int] = []

    async def talk(visit: Visit) -> None:
        await visit.head()
        await visit.say(OK)
        await visit.head()  # the second request on a connection gets no answer
        requests.append(visit.number)
        if visit.number == 3:
            visit.reset()

    async with serving(talk) as server, client() as made:
        for _ in range(4):
            assert await get(made, server.url()) == (200, b"ok")
        assert (requests, server.visits) == ([1, 2, 3], 4)
        error = await failure(made, server.url(), body=b"{}")  # it may have been carried out
        assert str(error) == "the connection broke: the server closed it without an answer"
        assert server.visits == 4


async def test_a_connection_that_ends_while_idle_is_not_used() -> None:
    async def talk(visit: Visit) -> None:
        await visit.head()
        await visit.say(OK)

    async with serving(talk) as server, client() as made:
        await get(made, server.url())
        kept = [connection for each in made._kept.values() for connection in each]
        await until(lambda: not any(connection.usable for connection in kept))
        assert await get(made, server.url(), body=b"{}") == (200, b"ok")


async def test_bytes_that_nobody_asked_for_are_no_answer() -> None:
    async def talk(visit: Visit) -> None:
        await visit.head()
        await visit.say(OK)
        if visit.number == 1:
            await idle.wait()
            await visit.say(OK.replace(b"ok", b"no"))
        await visit.gone()

    idle = asyncio.Event()
    async with serving(talk) as server, client() as made:
        assert await get(made, server.url()) == (200, b"ok")
        idle.set()
        await until(lambda: not server.open)
        assert await get(made, server.url()) == (200, b"ok")
        assert server.visits == 2


# Several addresses


@contextmanager
def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> Iterator[None]:
    """Have the name `api.test` lead to these addresses."""

    def resolve(host: str, port: int, *_: object) -> list[Any]:
        if host != "api.test":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kinds = (socket.AF_INET6 if ":" in each else socket.AF_INET for each in addresses)
        return [
            (kind, socket.SOCK_STREAM, 6, "", (each, port))
            for kind, each in zip(kinds, addresses, strict=True)
        ]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", resolve)
        yield


async def test_the_addresses_of_a_name_are_tried_until_one_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(answering(OK)) as server, client() as made:
        with named(monkeypatch, "127.0.0.2", "::1", "127.0.0.1", "127.0.0.3"):
            assert await get(made, server.url(host="api.test")) == (200, b"ok")
        assert server.visits == 1


async def test_a_name_that_no_thread_can_look_up_is_a_failure_to_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with client() as made:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            error = await failure(made, "http://api.test")
    assert (error.reason, "no thread can be started" in str(error)) == ("connect", True)


async def test_an_address_that_is_silent_does_not_delay_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.2", 0), backlog=0) as silent, full(silent):
        port = silent.getsockname()[1]
        async with serving(answering(OK), port=port), client(connect=PATIENCE) as made:
            with named(monkeypatch, "127.0.0.2", "127.0.0.1"):
                url = f"http://api.test:{port}"
                assert await get(made, url) == (200, b"ok")
        async with client(connect=0.3) as made:  # alone it is silent until the time is over
            error = await failure(made, f"http://127.0.0.2:{port}")
            assert error.reason == "timeout"
            assert str(error) == f"cannot connect to 127.0.0.2:{port} within 0.3 s"


@contextmanager
def full(listening: socket.socket) -> Iterator[None]:
    """Fill the backlog, so that the kernel drops what comes."""
    waiting = []
    try:
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(listening.getsockname())
            waiting.append(sock)
        yield
    finally:
        for sock in waiting:
            sock.close()


async def test_the_first_of_all_failures_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with client() as made:
        with named(monkeypatch, "127.0.0.1", "127.0.0.2"):
            error = await failure(made, "http://api.test:1")
            assert str(error) == "cannot connect to api.test:1: Connection refused"
            error = await failure(made, "http://other.test:1")
            assert str(error) == "cannot connect to other.test:1: Name or service not known"


# TLS


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.pem.decode())


async def test_tls_and_connections_by_context(tmp_path: Path, authority: Authority) -> None:
    context = authority.server_context(tmp_path, "api.internal", "127.0.0.1")
    async with serving(answering(OK), context) as server, client() as made:
        first, second = trusting(authority), trusting(authority)
        for tls in (first, first, second):
            assert await get(made, server.url("https"), tls=tls) == (200, b"ok")
        assert server.visits == 2
        url = server.url("https", "localhost")
        error = await failure(made, url, tls=first)
        assert error.reason == "tls"
        assert str(error).startswith(f"TLS: localhost:{server.port}: Hostname mismatch")
        assert (await get(made, url, tls=first, server_name="api.internal"))[1] == b"ok"


async def test_tls_that_fails(tmp_path: Path, authority: Authority) -> None:
    async with client() as made:
        tls = trusting(authority)

        async def plain(visit: Visit) -> None:
            await visit.body(1)
            await visit.say(OK)
            await visit.gone()

        async with serving(plain) as server:
            where = f"127.0.0.1:{server.port}"
            error = await failure(made, server.url("https"), tls=tls)
            assert (error.reason, str(error)) == ("tls", f"TLS: {where}: WRONG_VERSION_NUMBER")
        other = Authority("other").server_context(tmp_path)
        async with serving(answering(OK), other) as server:
            where = f"127.0.0.1:{server.port}"
            error = await failure(made, server.url("https"), tls=tls)
            assert error.reason == "tls"
            assert str(error).startswith(f"TLS: {where}: ")

        async def leaves(_: Visit) -> None:
            """Closes the connection within the handshake."""

        async with serving(leaves) as server:
            error = await failure(made, server.url("https"), tls=tls)
            assert error.reason == "connect"
            assert str(error).startswith(f"cannot connect to 127.0.0.1:{server.port}: ")


async def test_a_client_certificate_that_is_refused(tmp_path: Path, authority: Authority) -> None:
    context = authority.server_context(tmp_path)
    context.verify_mode = ssl.CERT_REQUIRED

    def refuse(listening: socket.socket) -> None:
        # A server of asyncio closes the connection without sending the alert.
        sock, _ = listening.accept()
        with sock.dup() as still_open:  # a reset might overtake the alert
            with suppress(OSError):
                context.wrap_socket(sock, server_side=True)
            with suppress(OSError):
                while still_open.recv(1 << 16):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=refuse, args=(listening,), daemon=True)
        thread.start()
        async with client() as made:
            url = f"https://127.0.0.1:{listening.getsockname()[1]}"
            error = await failure(made, url, tls=trusting(authority))
        thread.join(60)
    assert (error.reason, str(error)) == (
        "tls",
        "TLS: the server requires a client certificate",
    )


# Proxies


async def test_a_proxy_is_asked_for_whole_urls() -> None:
    heads: list[str] = []

    async def talk(visit: Visit) -> None:
        heads.append(await visit.head())
        await visit.say(OK)

    async with serving(talk) as server, client() as made:
        proxy = f"http://me:s3%40cret@127.0.0.1:{server.port}"
        assert await get(made, "http://api.invalid/a?b=c", proxy=proxy) == (200, b"ok")
    lines = heads[0].split("\r\n")
    assert lines[:2] == ["GET http://api.invalid/a?b=c HTTP/1.1", "Host: api.invalid"]
    assert f"Proxy-Authorization: Basic {base64.b64encode(b'me:s3@cret').decode()}" in lines


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("password", ["", "me:secret@"])
async def test_an_https_server_is_reached_through_a_tunnel(
    secure: bool, password: str, tmp_path: Path, authority: Authority
) -> None:
    context = authority.server_context(tmp_path, "api.invalid", "127.0.0.1")
    asked, told = list[str](), list[str]()

    async def answer(visit: Visit) -> None:
        while True:
            told.append(await visit.head())
            await visit.say(OK)

    async with serving(answer, context) as server:

        async def talk(visit: Visit) -> None:
            asked.append(await visit.head())
            await visit.say(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await visit.lead_to(server.port)

        async with serving(talk, context if secure else None) as proxy, client() as made:
            url = f"http{'s' * secure}://{password}127.0.0.1:{proxy.port}"
            for _ in range(2):
                found = await get(
                    made, "https://api.invalid:6443/a", tls=trusting(authority), proxy=url
                )
                assert found == (200, b"ok")
            tls = trusting(authority)
            for _ in range(2):
                await get(made, "https://api.invalid:6443/a", tls=tls, proxy=url)
        assert (server.visits, proxy.visits) == (3, 3)
    assert {head.split("\r\n")[0] for head in asked} == {"CONNECT api.invalid:6443 HTTP/1.1"}
    assert {head.split("\r\n")[1] for head in told} == {"Host: api.invalid:6443"}
    assert all(("Proxy-Authorization: Basic " in head) is bool(password) for head in asked)
    assert not any("Proxy-Authorization" in head for head in told)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "answers 502 Bad Gateway"),
        (b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n",
         "answers 407 Proxy Authentication Required; give its user and password in its URL"),
        (b"HTTP/1.1 302 Found\r\nLocation: x\r\n\r\n", "answers 302 Found"),
    ],
)  # fmt: skip
async def test_a_proxy_that_refuses(answer: bytes, says: str, authority: Authority) -> None:
    async with serving(once(answer)) as proxy, client() as made:
        url, tls = "https://api.invalid:6443", trusting(authority)
        error = await failure(made, url, tls=tls, proxy=f"http://me:secret@127.0.0.1:{proxy.port}")
    assert error.reason == "connect"
    where = f"cannot connect to api.invalid:6443: proxy 127.0.0.1:{proxy.port}"
    assert str(error).startswith(f"{where} {says}")


async def test_proxies_that_fail(tmp_path: Path, authority: Authority) -> None:
    tls = trusting(authority)

    async def get_error(made: HttpClient, proxy: str) -> tuple[str, str]:
        error = await failure(made, "https://api.invalid:6443", tls=tls, proxy=proxy)
        return error.reason, str(error)

    async with client() as made:
        assert await get_error(made, "http://127.0.0.1:1") == (
            "connect",
            "cannot connect to proxy 127.0.0.1:1: Connection refused",
        )
        async with serving(once()) as proxy:
            reason, _ = await get_error(made, proxy.url())
            assert reason == "connection"
        async with serving(once(b"hello\r\n\r\n")) as proxy:
            _, text = await get_error(made, proxy.url())
            assert "the answer is not HTTP" in text

        async def no_tls(visit: Visit) -> None:
            await visit.head()
            await visit.say(b"HTTP/1.1 200 OK\r\n\r\n")
            await visit.body(1)
            await visit.say(b"this is not TLS" * 9)
            await visit.gone()

        async with serving(no_tls) as proxy:
            reason, text = await get_error(made, proxy.url())
            assert reason == "tls"
            where = f"api.invalid:6443 through proxy 127.0.0.1:{proxy.port}"
            assert text.startswith(f"TLS: {where}: ")
        async with serving(once(b"HTTP/1.1 200 OK\r\n\r\nhello")) as proxy:
            _, text = await get_error(made, proxy.url())
            assert text.endswith(f"proxy 127.0.0.1:{proxy.port} sends more than an answer")

    async def silent(visit: Visit) -> None:
        await visit.gone()

    async with client(connect=0.3) as made, serving(silent) as proxy:
        reason, text = await get_error(made, proxy.url())
        assert reason == "timeout"
        where = f"api.invalid:6443 through proxy 127.0.0.1:{proxy.port}"
        assert text == f"cannot connect to {where} within 0.3 s"


# The end


async def cancelled(work: Awaitable[object], when: Callable[[], object]) -> None:
    """Cancel a request in a moment; `client` checks that it leaves nothing open."""
    task = asyncio.ensure_future(work)
    await until(when)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("phase", ["name", "connect", "race", "handshake", "tunnel", "tunnel TLS"])
async def test_a_cancelled_connection_is_closed(
    phase: str, monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    begun = False

    async def talk(visit: Visit) -> None:
        nonlocal begun
        if phase == "tunnel TLS":
            await visit.head()
            await visit.say(b"HTTP/1.1 200 OK\r\n\r\n")
        await visit.body(1)
        begun = True
        await visit.gone()

    resolving, release = threading.Event(), threading.Event()

    def resolve(*_: object) -> list[Any]:
        resolving.set()
        release.wait(60)
        return []

    with socket.create_server(("127.0.0.2", 0), backlog=0) as listening, full(listening):
        port, tls = listening.getsockname()[1], trusting(authority)
        async with serving(talk) as server, client() as made:
            match phase:
                case "name":
                    monkeypatch.setattr(socket, "getaddrinfo", resolve)
                    await cancelled(get(made, "http://api.test"), resolving.is_set)
                    release.set()
                case "connect":
                    before = descriptors()
                    work = get(made, f"http://127.0.0.2:{port}")
                    await cancelled(work, lambda: descriptors() - before)
                case "race":
                    before = descriptors()
                    with named(monkeypatch, "127.0.0.2", "127.0.0.2", "127.0.0.2"):
                        work = get(made, f"http://api.test:{port}")
                        await cancelled(work, lambda: len(descriptors() - before) == 3)
                case "handshake":
                    await cancelled(get(made, server.url("https"), tls=tls), lambda: begun)
                case _:
                    work = get(made, "https://api.invalid", tls=tls, proxy=server.url())
                    await cancelled(work, lambda: begun)


async def test_nothing_is_left_wherever_a_connection_with_tls_is_cancelled(
    authority: Authority,
) -> None:
    handshakes: list[int] = []

    async def talk(visit: Visit) -> None:
        await visit.body(1)
        handshakes.append(visit.number)
        await visit.gone()

    tls, steps = trusting(authority), 0
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        async with serving(talk) as server:
            while not handshakes:  # cancelled after one more step of the event loop each time
                steps += 1
                async with client() as made:
                    task = asyncio.ensure_future(get(made, server.url("https"), tls=tls))
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
        del made, task
        gc.collect()
    assert [str(each.message) for each in left] == []


@pytest.mark.parametrize("pieces", [(), (BEGINS,), (BEGINS + b"Content-Length: 9\r\n\r\n123",)])
@pytest.mark.parametrize("again", [False, True])
async def test_a_cancelled_request_closes_its_connection(
    pieces: Sequence[bytes], again: bool
) -> None:
    begun = False

    async def talk(visit: Visit) -> None:
        nonlocal begun
        if again:
            await visit.head()
            await visit.say(OK)
        await visit.head()
        await visit.say(*pieces)
        begun = True
        await visit.gone()

    async with serving(talk) as server, client() as made:
        if again:
            await get(made, server.url())
        await cancelled(get(made, server.url()), lambda: begun)
        await until(lambda: not server.open)
        assert server.visits == 1


async def test_a_connection_that_becomes_idle_after_the_end_is_closed() -> None:
    async with serving(answering(OK)) as server:
        made = HttpClient()
        response = await made.request(server.url(), patience=PATIENCE)
        await made.aclose()
        assert await body_of(response) == b"ok"
        await until(lambda: not server.open)
