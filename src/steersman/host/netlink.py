"""Netlink sockets: requests, dumps, batches and notifications. No other module opens any.

    Netlink        request   one message, its replies, an acknowledgement
                   dump      one message, a stream of objects, NLMSG_DONE
                   batch     many messages in one datagram, refusals by index
    Subscription   receive   notifications of multicast groups

`Netlink` blocks, as the kernel does its work inside the system call; callers on the event loop run
it in a thread. `Subscription` waits on the loop. A socket belongs to the thread that first uses it.
Messages are built and parsed by nlmsg.py and by the modules of each family.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple, NoReturn, Self

from steersman.host.nlmsg import (
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    Message,
    Request,
    blamed_offset,
    message,
    messages,
    parse_ack,
)
from steersman.host.threads import OfOneThread

NETLINK_ROUTE = 0
NETLINK_NETFILTER = 12
NETLINK_GENERIC = 16

_SOL_NETLINK = 270
_NETLINK_ADD_MEMBERSHIP = 1
_NETLINK_CAP_ACK = 10
_NETLINK_EXT_ACK = 11
_SO_ATTACH_FILTER = 26
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33

_LAST_SEQUENCE = 1 << 31
_BUFFERS = 1024  # IOV_MAX: the most buffers that one system call accepts
_RECEIVE = 1 << 17  # a kernel's datagram is at most 32 kB (64 kB with a large page)


class NetlinkError(OSError):
    """The kernel refused a request, for the reason in `errno`; the text has its explanation."""

    offset = 0
    """Position in the request of the attribute that the kernel blames; 0 if it blames none."""


class DumpInterruptedError(NetlinkError):
    """The objects changed during a dump (NLM_F_DUMP_INTR): the list may lack or repeat entries."""


class AnswersLostError(NetlinkError):
    """The receive buffer overflowed (ENOBUFS): messages for this socket are gone."""


def open_socket(protocol: int, buffer: int) -> socket.socket:
    """Open a socket of a netlink protocol with buffers of this many bytes."""
    with ExitStack() as undo:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        sock = undo.enter_context(socket.socket(socket.AF_NETLINK, kind, protocol))
        for force, plain in (
            (_SO_RCVBUFFORCE, socket.SO_RCVBUF),
            (_SO_SNDBUFFORCE, socket.SO_SNDBUF),
        ):
            try:
                sock.setsockopt(socket.SOL_SOCKET, force, buffer)
            except PermissionError:  # without CAP_NET_ADMIN: at most rmem_max
                sock.setsockopt(socket.SOL_SOCKET, plain, buffer)
        for option in (_NETLINK_EXT_ACK, _NETLINK_CAP_ACK):
            with suppress(OSError):  # before 4.12 and 4.3: no explanations, whole messages repeated
                sock.setsockopt(_SOL_NETLINK, option, 1)
        sock.bind((0, 0))
        undo.pop_all()
    return sock


def _error(code: int, explanation: str, what: str) -> NetlinkError:
    reason = os.strerror(code) + (f" ({explanation})" if explanation else "")
    return NetlinkError(code, f"{what}: {reason}")


class Netlink(OfOneThread):
    """A socket of one netlink protocol, in the network namespace of the thread that opens it."""

    def __init__(self, protocol: int, *, buffer: int = 8 << 20, timeout: float = 30.0) -> None:
        """Open the socket.

        Args:
            protocol: NETLINK_ROUTE and so on.
            buffer: bytes of receive and send buffer; a batch must fit.
            timeout: seconds without an answer after which TimeoutError is raised.
        """
        self._socket = open_socket(protocol, buffer)
        # The kernel keeps this time. For one of Python's own, each message takes a poll as well.
        timeval = struct.pack("@ll", int(timeout), int(timeout % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._sequence = 0  # of the last message sent; 0 is for notifications

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """Number of this socket (nl_pid), as in `Message.port`."""
        port: int = self._socket.getsockname()[0]
        return port

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the descriptor, which is readable while messages wait."""
        return self._socket.fileno()

    def waiting(self) -> list[Message]:
        """Return the messages so far that answer no request (nfnetlink_log sends to one socket).

        Unlike the rest, this may be called in another thread than the one that opened the socket.

        Raises:
            AnswersLostError: some were lost; the next call continues.
        """
        found: list[Message] = []
        with suppress(TimeoutError):
            while True:
                found += self._receive(socket.MSG_DONTWAIT)
        return found

    def dump(self, request: Request) -> Iterator[Message]:
        """Yield the objects of a listing; only one datagram of them is in memory.

        The iteration must be finished before the socket is used again.

        Args:
            request: the listing request; NLM_F_DUMP is added.

        Raises:
            DumpInterruptedError: after the last object, if the list is inconsistent.
            NetlinkError: the request was refused.
        """
        sequence = self._send([request._replace(flags=request.flags | NLM_F_DUMP)])
        interrupted = False
        while True:
            self._use()
            for reply in self._receive():
                if reply.sequence != sequence:  # of an earlier exchange that was given up
                    continue
                interrupted |= bool(reply.flags & NLM_F_DUMP_INTR)
                if reply.kind not in (NLMSG_DONE, NLMSG_ERROR):
                    yield reply
                    continue
                code, explanation = parse_ack(reply)
                if code:
                    raise _error(code, explanation, "the kernel refused a listing")
                if interrupted:
                    raise DumpInterruptedError(errno.EINTR, "the list changed while it was read")
                return

    def request(self, request: Request) -> list[Message]:
        """Send one request and return the replies, without the acknowledgement.

        Raises:
            NetlinkError: the kernel refused it.
        """
        sequence = self._send([request._replace(flags=request.flags | NLM_F_ACK)])
        replies: list[Message] = []
        while True:
            for reply in self._receive():
                if reply.sequence != sequence:
                    continue
                if reply.kind == NLMSG_ERROR:
                    code, explanation = parse_ack(reply)
                    if code:
                        raise _error(code, explanation, f"request {request.kind:#x} was refused")
                    return replies
                replies.append(reply)

    def batch(self, requests: Sequence[Request]) -> dict[int, NetlinkError]:
        """Send requests in one datagram; return the errors of the refused ones by index.

        Set NLM_F_ACK if the outcome of a request matters, and always in the last one that the
        kernel answers: the call waits for all acknowledgements. If the first message did not ask
        for one and is refused (NFNL_MSG_BATCH_BEGIN, for lack of memory or permission), the call
        does not wait for the others, which the kernel skips.
        """
        # The kernel answers each message in order, with an acknowledgement if it asked for one and
        # with an error in any case. Sequence numbers tell which message an answer is for.
        first = self._send(requests)
        waiting = {first + i for i, r in enumerate(requests) if r.flags & NLM_F_ACK}
        refused: dict[int, NetlinkError] = {}
        while waiting:
            for reply in self._receive():
                index = reply.sequence - first
                if reply.kind != NLMSG_ERROR or not 0 <= index < len(requests):
                    continue
                waiting.discard(reply.sequence)
                code, explanation = parse_ack(reply)
                if code:
                    what = f"message {index + 1} of {len(requests)} was refused"
                    refused[index] = _error(code, explanation, what)
                    refused[index].offset = blamed_offset(reply)
                    if index == 0 and not requests[0].flags & NLM_F_ACK:
                        waiting.clear()
        return refused

    def _send(self, requests: Sequence[Request]) -> int:
        """Send one datagram; return the sequence number of its first message."""
        self._use()
        if self._sequence >= _LAST_SEQUENCE:
            self._sequence = 0
        first = self._sequence + 1
        self._sequence += len(requests)
        data = [
            message(r.kind, r.flags | NLM_F_REQUEST, first + i, r.payload)
            for i, r in enumerate(requests)
        ]
        if len(data) > _BUFFERS:  # joining costs a copy, so it is avoided if possible
            data = [b"".join(data)]
        self._socket.sendmsg(data)
        return first

    def _receive(self, flags: int = 0) -> Iterator[Message]:
        try:
            return messages(self._socket.recv(_RECEIVE, flags))
        except BlockingIOError:
            raise TimeoutError(errno.ETIMEDOUT, "the kernel does not answer") from None
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                raise AnswersLostError(errno.ENOBUFS, "answers of the kernel were lost") from error
            raise


