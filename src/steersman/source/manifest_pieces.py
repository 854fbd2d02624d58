"""Read a changed manifest file again: parse only the pieces of it that changed. Pure.

A piece is a document, or an item of a List, as text that means the same if it is read by itself.
Parsing YAML takes about a fifth of a millisecond for an object, so that a file of a few thousand
Services could not be followed within 200 ms otherwise. Text that cannot be cut with certainty is
read as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec

from steersman.source.documents import BrokenFileError, budget, is_json, list_head
from steersman.source.manifests import Located, Manifest, read_manifest

_DOCUMENT_START = re.compile(r"^---(?=[ \t\n]|$)", re.MULTILINE)
_LIST_ITEMS = re.compile(r"^items: *\r?\n( *)- ", re.MULTILINE)


class Piece(NamedTuple):
    """A part of a file."""

    text: str
    line: int
    """Line of the file that is the first of `text`; below 1 if `text` has a head of ours."""


KnownPieces: TypeAlias = Mapping[bytes, tuple[int, tuple[Located, ...]]]
"""The line and the objects of each piece, by the digest of its text."""


class _RawList(msgspec.Struct):
    kind: str
    items: list[msgspec.Raw]
    api_version: str | None = msgspec.field(name="apiVersion", default=None)


def update_manifest(path: str, data: bytes, known: KnownPieces) -> tuple[Manifest, KnownPieces]:
    """Read a file like `read_manifest`, but parse only pieces that are not known.

    Returns:
        The Manifest, and the pieces of the file.

    Raises:
        BrokenFileError: it is not YAML or JSON.
    """
    try:
        pieces = list(_cut(path, data.decode("utf-8-sig")))
        if len(pieces) > 1:
            bounds = budget(len(data))
            parts: list[Manifest] = []
            now: dict[bytes, tuple[int, tuple[Located, ...]]] = {}
            for text, line in pieces:
                piece = text.encode()
                key = blake2b(piece, digest_size=16).digest()
                before = known.get(key) or now.get(key)
                if before is None:
                    part = read_manifest(path, piece, line, bounds)
                    if part.findings or part.endpoints:  # they mention lines: parse them each time
                        parts.append(part)
                        continue
                    before = line, part.objects
                by, objects = line - before[0], before[1]
                if by:  # the same text at another line
                    objects = tuple(o._replace(where=f"{path} line {o.line + by}") for o in objects)
                now[key] = line, objects
                parts.append(Manifest(objects))
            whole = Manifest(
                tuple(each for part in parts for each in part.objects),
                tuple(each for part in parts for each in part.findings),
                tuple(each for part in parts for each in part.endpoints),
            )
            return whole, now
    except (UnicodeDecodeError, BrokenFileError):
        pass  # a piece may be broken only because it was cut, and the line would be a guess
    return read_manifest(path, data), {}


def _cut(path: str, text: str) -> Iterator[Piece]:
    """Yield the pieces of a file; none if it cannot be cut with certainty."""
    if path.endswith(".json") or is_json(text):
        try:
            found = msgspec.json.decode(text, type=_RawList)
        except (msgspec.DecodeError, RecursionError):
            return
        if found.kind.endswith("List"):
            line = text[: len(text) - len(text.lstrip())].count("\n") + 1
            head = {"kind": found.kind, "apiVersion": found.api_version}
            for item in found.items:
                whole = {**{k: v for k, v in head.items() if v is not None}, "items": [item]}
                yield Piece(msgspec.json.encode(whole).decode(), line)
    elif not _is_uncertain(text):
        starts = [0, *(found.start() for found in _DOCUMENT_START.finditer(text)), len(text)]
        line = 1
        for start, end in pairwise(starts):
            document = text[start:end]
            yield from _cut_document(document, line)
            line += document.count("\n")


def _is_uncertain(text: str) -> bool:
    """Whether a text has directives, which apply to later documents, or line ends of YAML alone."""
    if text.count("\r") != text.count("\r\n"):
        return True
    return text.startswith("%") or any(mark in text for mark in ("\n%", "\x85", "\u2028", "\u2029"))


def _cut_document(document: str, line: int) -> Iterator[Piece]:
    """Yield the items of a YAML List as kubectl prints it; any other document is one piece."""
    begin = _LIST_ITEMS.search(document) if "\nitems:" in document else None
    if not begin:
        yield Piece(document, line)
        return

    # Cut the items out: the rest must still be a List, and one document.
    at, indent = begin.start(1), begin[1]
    # The items end at the first line that is indented less, or as much without a dash.
    rest = re.compile(rf"^ {{0,{len(indent)}}}(?=[^\s#-])", re.MULTILINE).search(document, at)
    end = rest.start() if rest else len(document)
    outer = list_head(f"{document[: begin.start()]}items: []\n{document[end:]}")
    if outer is None:
        yield Piece(document, line)
        return

    # Each item becomes a List of its own.
    kind, version = (msgspec.json.encode(word).decode() for word in outer)
    head = f"kind: {kind}\napiVersion: {version}\nitems:\n"
    dash = re.compile(rf"^{indent}- ", re.MULTILINE)
    starts = [found.start() for found in dash.finditer(document, at, end)]
    line += document.count("\n", 0, at)
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        item = document[start:stop]
        yield Piece(head + item, line - 3)  # the head has three lines
        line += item.count("\n")
