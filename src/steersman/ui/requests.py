"""What browsers send: addresses, forms with their files, and cookies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.message import Message
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl

import h11

from steersman.run.serve.http import Answer, Request

_MOST_FIELDS = 1000
_LONGEST_HEAD = 4096
"""Bytes of the headers of a field."""


class RefusedError(Exception):
    """A request that is answered by a status and a short text."""

    def __init__(self, status: int, text: str = "", headers: Mapping[str, str] | None = None):
        """Set the status, the text for the reader, and headers of the answer."""
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers or {}


class File(NamedTuple):
    """A file of a form."""

    name: str
    """"" if the reader chose none."""
    data: bytes


class Form(NamedTuple):
    """The fields of a form."""

    fields: Sequence[tuple[str, str]] = ()
    files: Mapping[str, File] = {}

    def text(self, name: str) -> str:
        """Return the first value of a field; "" if there is none."""
        return next(iter(self.texts(name)), "")

    def texts(self, name: str) -> list[str]:
        """Return all values of a field."""
        return [value for field, value in self.fields if field == name]


class Asked(NamedTuple):
    """A request to an address."""

    request: Request
    values: Mapping[str, str]
    """Parts of its path, by name."""
    form: Form = Form()
    """What a POST sends."""


class Route(NamedTuple):
    """An address."""

    method: str
    path: str
    """`{name}` stands for a part that is handed on."""
    answer: Callable[[Asked], Awaitable[Answer]]
    is_open: bool = False
    """Whether everybody may ask."""

    def values(self, path: str) -> dict[str, str] | None:
        """Return the named parts of a path; None if the path is another one."""
        ours, theirs = self.path.split("/"), path.split("/")
        if len(ours) != len(theirs):
            return None
        values = {}
        for our, their in zip(ours, theirs, strict=True):
            if our.startswith("{") and their:
                values[our.strip("{}")] = their
            elif our != their:
                return None
        return values


async def read_form(request: Request) -> Form:
    """Read the form of a request; one without a form has no fields.

    Raises:
        RefusedError: it cannot be read.
    """
    try:
        body = await request.read()
    except h11.RemoteProtocolError as error:
        large = error.error_status_hint == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        text = "the form is too large\n" if large else "the form cannot be read\n"
        raise RefusedError(error.error_status_hint, text) from None
    # In a thread: two megabytes of escapes take a while.
    return await asyncio.to_thread(_form, request.headers.get("content-type", ""), body)


def _form(content_type: str, body: bytes) -> Form:
    """Parse a form.

    Raises:
        RefusedError: it cannot be read.
    """
    kind = Message()
    kind["Content-Type"] = content_type
    match kind.get_content_type():
        case "application/x-www-form-urlencoded":
            text = body.decode(errors="replace")
            try:
                fields = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
            except ValueError:
                raise RefusedError(400, "the form has too many fields\n") from None
            return Form(fields)
        case "multipart/form-data":
            return _multipart(body, str(kind.get_boundary("")))
        case _:
            return Form()


def _multipart(body: bytes, boundary: str) -> Form:
    """Parse a form with files (RFC 7578)."""
    # A delimiter begins a line, the first one at the start; `--` follows the last one.
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(errors="replace"))
    if not boundary or len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise RefusedError(400, "the form is not whole\n")
    if len(parts) > _MOST_FIELDS:
        raise RefusedError(400, "the form has too many fields\n")
    fields, files = list[tuple[str, str]](), dict[str, File]()
    for part in parts[1:-1]:
        head, blank, data = part.partition(b"\r\n\r\n")
        if not blank or len(head) > _LONGEST_HEAD:
            raise RefusedError(400, "a field of the form cannot be read\n")
        field = Message()
        for line in head.decode(errors="replace").split("\r\n"):
            name, colon, value = line.partition(":")
            if colon and name.strip().lower() == "content-disposition":
                field["Content-Disposition"] = value.strip()
        name = str(field.get_param("name", "", "content-disposition"))
        file = field.get_filename()
        if file is None:
            fields.append((name, data.decode(errors="replace")))
        else:
            files.setdefault(name, File(file, data))
    return Form(fields, files)


def cookie(request: Request, name: str) -> str:
    """Return the value of a cookie; "" if there is none."""
    for each in request.headers.get("cookie", "").split(";"):
        known, _, value = each.strip().partition("=")
        if known == name:
            return value.strip('"')
    return ""
