"""DNS queries that are repeated with search suffixes, as upstream's winuserspace mode did.

Pods on Windows could not have a search list, so the proxy in front of DNS tried it for them. Only
SearchingSession touches sockets. Source: RFC 1035, sections 3.1, 4.1 and 4.1.4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from steersman.model.plan import Endpoint
from steersman.proxy.budget import Reservation
from steersman.proxy.udp import Client, Session, UdpListener

PORT_NAME = "dns"
"""Name of the Service ports whose queries are repeated, as upstream had it."""
_MAX_PENDING = 64  # queries of one client that wait for answers
_HEADER = struct.Struct(">HHHHHH")
_RECORD = struct.Struct(">HHIH")
_A, _CNAME, _AAAA = 1, 5, 28
_POINTER = 0xC0
_MAX_LABELS = 256  # and pointers of a name, so that pointers in a circle end
_MAX_NAME = 255  # bytes (RFC 1035, 2.3.4)
_MAX_RECORDS = 512  # a pointer in each may stand for a long name
_QUESTION_AT = 12


class BrokenMessageError(ValueError):
    """Not a DNS message, or not one that this module can read."""


class Question(NamedTuple):
    """The only question of a query."""

    name: tuple[bytes, ...]
    """Labels."""
    rest: bytes
    """Type and class."""

    @property
    def wire(self) -> bytes:
        """The bytes of the question in a message."""
        return _wire(self.name) + self.rest


def queries(query: bytes, suffixes: Iterable[str]) -> list[bytes]:
    """Return the queries to send one after the other until one is answered.

    The client's own query is the first. It is the only one unless it asks for addresses.
    """
    try:
        question = read_question(query)
    except BrokenMessageError:
        return [query]
    if int.from_bytes(question.rest[:2], "big") not in (_A, _AAAA):
        return [query]
    # The rest (EDNS options, say) stays as it is.
    end = _QUESTION_AT + len(question.wire)
    found = [query]
    for suffix in suffixes:
        labels = tuple(label.encode() for label in suffix.split(".") if label)
        longer = Question((*question.name, *labels), question.rest)
        found.append(query[:_QUESTION_AT] + longer.wire + query[end:])
    return found


def failed(reply: bytes) -> bool:
    """Whether a reply has a response code other than success."""
    return len(reply) >= _QUESTION_AT and bool(reply[3] & 0xF)


def restored(reply: bytes, query: bytes) -> bytes:
    """Return the reply to a query with a suffix as a reply to the client's query.

    Addresses and aliases stay; records of other kinds and the other sections are dropped. A reply
    to the client's own query is returned unchanged.

    Raises:
        BrokenMessageError: the reply cannot be read.
    """
    asked, searched = read_question(query), read_question(reply)
    if asked == searched:
        return reply
    number, flags, _, count, _, _ = _HEADER.unpack_from(reply)
    if count > _MAX_RECORDS:
        raise BrokenMessageError(f"{count} records")
    at = _QUESTION_AT + len(searched.wire)
    records = []
    for _ in range(count):
        owner, at = _name(reply, at)
        if len(reply) < at + _RECORD.size:
            raise BrokenMessageError("a record is cut off")
        kind, group, seconds, size = _RECORD.unpack_from(reply, at)
        start = at + _RECORD.size
        data, at = reply[start : start + size], start + size
        if len(data) != size or kind not in (_A, _AAAA, _CNAME):
            continue
        # Pointers would lead elsewhere in the new message: only those to the question are kept.
        if kind == _CNAME:
            data = _wire(_name(reply, start)[0])
        name = bytes((_POINTER, _QUESTION_AT)) if owner == searched.name else _wire(owner)
        records.append(name + _RECORD.pack(kind, group, seconds, len(data)) + data)
    header = _HEADER.pack(number, flags, 1, len(records), 0, 0)
    return header + asked.wire + b"".join(records)


def read_question(message: bytes) -> Question:
    """Return the question of a message.

    Raises:
        BrokenMessageError: it has none, or more than one.
    """
    if len(message) < _QUESTION_AT or _HEADER.unpack_from(message)[2] != 1:
        raise BrokenMessageError("not one question")
    name, at = _name(message, _QUESTION_AT)
    if len(message) < at + 4 or at != _QUESTION_AT + len(_wire(name)):
        raise BrokenMessageError("the question is cut off")
    return Question(name, message[at : at + 4])


def _wire(name: Iterable[bytes]) -> bytes:
    return b"".join(bytes((len(label),)) + label for label in name) + b"\0"


def _name(message: bytes, at: int) -> tuple[tuple[bytes, ...], int]:
    """Return the labels of a name, and the position after it."""
    labels, end, length = [], 0, 0
    for _ in range(_MAX_LABELS):
        size = _byte(message, at)
        # A length, or a pointer of two bytes to another place in the message.
        if size & _POINTER == _POINTER:
            end = end or at + 2
            at = (size & ~_POINTER) << 8 | _byte(message, at + 1)
        elif size:
            labels.append(message[at + 1 : at + 1 + size])
            at += 1 + size
            length += 1 + size
            if length > _MAX_NAME:
                raise BrokenMessageError(f"a name is longer than {_MAX_NAME} bytes")
        else:
            return tuple(labels), end or at + 1
    raise BrokenMessageError("a name without an end")


def _byte(message: bytes, at: int) -> int:
    if at >= len(message):
        raise BrokenMessageError("a name is cut off")
    return message[at]


class SearchingSession(Session):
    """Repeats a client's queries with suffixes until there is an answer or no suffix is left."""

    def __init__(
        self,
        listener: UdpListener,
        client: Client,
        endpoint: Endpoint,
        reservation: Reservation,
        *,
        suffixes: Sequence[str],
    ) -> None:
        """Make a session (see Session) that tries these suffixes."""
        super().__init__(listener, client, endpoint, reservation)
        self._suffixes = suffixes
        self._pending: dict[bytes, list[bytes]] = {}
        """By query ID: the client's query, and those still to try."""

    def send(self, data: bytes) -> None:
        """Pass on the client's query, and remember the ones to try after it."""
        if len(self._pending) >= _MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[data[:2]] = queries(data, self._suffixes)
        super().send(data)

    def received(self, data: bytes) -> None:
        """Try the next query, or pass on a reply to the client's query."""
        pending = self._pending.get(data[:2])
        if pending is None:
            super().received(data)
            return
        query, *left = pending
        if failed(data) and left:
            self._pending[data[:2]] = [query, *left[1:]]
            super().send(left[0])
            return
        # Success, or no suffix left: the client gets this reply.
        del self._pending[data[:2]]
        try:
            answer = restored(data, query)
        except BrokenMessageError:
            answer = data
        super().received(answer)
