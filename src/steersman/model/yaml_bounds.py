"""Limit the depth of YAML, and its size with all aliases expanded.

PyYAML has no limits. Its composer recurses in C without a check of the stack, so deep nesting
crashes the process. And `&a [*a, *a]`, or ten levels of ten aliases each, are a few bytes that
keep everything busy that walks through the result.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_BRACKET = re.compile(r"[][{}]")
_LONG = 4 << 20
"""Length of a text, in characters, from which its events are always counted before composing."""
_MOST_EVENTS = 2_000_000
"""Events of one document or piece; each takes about half a kilobyte as a node."""
_SCALAR = 64
"""Characters of a scalar that count as one more node."""


class BoundsError(yaml.MarkedYAMLError):
    """YAML exceeds a limit; `problem` says which."""


def refuse_deep(text: str, loader: type[Any], deepest: int) -> None:
    """Raise BoundsError if YAML nests more than `deepest` levels, or has too many values."""
    indented = re.compile(rf"^[-?: ]{{{deepest},}}", re.MULTILINE)
    if len(text) < _LONG and not _has_deep_brackets(text, deepest) and not indented.search(text):
        return  # no sign of nesting; otherwise only the parser can tell it from strings
    # Parsing yields events without recursion, so depth does no harm here.
    depth = 0
    for count, event in enumerate(yaml.parse(text, loader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > deepest:
            raise _beyond(event, "is nested too deeply")
        if count > _MOST_EVENTS:
            raise _beyond(event, "has too many values")


def _has_deep_brackets(text: str, deepest: int) -> bool:
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > deepest:
            return True
    return False


class Budget:
    """The number of nodes that a text may have, with all aliases expanded."""

    def __init__(self, nodes: int, deepest: int) -> None:
        self._left = nodes
        self._deepest = deepest

    def take(self, document: yaml.Node) -> None:
        """Subtract the nodes of a document, which must have passed `refuse_deep`.

        Raises:
            BoundsError: too few nodes are left, or an alias refers to a node that contains it.
        """
        size, _ = self._measure(document, {})
        self._left -= size

    def _measure(
        self, node: yaml.Node, known: dict[int, tuple[int, int] | None]
    ) -> tuple[int, int]:
        """Return the number of nodes and of levels below a node; `known` is a cache by id."""
        # An alias is the same node again: count it from the cache, so that this takes linear time.
        if id(node) in known:
            measured = known[id(node)]
            if measured is None:
                raise _beyond(node, "holds itself by an alias")
            return measured
        known[id(node)] = None  # in progress
        size, depth = 1, 0
        if isinstance(node, yaml.ScalarNode):
            size += len(node.value) // _SCALAR
        else:
            children = node.value
            if isinstance(node, yaml.MappingNode):
                children = [child for pair in node.value for child in pair]
            for child in children:
                more, levels = self._measure(child, known)
                size += more
                depth = max(depth, levels + 1)
                if size > self._left or depth > self._deepest:
                    raise _beyond(node, "grows too large by its aliases")
        known[id(node)] = size, depth
        return size, depth


def _beyond(place: yaml.Node | yaml.Event, problem: str) -> BoundsError:
    mark: Any = place.start_mark
    return BoundsError(problem=problem, problem_mark=mark)
