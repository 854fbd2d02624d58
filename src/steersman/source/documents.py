"""From the bytes of a manifest file to plain values with line numbers; kinds are in manifests.py.

YAML is read as kubectl reads it, and JSON also as a stream of objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import yaml

from steersman.model.yaml_bounds import BoundsError, Budget, refuse_deep

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


class Document(NamedTuple):
    """One document of a file."""

    value: Any
    line: int
    """Its first line, from 1."""
    item_lines: tuple[int, ...] = ()
    """First lines of the entries of its `items`; () if unknown (JSON)."""


class ListHead(NamedTuple):
    """A List without its items."""

    kind: str
    api_version: str | None


class _Loader(yaml.CSafeLoader):
    """PyYAML's safe loader with the plain scalars of kubectl's YAML (go-yaml).

    PyYAML reads YAML 1.1, in which `creationTimestamp` is a datetime and `1:20:30` (an unquoted
    address may look like it) a number to base 60; here they are strings.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own spelling


# The plain scalars that go-yaml resolves, by tag: a pattern, and the characters it can start with.
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (
        "bool",
        r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF",
        list("tTfFyYnNoO"),
    ),
    ("int", r"[-+]?(?:0b[01_]+|0[0-7_]*|[1-9][0-9_]*|0x[0-9a-fA-F_]+)", list("-+0123456789")),
    (
        "float",
        r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
    )


def read_documents(
    data: bytes, *, only_json: bool = False, bounds: Budget | None = None
) -> list[Document]:
    """Parse the documents of a file, without empty ones.

    YAML is a superset of JSON except for tabs and streams of objects, so a file that starts like
    JSON is parsed as JSON first.

    Args:
        data: the file, or a piece of it.
        only_json: refuse YAML.
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
        refuse_deep(text, _Loader, _MAX_DEPTH)
        nodes = list(yaml.compose_all(text, _Loader))
        values = [document.value for document in _yaml_documents(text, budget(len(text)))]
    except (yaml.YAMLError, BrokenFileError):
        return None
    # Several documents, or `items` twice (the last one counts): items cannot be read one by one.
    if len(nodes) != 1 or not isinstance(nodes[0], yaml.MappingNode) or len(values) != 1:
        return None
    keys = [key.value for key, _ in nodes[0].value]
    kind, version = values[0].get("kind"), values[0].get("apiVersion")
    if keys.count("items") != 1 or not isinstance(kind, str) or not kind.endswith("List"):
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
        refuse_deep(text, _Loader, _MAX_DEPTH)
        loader = _Loader(text)
        try:
            while loader.check_node():
                node = loader.get_node()
                if node is None:
                    continue
                bounds.take(node)
                line = int(node.start_mark.line) + 1
                try:
                    value = loader.construct_document(node)
                except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
                    # PyYAML fails in many ways on explicit tags (`!!int x`, `!!timestamp x`).
                    reason = f"holds a value that YAML refuses: {error}"
                    raise BrokenFileError(line, reason) from None
                if value is not None:
                    yield Document(value, line, _item_lines(node))
        finally:
            loader.dispose()
    except BoundsError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BrokenFileError(line, str(error.problem)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = error.problem or error.context or "unknown error"
        raise BrokenFileError(mark.line + 1 if mark else 1, f"is not YAML: {reason}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise BrokenFileError(line, f"is not YAML: {error.reason}") from None


def _item_lines(node: yaml.Node) -> tuple[int, ...]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == "items" and isinstance(value, yaml.SequenceNode):
                return tuple(int(item.start_mark.line) + 1 for item in value.value)
    return ()
