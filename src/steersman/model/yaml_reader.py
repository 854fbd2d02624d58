"""Read YAML as Kubernetes reads it, within limits: configurations, kubeconfigs and manifests.

    text --libyaml--> events --> plain values, and the line where each document begins

A plain scalar has the type that it has for kubectl (sigs.k8s.io/yaml): YAML 1.1, but a date and
`1:20:30` are texts, and so are keys. Tags other than those of scalars are ignored.

PyYAML's own loader has no limits. It recurses in C, so that deep nesting crashes the process, and
`&a [*a, *a]`, or ten levels of ten aliases each, are a few bytes that keep everything busy that
walks through the result. So values are built from events here, and every node is counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import msgspec
import yaml

Plain: TypeAlias = "dict[str, Plain] | list[Plain] | str | int | float | bool | None"

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **{word: True for yes in ("true", "yes", "on") for word in (yes, yes.title(), yes.upper())},
    **{word: False for no in ("false", "no", "off") for word in (no, no.title(), no.upper())},
}
_INT = re.compile(r"[-+]?(?:0b[01]+|0x[0-9a-fA-F]+|0o?[0-7]+|[1-9][0-9]*|0)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", re.ASCII)
_NUMBER_START = frozenset("+-.0123456789")
_TAG = "tag:yaml.org,2002:"
_MERGE = "<<"
_SCALAR = 64
"""Characters of a scalar that count as one more node."""


class YamlError(Exception):
    """A text cannot be read; `line` counts from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem


class BoundsError(YamlError):
    """A text exceeds a limit."""


class Document(NamedTuple):
    """One document of a file."""

    value: Plain
    line: int
    """Its first line, from 1."""
    item_lines: tuple[int, ...] = ()
    """First lines of the entries of its `items`; () if unknown."""
    repeated: tuple[str, ...] = ()
    """A sentence for each key that its mapping had before; the last one counts."""


class Budget(msgspec.Struct):
    """The nodes that texts may still have, with all aliases expanded, and their nesting."""

    nodes: int
    deepest: int


def read_yaml(text: str, budget: Budget) -> Iterator[Document]:
    """Yield the documents of a text.

    Args:
        budget: its limits; the nodes of the text are subtracted.

    Raises:
        YamlError: it is not YAML, or exceeds the budget.
    """
    try:
        parser = yaml.CSafeLoader(text)
        try:
            while parser.check_event():
                event = parser.get_event()
                if isinstance(event, yaml.DocumentStartEvent):
                    yield _Builder(budget).build(parser)
        finally:
            parser.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "unknown error"
        raise YamlError(mark.line + 1 if mark else 1, problem) from None
    except yaml.reader.ReaderError as error:
        raise YamlError(text.count("\n", 0, error.position) + 1, str(error.reason)) from None
    except UnicodeEncodeError as error:  # a lone surrogate
        line = text.count("\n", 0, error.start) + 1
        raise YamlError(line, f"is not a text: {error.reason}") from None


def is_text(word: str) -> bool:
    """Return whether a plain scalar is read as a text."""
    return word != _MERGE and isinstance(_plain_value(word), str)


class _Anchored(NamedTuple):
    """A value that aliases refer to."""

    value: Plain
    nodes: int
    height: int
    """Levels of collections in it."""


class _Collection(msgspec.Struct):
    """A mapping or sequence whose end has not been read."""

    entries: dict[str, Plain] | list[Plain]
    anchor: str | None
    line: int
    left: int
    """The budget at its start."""
    height: int = 1
    """Levels of collections in it, itself included."""
    key: str | None = None
    """The key of the next value; None if a key is next."""
    key_line: int = 0
    merges: bool = False
    """Whether that key is `<<`."""
    merged: dict[str, Plain] = {}
    """The entries of the mappings under `<<`."""
    lines: list[int] = []
    """The first lines of its entries, for `items`."""


