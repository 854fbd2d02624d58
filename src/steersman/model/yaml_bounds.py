"""Limits for YAML: how deep it may nest, how large it becomes with its aliases written out.

PyYAML has none. It composes recursively in C without looking at the stack, so that deep nesting
ends the process; and `&a [*a, *a]`, or ten levels of ten aliases each, are a few bytes that make
everything that walks through the result run for ever.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_BRACKET = re.compile(r"[][{}]")
_LONG = 4 << 20
"""Characters of text whose events are counted before nodes are made of them."""
_MOST_EVENTS = 2_000_000
"""Of one document or piece; each takes about half a kilobyte as a node."""
_SCALAR = 64
"""Characters of a scalar that count as another node."""


class BoundsError(yaml.MarkedYAMLError):
    """YAML that is beyond the limits; `problem` says which."""


def refuse_deep(text: str, loader: type[Any], deepest: int) -> None:
    """Raise BoundsError where YAML nests more than `deepest` levels, or has too many values."""
    indented = re.compile(rf"^[-?: ]{{{deepest},}}", re.MULTILINE)
    if len(text) < _LONG and not _has_deep_brackets(text, deepest) and not indented.search(text):
        return  # strings may only look like nesting, so only the parser can tell for sure
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
    """How many nodes a text may have, each alias counted as all that it stands for."""

    def __init__(self, nodes: int, deepest: int) -> None:
        self._left = nodes
        self._deepest = deepest

    def take(self, document: yaml.Node) -> None:
        """Take what a document needs, which must have passed `refuse_deep`.

        Raises:
            BoundsError: that is more than is left, or an alias stands for what it is part of.
        """
        size, _ = self._measure(document, {})
        self._left -= size

    def _measure(
        self, node: yaml.Node, known: dict[int, tuple[int, int] | None]
    ) -> tuple[int, int]:
        """Return how many nodes and how many levels a node has."""
        if id(node) in known:
            measured = known[id(node)]
            if measured is None:
                raise _beyond(node, "holds itself by an alias")
            return measured
        known[id(node)] = None
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


def _beyond(where: yaml.Node | yaml.Event, problem: str) -> BoundsError:
    mark: Any = where.start_mark
    return BoundsError(problem=problem, problem_mark=mark)
