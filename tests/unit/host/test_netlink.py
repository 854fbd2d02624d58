"""Netlink conversations with a scripted kernel."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence

import pytest

from steersman.host import netlink
from steersman.host.netlink import (
    AnswersLostError,
    DumpInterruptedError,
    Netlink,
    NetlinkError,
    Subscription,
)
from steersman.host.nlmsg import (
    HEADER,
    NLM_F_ACK,
    NLM_F_ACK_TLVS,
    NLM_F_CAPPED,
    NLM_F_DUMP_INTR,
    NLMSG_DONE,
    NLMSG_ERROR,
    NLMSGERR_ATTR_MSG,
    Request,
    message,
    messages,
    text,
)

OBJECT = 16


class Socket:
    """Answers with what it was given, in order."""

    def __init__(self, *datagrams: bytes | OSError) -> None:
        self.sent: list[bytes] = []
        self.closed = False
        self._datagrams = list(datagrams)

    def sendmsg(self, buffers: Sequence[bytes]) -> None:
        assert len(buffers) <= 1024  # IOV_MAX
        self.sent.append(b"".join(buffers))

    def recv(self, _size: int, _flags: int = 0) -> bytes:
        datagram = self._datagrams.pop(0)
        if isinstance(datagram, OSError):
            raise datagram
        return datagram

    def setsockopt(self, *_: int | bytes) -> None:
        return

    def setblocking(self, _whether: bool) -> None:
        return

    def gettimeout(self) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[Socket]:
    made: list[Socket] = []
    monkeypatch.setattr(netlink, "open_socket", lambda *_: made[0])
    return made


def kernel(script: list[Socket], *datagrams: bytes | OSError) -> Netlink:
    script.append(Socket(*datagrams))
    return Netlink(netlink.NETLINK_ROUTE)


def error(sequence: int, code: int, explanation: str = "") -> bytes:
    header = HEADER.pack(16, OBJECT, 0, sequence, 0)
    reason = text(NLMSGERR_ATTR_MSG, explanation) if explanation else b""
    flags = NLM_F_CAPPED | (NLM_F_ACK_TLVS if explanation else 0)
    return message(NLMSG_ERROR, flags, sequence, struct.pack("=i", -code) + header + reason)


def item(sequence: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return message(OBJECT, flags, sequence, payload)


def done(sequence: int, flags: int = 0, code: int = 0) -> bytes:
    return message(NLMSG_DONE, flags, sequence, struct.pack("=i", -code))


def test_a_dump_is_streamed_to_its_end(script: list[Socket]) -> None:
    link = kernel(script, item(9, b"old") + item(1, b"a"), item(1, b"b") + done(1))
    assert [reply.payload for reply in link.dump(Request(OBJECT, b""))] == [b"a", b"b"]


def test_an_interrupted_dump_is_complete_before_it_says_so(script: list[Socket]) -> None:
    link = kernel(script, item(1, b"a", NLM_F_DUMP_INTR), item(1, b"b") + done(1))
    replies = link.dump(Request(OBJECT, b""))
    assert [next(replies).payload, next(replies).payload] == [b"a", b"b"]
    with pytest.raises(DumpInterruptedError):
        next(replies)


@pytest.mark.parametrize("end", [error(1, errno.EPERM, "no"), done(1, code=errno.EPERM)])
def test_a_refused_dump_says_why(script: list[Socket], end: bytes) -> None:
    with pytest.raises(NetlinkError, match="refused a listing") as caught:
        list(kernel(script, end).dump(Request(OBJECT, b"")))
    assert caught.value.errno == errno.EPERM


def test_a_request_returns_its_answers(script: list[Socket]) -> None:
    link = kernel(script, item(7) + item(1, b"x"), error(1, 0))
    assert [reply.payload for reply in link.request(Request(OBJECT, b"q"))] == [b"x"]
    (sent,) = messages(script[0].sent[0])
    assert sent.flags & NLM_F_ACK
    assert sent.payload == b"q"


def test_a_refused_request_has_the_kernels_explanation(script: list[Socket]) -> None:
    link = kernel(script, error(1, errno.EINVAL, "bad mask"))
    with pytest.raises(NetlinkError, match=r"0x10 was refused: Invalid argument \(bad mask\)"):
        link.request(Request(OBJECT, b""))


def test_a_batch_tells_the_refused_by_their_place(script: list[Socket]) -> None:
    requests = [Request(OBJECT, b""), *[Request(OBJECT, b"", NLM_F_ACK)] * 3]
    link = kernel(script, error(2, 0) + error(3, errno.EEXIST), error(99, 0), error(4, 0))
    refused = link.batch(requests)
    assert list(refused) == [2]
    assert refused[2].errno == errno.EEXIST
    assert "message 3 of 4" in str(refused[2])


@pytest.mark.parametrize("count", [1024, 1025, 3000])
def test_a_batch_is_one_datagram_however_many_messages_it_has(
    script: list[Socket], count: int
) -> None:
    requests = [Request(OBJECT, b"")] * (count - 1) + [Request(OBJECT, b"", NLM_F_ACK)]
    assert not kernel(script, error(count, 0)).batch(requests)
    (sent,) = script[0].sent
    assert len(list(messages(sent))) == count


def test_a_refused_first_message_ends_a_batch(script: list[Socket]) -> None:
    requests = [Request(OBJECT, b""), Request(OBJECT, b"", NLM_F_ACK)]
    refused = kernel(script, error(1, errno.ENOMEM)).batch(requests)
    assert refused[0].errno == errno.ENOMEM


def test_a_refused_first_message_that_is_answered_is_one_of_many(script: list[Socket]) -> None:
    requests = [Request(OBJECT, b"", NLM_F_ACK)] * 3
    link = kernel(script, error(1, errno.ENOENT), error(2, 0), error(3, errno.EPERM))
    assert list(link.batch(requests)) == [0, 2]


async def test_notifications_that_are_lost_while_the_queue_is_emptied_are_one_loss(
    script: list[Socket],
) -> None:
    full = OSError(errno.ENOBUFS, "")
    script.append(Socket(full, item(0), full, item(0), BlockingIOError(), item(0, b"new")))
    with Subscription(netlink.NETLINK_ROUTE, ()) as news:
        with pytest.raises(AnswersLostError):
            await news.receive()
        assert [heard.payload for heard in await news.receive()] == [b"new"]


async def test_a_queue_that_cannot_be_emptied_is_told(script: list[Socket]) -> None:
    script.append(Socket(OSError(errno.ENOBUFS, ""), OSError(errno.EBADF, "bad")))
    with Subscription(netlink.NETLINK_ROUTE, ()) as news, pytest.raises(OSError, match="bad"):
        await news.receive()


def test_a_silent_kernel_is_given_up(script: list[Socket]) -> None:
    link = kernel(script, BlockingIOError(errno.EAGAIN, "nothing came in time"))
    with pytest.raises(TimeoutError, match="does not answer"):
        link.request(Request(OBJECT, b""))


def test_the_kernel_keeps_the_time_of_an_answer() -> None:
    with (
        Netlink(netlink.NETLINK_ROUTE, timeout=0.01) as link,
        socket.socket(fileno=os.dup(link.fileno())) as same,
        pytest.raises(BlockingIOError),
    ):
        same.recv(1)


def test_messages_that_answer_nothing_are_taken_without_waiting(script: list[Socket]) -> None:
    link = kernel(
        script,
        *(item(0, b"one") + item(0, b"two"), item(0, b"three")),
        *(BlockingIOError(errno.EAGAIN, "no more"), OSError(errno.ENOBUFS, "")),
    )
    assert [each.payload for each in link.waiting()] == [b"one", b"two", b"three"]
    with pytest.raises(AnswersLostError):
        link.waiting()


def test_lost_answers_are_an_error_of_their_own(script: list[Socket]) -> None:
    link = kernel(script, OSError(errno.ENOBUFS, ""), OSError(errno.EBADF, "bad"))
    with pytest.raises(AnswersLostError):
        link.request(Request(OBJECT, b""))
    with pytest.raises(OSError, match="bad"):
        link.request(Request(OBJECT, b""))


def test_sequences_never_repeat_and_the_socket_is_closed(script: list[Socket]) -> None:
    with kernel(script, error(1, 0), error(3, 0)) as link:
        link.request(Request(OBJECT, b""))
        link.batch([Request(OBJECT, b""), Request(OBJECT, b"", NLM_F_ACK)])
        assert [m.sequence for sent in script[0].sent for m in messages(sent)] == [1, 2, 3]
    assert script[0].closed


@pytest.mark.parametrize(("buffer", "group"), [(1 << 40, 1), (4096, 1 << 24)])
def test_a_socket_that_cannot_be_set_up_is_closed(buffer: int, group: int) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises((OSError, TypeError)) as caught:
        Subscription(netlink.NETLINK_ROUTE, [group], buffer=buffer)
    assert os.listdir("/proc/self/fd") == before
    del caught  # until here its frames would have kept an open socket