class _Builder:
    """Builds the value of one document."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._stack: list[_Collection] = []
        self._anchors: dict[str, _Anchored | None] = {}
        """By name; None while the value is being read."""
        self._value: Plain = None
        self._line = 0
        """The line of the event, from 1."""
        self._item_lines: tuple[int, ...] = ()
        self._repeated: list[str] = []

    def build(self, parser: Any) -> Document:
        """Read the events of a document."""
        first, scalar, end = 0, yaml.ScalarEvent, yaml.DocumentEndEvent
        while (kind := type(event := parser.get_event())) is not end:
            self._line = event.start_mark.line + 1
            first = first or self._line
            if kind is scalar:
                self._scalar(event)
            elif kind is yaml.AliasEvent:
                self._alias(event.anchor or "")
            elif isinstance(event, yaml.CollectionStartEvent):
                self._begin({} if kind is yaml.MappingStartEvent else [], event.anchor)
            else:
                self._end()
        return Document(self._value, first, self._item_lines, tuple(self._repeated))

    def _scalar(self, event: Any) -> None:
        text, is_plain = event.value, event.implicit[0]
        nodes = 1 + len(text) // _SCALAR
        self._take(nodes)
        collection = self._stack[-1] if self._stack else None
        if collection and collection.key is None and isinstance(collection.entries, dict):
            value: Plain = text
            collection.key, collection.key_line = text, self._line
            collection.merges = is_plain and text == _MERGE
        else:
            try:
                value = _plain_value(text) if is_plain else _tagged_value(text, event.tag)
            except ValueError as error:
                raise YamlError(self._line, str(error)) from None
            self._add(value, self._line)
        if event.anchor:
            self._anchors[event.anchor] = _Anchored(value, nodes, 0)

    def _alias(self, name: str) -> None:
        if name not in self._anchors:
            raise YamlError(self._line, f"found undefined alias {name!r}")
        anchored = self._anchors[name]
        if anchored is None:
            raise BoundsError(self._line, f"{name!r} holds itself by an alias")
        self._take(anchored.nodes, "grows too large by its aliases")
        if len(self._stack) + anchored.height > self._budget.deepest:
            raise BoundsError(self._line, "is nested too deeply by its aliases")
        collection = self._stack[-1]  # no document is an alias alone: its anchor comes first
        if collection.key is None and isinstance(collection.entries, dict):
            if not isinstance(anchored.value, str):
                raise YamlError(self._line, "an alias that is a key must be of a text")
            collection.key, collection.key_line = anchored.value, self._line
            collection.merges = False
        else:
            self._add(anchored.value, self._line, anchored.height)

    def _begin(self, entries: dict[str, Plain] | list[Plain], anchor: str | None) -> None:
        if self._stack:
            parent = self._stack[-1]
            if parent.key is None and isinstance(parent.entries, dict):
                raise YamlError(self._line, "a key must be a scalar")
        self._stack.append(_Collection(entries, anchor, self._line, self._budget.nodes))
        self._take(1)
        if len(self._stack) > self._budget.deepest:
            raise BoundsError(self._line, "is nested too deeply")
        if anchor:
            self._anchors[anchor] = None

    def _end(self) -> None:
        collection = self._stack.pop()
        value: Plain = collection.entries
        if collection.merged and isinstance(value, dict):
            value = collection.merged | value
        if collection.anchor:
            nodes = collection.left - self._budget.nodes
            self._anchors[collection.anchor] = _Anchored(value, nodes, collection.height)
        if len(self._stack) == 1 and self._stack[0].key == "items":
            self._item_lines = tuple(collection.lines)
        self._add(value, collection.line, collection.height)

    def _add(self, value: Plain, line: int, height: int = 0) -> None:
        """Add a value that begins at a line to the innermost collection."""
        if not self._stack:
            self._value = value
            return
        collection = self._stack[-1]
        collection.height = max(collection.height, height + 1)
        if isinstance(collection.entries, list):
            collection.entries.append(value)
            collection.lines.append(line)
            return
        key, collection.key = collection.key or "", None
        if collection.merges:
            self._merge(value, collection.merged)
            return
        if key in collection.entries:
            shown = json.dumps(key, ensure_ascii=False)
            self._repeated.append(f"line {collection.key_line}: key {shown} already set in map")
        collection.entries[key] = value

    def _merge(self, value: Plain, merged: dict[str, Plain]) -> None:
        """Add the entries of a mapping, or of several of which the first counts."""
        for part in reversed(value if isinstance(value, list) else [value]):
            if not isinstance(part, dict):
                problem = "map merge requires map or sequence of maps as the value"
                raise YamlError(self._line, problem)
            merged |= part

    def _take(self, nodes: int, problem: str = "has too many values") -> None:
        self._budget.nodes -= nodes
        if self._budget.nodes < 0:
            raise BoundsError(self._line, problem)


def _plain_value(text: str) -> Plain:
    """Return the value of a scalar without quotes and tag."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _NUMBER_START:
        return text
    digits = text.replace("_", "")
    if _INT.fullmatch(digits):
        bare = digits.lstrip("+-")
        octal = bare[0] == "0" and bare[1:].isdigit()
        number = int(digits, 8 if octal else 0)
        if -(2**63) <= number < 2**64:
            return number
    if _FLOAT.fullmatch(digits):
        value = float(digits)
        return text if math.isinf(value) else value
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _tagged_value(text: str, tag: str | None) -> Plain:
    """Return the value of a scalar with quotes or a tag.

    Raises:
        ValueError: the tag is one of a number, and it is none.
    """
    match (tag or "").removeprefix(_TAG):
        case "null":
            return None
        case "bool":
            return _WORDS.get(text) if isinstance(_WORDS.get(text), bool) else text
        case "int":
            value = _plain_value(text)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{text!r} is not a whole number")
            return value
        case "float":
            value = _plain_value(text)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{text!r} is not a number")
            return float(value)
    return text
