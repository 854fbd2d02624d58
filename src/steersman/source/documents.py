"""From the bytes of a manifest file to plain values with line numbers; kinds are in manifests.py.

The file is YAML, or JSON, also as a stream of objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import msgspec

from steersman.model.yaml_reader import BoundsError, Budget, Document, YamlError, read_yaml

_MAX_DEPTH = 200  # levels; Kubernetes objects have about ten
_NODES = 1_000_000  # YAML nodes of any file, and more by its size
_BYTES_PER_NODE = 8  # real manifests have twelve and more


def budget(size: int) -> Budget:
    """Return the limits for a file of this many bytes: aliases can make it grow without bound."""
    return Budget(_NODES + size // _BYTES_PER_NODE, _MAX_DEPTH)


class BrokenFileError(Exception):
    """A file is not YAML or JSON; `line` counts from 1."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


class ListHead(NamedTuple):
    """A List without its items."""

    kind: str
    api_version: str | None


def read_documents(
    data: bytes, *, only_json: bool = False, bounds: Budget | None = None
) -> list[Document]:
    """Parse the documents of a file, without empty ones.

    YAML is a superset of JSON except for tabs and streams of objects, so a file that starts like
    JSON is parsed as JSON first.

    Args:
        data: the file, or a piece of it.
        bounds: the budget left for the whole file, if `data` is a piece.

    Raises:
        BrokenFileError: some part of it is not YAML (or, with `only_json`, not JSON).
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BrokenFileError(line, "is not UTF-8 text") from None
    if only_json or is_json(text):
        try:
            return list(_json_documents(text))
        except BrokenFileError:
            if only_json:
                raise
    return list(_yaml_documents(text, bounds or budget(len(data))))


def is_json(text: str) -> bool:
    """Whether a file starts like JSON."""
    return text.lstrip()[:1] in ("{", "[")


def list_head(text: str) -> ListHead | None:
    """Parse the YAML of a List without items; None if it may be something else."""
    try:
        documents = list(read_yaml(text, budget(len(text))))
    except YamlError:
        return None
    # Several documents, or `items` twice (the last one counts): items cannot be read one by one.
    if len(documents) != 1 or documents[0].repeated or not isinstance(documents[0].value, dict):
        return None
    kind, version = documents[0].value.get("kind"), documents[0].value.get("apiVersion")
    if not isinstance(kind, str) or not kind.endswith("List"):
        return None
    return ListHead(kind, version) if version is None or isinstance(version, str) else None


def _json_documents(text: str) -> Iterator[Document]:
    at = _skip_space(text, 0)
    line, counted = 1, 0
    with suppress(msgspec.DecodeError, ValueError, RecursionError):  # one value, the usual case
        value = msgspec.json.decode(text)
        yield Document(value, 1 + text.count("\n", 0, at))
        return
    # A stream of values, or a syntax error: the json module says where a value ends.
    decoder = json.JSONDecoder()
    while at < len(text):
        line, counted = line + text.count("\n", counted, at), at
        try:
            _, end = decoder.raw_decode(text, at)
            # Decoded twice: only msgspec refuses NaN, lone surrogates and so on.
            value = msgspec.json.decode(text[at:end])
        except json.JSONDecodeError as error:
            raise BrokenFileError(error.lineno, f"is not JSON: {error.msg}") from None
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BrokenFileError(line, f"is not JSON: {error}") from None
        yield Document(value, line)
        at = _skip_space(text, end)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _yaml_documents(text: str, bounds: Budget) -> Iterator[Document]:
    try:
        for document in read_yaml(text, bounds):
            if document.value is not None:
                yield document
    except BoundsError as error:
        raise BrokenFileError(error.line, error.problem) from None
    except YamlError as error:
        raise BrokenFileError(error.line, f"is not YAML: {error.problem}") from None
