"""Reading a manifest file again at the cost of what changed in it: known pieces are not parsed.

A piece is a document, or an item of a List, as text that says the same when it is read by itself.
Parsing YAML takes about half a millisecond for an object, so that a file of a thousand Services
could not be followed within 200 ms otherwise. What cannot be cut with certainty is read whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec

from steersman.model.yaml_bounds import Budget
from steersman.source.documents import BrokenFileError, budget, is_json, list_shell
from steersman.source.manifests import Located, Manifest, read_manifest

Known: TypeAlias = Mapping[bytes, tuple[int, tuple[Located, ...]]]
"""By the digest of a piece: the line that it was at, and the objects in it."""

_START = re.compile(r"^---(?=[ \t\n]|$)", re.MULTILINE)
_UNSURE = re.compile(r"^%|\r(?!\n)|[\x85\u2028\u2029]", re.MULTILINE)
"""Directives, which hold for what follows, and line ends that only YAML counts."""
_ITEMS = re.compile(r"^items: *\r?\n( *)- ", re.MULTILINE)


class Piece(NamedTuple):
    """A part of a file."""

    text: str
    line: int
    """Line of the file that is the first one of `text`; below 1 where `text` has a head of ours."""


class _RawList(msgspec.Struct):
    kind: str
    items: list[msgspec.Raw]
    api_version: str | None = msgspec.field(name="apiVersion", default=None)


def read_again(path: str, data: bytes, known: Known) -> tuple[Manifest, Known]:
    """Do what `read_manifest` does, taking the objects of pieces that are known from there.

    Returns:
        The Manifest, and what is known of this file's pieces now.

    Raises:
        BrokenFileError: it is not YAML or JSON.
    """
    try:
        pieces = list(_cut(path, data.decode("utf-8-sig")))
        if len(pieces) > 1:
            return _read_pieces(path, pieces, known, budget(len(data)))
    except (UnicodeDecodeError, BrokenFileError):
        pass  # a piece may be broken only because it is one, and the line would be a guess
    return read_manifest(path, data), {}


def _read_pieces(
    path: str, pieces: list[Piece], known: Known, bounds: Budget
) -> tuple[Manifest, Known]:
    parts: list[Manifest] = []
    now: dict[bytes, tuple[int, tuple[Located, ...]]] = {}
    for text, line in pieces:
        data = text.encode()
        key = blake2b(data, digest_size=16).digest()
        before = known.get(key) or now.get(key)
        if before is None:
            part = read_manifest(path, data, line, bounds)
            if part.findings or part.endpoints:
                parts.append(part)
                continue
            before = line, part.objects
        now[key] = line, _moved(before[1], path, line - before[0])
        parts.append(Manifest(now[key][1]))
    return _joined(parts), now


def _moved(objects: tuple[Located, ...], path: str, lines: int) -> tuple[Located, ...]:
    if not lines:
        return objects
    return tuple(each._replace(where=f"{path} line {each.line + lines}") for each in objects)


def _joined(parts: list[Manifest]) -> Manifest:
    return Manifest(
        tuple(each for part in parts for each in part.objects),
        tuple(each for part in parts for each in part.findings),
        tuple(each for part in parts for each in part.endpoints),
    )


def _cut(path: str, text: str) -> Iterator[Piece]:
    if path.endswith(".json") or is_json(text):
        yield from _json_items(text)
    elif not _UNSURE.search(text):
        starts = [0, *(found.start() for found in _START.finditer(text)), len(text)]
        line = 1
        for start, end in pairwise(starts):
            document = text[start:end]
            yield from _yaml_items(document, line)
            line += document.count("\n")


def _json_items(text: str) -> Iterator[Piece]:
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


def _yaml_items(document: str, line: int) -> Iterator[Piece]:
    """Cut the items of a List as kubectl prints it; any other document is one piece."""
    begin = _ITEMS.search(document) if "\nitems:" in document else None
    if not begin:
        yield Piece(document, line)
        return
    at, indent = begin.start(1), begin[1]
    rest = re.compile(rf"^ {{0,{len(indent)}}}(?=[^\s#-])", re.MULTILINE).search(document, at)
    end = rest.start() if rest else len(document)
    shell = list_shell(f"{document[: begin.start()]}items: []\n{document[end:]}")
    if shell is None:
        yield Piece(document, line)
        return
    kind, version = (msgspec.json.encode(word).decode() for word in shell)
    head = f"kind: {kind}\napiVersion: {version}\nitems:\n"
    dash = re.compile(rf"^{indent}- ", re.MULTILINE)
    starts = [found.start() for found in dash.finditer(document, at, end)]
    line += document.count("\n", 0, at)
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        item = document[start:stop]
        yield Piece(head + item, line - 3)
        line += item.count("\n")
