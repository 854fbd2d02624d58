"""From the bytes of a manifest file to plain values with line numbers; kinds are in manifests.py.

The file is YAML, or JSON, also as a stream of objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress

import msgspec

from steersman.model.yaml_reader import BoundsError, Budget, Document, YamlError, read_yaml

_MAX_DEPTH = 200  # levels; Kubernetes objects have about ten
_NODES = 1_000_000  # YAML nodes of any file, and more by its size
_BYTES_PER_NODE = 8  # real manifests have twelve and more


class BrokenFileError(Exception):
    """A file is not YAML or JSON; `line` counts from 1."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


def read_documents(data: bytes, *, only_json: bool = False) -> Iterable[Document]:
    """Parse the documents of a file, without empty ones; those of YAML one after the other.

    YAML is a superset of JSON except for tabs and streams of objects, so a file that starts like
    JSON is parsed as JSON first.

    Raises:
        BrokenFileError: some part of it is not YAML (or, with `only_json`, not JSON).
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BrokenFileError(line, "is not UTF-8 text") from None
    if only_json or text.lstrip()[:1] in ("{", "["):
        try:
            return list(_json_documents(text))
        except BrokenFileError:
            if only_json:
                raise
    # Aliases can make a file grow without bound.
    bounds = Budget(_NODES + len(data) // _BYTES_PER_NODE, _MAX_DEPTH)
    return _yaml_documents(text, bounds)


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