class BpfInstruction(NamedTuple):
    """An instruction of classic BPF (struct sock_filter)."""

    code: int
    if_true: int
    if_false: int
    operand: int


class Subscription(OfOneThread):
    """Notifications of multicast groups, received on the event loop."""

    def __init__(
        self,
        protocol: int,
        groups: Sequence[int],
        *,
        buffer: int = 4 << 20,
        wanted: Sequence[BpfInstruction] = (),
    ) -> None:
        """Open a socket and join multicast groups (RTNLGRP_*, NFNLGRP_*).

        Args:
            protocol: NETLINK_*.
            groups: the groups to join.
            buffer: bytes of notifications that may wait.
            wanted: a classic BPF program; the kernel drops messages for which it returns 0.
        """
        with ExitStack() as undo:
            self._socket = open_socket(protocol, buffer)
            undo.callback(self._socket.close)
            self._socket.setblocking(False)
            # The filter comes before the groups: no unwanted message is ever queued.
            if wanted:
                program = array("B", b"".join(struct.pack("=HBBI", *each) for each in wanted))
                filter_ = struct.pack("@HP", len(wanted), program.buffer_info()[0])  # sock_fprog
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
            for group in groups:
                self._socket.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, group)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the descriptor, which is readable while notifications wait."""
        return self._socket.fileno()

    async def receive(self) -> list[Message]:
        """Wait for notifications.

        Raises:
            AnswersLostError: some were lost, so the state that they describe must be read. The
                next call continues.
        """
        self._use()
        loop = asyncio.get_running_loop()
        try:
            return list(messages(await loop.sock_recv(self._socket, _RECEIVE)))
        except OSError as error:
            self._raise_lost(error)

    def waiting(self) -> list[Message]:
        """Return the notifications received so far, without waiting.

        Raises:
            AnswersLostError: as for `receive`.
        """
        self._use()
        found: list[Message] = []
        try:
            while True:
                found += messages(self._socket.recv(_RECEIVE))
        except BlockingIOError:
            return found
        except OSError as error:
            self._raise_lost(error)

    def _raise_lost(self, error: OSError) -> NoReturn:
        """Raise AnswersLostError if the queue overflowed, else the error itself."""
        if error.errno != errno.ENOBUFS:
            raise error
        # Empty the queue: until then the kernel keeps dropping, and reports that only once. It can
        # overflow again at the same time.
        while True:
            try:
                self._socket.recv(_RECEIVE)
            except BlockingIOError:
                break
            except OSError as again:
                if again.errno != errno.ENOBUFS:
                    raise
        raise AnswersLostError(errno.ENOBUFS, "notifications were lost") from error
