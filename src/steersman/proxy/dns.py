"""Questions of DNS that are asked again with search suffixes, as upstream's winuserspace did. Pure.

Pods on Windows could not be given a search list; so the proxy in front of DNS tried it for them.
Source: RFC 1035, sections 3.1, 4.1 and 4.1.4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

_HEADER = struct.Struct(">HHHHHH")
_RECORD = struct.Struct(">HHIH")
_A, _CNAME, _AAAA = 1, 5, 28
_POINTER = 0xC0
_MOST_JUMPS = 32
_QUESTION_AT = 12


class BrokenMessageError(ValueError):
    """Not a message of DNS, or none that can be taken apart."""


class Question(NamedTuple):
    """The one question of a query."""

    name: tuple[bytes, ...]
    """Labels."""
    rest: bytes
    """Type and class."""

    @property
    def wire(self) -> bytes:
        """As in a message."""
        return _wire(self.name) + self.rest


def queries(query: bytes, suffixes: Iterable[str]) -> list[bytes]:
    """The queries to send one after another until one is answered: the client's own first.

    Only that one where it is not a plain question for addresses.
    """
    try:
        question = read_question(query)
    except BrokenMessageError:
        return [query]
    if int.from_bytes(question.rest[:2], "big") not in (_A, _AAAA):
        return [query]
    end = _QUESTION_AT + len(question.wire)
    return [query, *(_asked(query, question, suffix, end) for suffix in suffixes)]


def failed(reply: bytes) -> bool:
    """Whether a reply says that there is no answer."""
    return len(reply) >= _QUESTION_AT and bool(reply[3] & 0xF)


def restored(reply: bytes, query: bytes) -> bytes:
    """A reply to a query with a suffix, as if it were to the client's; one to that as it is.

    Addresses and aliases stay, records of other kinds and sections go.

    Raises:
        BrokenMessageError: it cannot be taken apart.
    """
    asked, searched = read_question(query), read_question(reply)
    if asked == searched:
        return reply
    number, flags, _, count, _, _ = _HEADER.unpack_from(reply)
    at = _QUESTION_AT + len(searched.wire)
    records = []
    for _ in range(count):
        record, at = _record(reply, at, searched.name)
        records += [record] if record else []
    header = _HEADER.pack(number, flags, 1, len(records), 0, 0)
    return header + asked.wire + b"".join(records)


def read_question(message: bytes) -> Question:
    """The question of a message that has one.

    Raises:
        BrokenMessageError: there is none, or more than one.
    """
    if len(message) < _QUESTION_AT or _HEADER.unpack_from(message)[2] != 1:
        raise BrokenMessageError("not one question")
    name, at = _name(message, _QUESTION_AT)
    if len(message) < at + 4 or at != _QUESTION_AT + len(_wire(name)):
        raise BrokenMessageError("the question is cut off")
    return Question(name, message[at : at + 4])


def _asked(query: bytes, question: Question, suffix: str, end: int) -> bytes:
    labels = tuple(label.encode() for label in suffix.split(".") if label)
    longer = Question((*question.name, *labels), question.rest)
    return query[:_QUESTION_AT] + longer.wire + query[end:]


def _record(message: bytes, at: int, searched: tuple[bytes, ...]) -> tuple[bytes, int]:
    """A record without pointers but to the question, b"" for one that is left out; its end."""
    owner, at = _name(message, at)
    if len(message) < at + _RECORD.size:
        raise BrokenMessageError("a record is cut off")
    kind, group, seconds, size = _RECORD.unpack_from(message, at)
    at += _RECORD.size
    data = message[at : at + size]
    if len(data) != size or kind not in (_A, _AAAA, _CNAME):
        return b"", at + size
    if kind == _CNAME:
        data = _wire(_name(message, at)[0])
    name = bytes((_POINTER, _QUESTION_AT)) if owner == searched else _wire(owner)
    return name + _RECORD.pack(kind, group, seconds, len(data)) + data, at + size


def _wire(name: Iterable[bytes]) -> bytes:
    return b"".join(bytes((len(label),)) + label for label in name) + b"\0"


def _name(message: bytes, at: int) -> tuple[tuple[bytes, ...], int]:
    """The labels of a name, and where what follows it begins."""
    labels, end = [], 0
    for _ in range(_MOST_JUMPS * 8):
        size = _byte(message, at)
        if size & _POINTER == _POINTER:
            end = end or at + 2
            at = (size & ~_POINTER) << 8 | _byte(message, at + 1)
        elif size:
            labels.append(message[at + 1 : at + 1 + size])
            at += 1 + size
        else:
            return tuple(labels), end or at + 1
    raise BrokenMessageError("a name without an end")


def _byte(message: bytes, at: int) -> int:
    if at >= len(message):
        raise BrokenMessageError("a name is cut off")
    return message[at]
