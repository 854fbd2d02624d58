"""YAML or JSON text to plain data, with duplicate keys reported instead of refused.

Scalars are resolved as Kubernetes' YAML library does (YAML 1.1 without dates and base 60). Not
here: what the data means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import yaml

from steersman.config.errors import ConfigError
from steersman.config.go import parse_int
from steersman.model.yaml_bounds import refuse_deep

Plain: TypeAlias = "dict[str, Plain] | list[Plain] | str | int | float | bool | None"

_MAX_DEPTH = 50
_MAX_NODES = 20_000
_TAG = "tag:yaml.org,2002:"
_BOOLS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


class _Loader(yaml.CSafeLoader):
    """libyaml's parser with only the resolvers that JSON has counterparts of."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


def _resolve(kind: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(_TAG + kind, re.compile(pattern), list(first))


_resolve("null", r"^(?:~|null|Null|NULL|)$", "~nN\0")
_Loader.yaml_implicit_resolvers[""] = [(_TAG + "null", re.compile(r"^$"))]
_resolve(
    "bool",
    r"^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$",
    "yYnNtTfFoO",
)
_resolve("int", r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]*|[1-9][0-9_]*)$", "-+0123456789")
_resolve(
    "float",
    r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9_]+(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF|nan|NaN|NAN))$",
    "-+0123456789.",
)
_resolve("merge", r"^<<$", "<")


def is_plain_text(text: str) -> bool:
    """Whether an unquoted scalar would be read back as this text."""
    return not any(
        pattern.match(text)
        for first in (text[:1], "")
        for _, pattern in _Loader.yaml_implicit_resolvers.get(first, ())
    )


def parse_document(text: str) -> tuple[Plain, list[str]]:
    """Return the data of the first document and what strictness has against it.

    Raises:
        ConfigError: it is neither YAML nor JSON.
    """
    if text.lstrip().startswith("{"):
        duplicates: list[str] = []
        try:
            data = json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, duplicates))
        except (ValueError, RecursionError):
            pass  # flow-style YAML begins with a brace, too; its parser says what is wrong
        else:
            return cast("Plain", data), duplicates
    return _parse_yaml(text)


def _object(pairs: Iterable[tuple[str, Any]], duplicates: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            duplicates.append(f"key {json.dumps(key)} already set in map")
        result[key] = value
    return result


def _parse_yaml(text: str) -> tuple[Plain, list[str]]:
    builder = _Builder()
    try:
        refuse_deep(text, _Loader, _MAX_DEPTH)
        loader = _Loader(text)
        node = loader.get_node() if loader.check_node() else None
        data = builder.build(node, 0) if node is not None else None
        if loader.check_node():
            builder.problems.append("only the first of several YAML documents is used")
    except yaml.YAMLError as error:
        raise ConfigError(f"failed to decode: yaml: {_explain(error)}") from error
    except ValueError as error:  # e.g. a lone surrogate that cannot be encoded for libyaml
        raise ConfigError(f"failed to decode: yaml: {error}") from error
    return data, builder.problems


def _explain(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    if mark is None:
        return " ".join(str(problem).split())
    # upstream's parser counts lines from 0 except where the scanner is the one to complain
    line = mark.line + isinstance(error, yaml.scanner.ScannerError)
    return f"line {line}: {problem}" if line else str(problem)


class _Builder:
    """Makes plain data of YAML nodes, within limits (aliases can grow without bound)."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._nodes = 0

    def build(self, node: yaml.Node, depth: int) -> Plain:
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise yaml.YAMLError("document contains excessive aliasing or nesting")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth + 1)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, depth + 1) for item in node.value]
        return _scalar(node)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> Plain:
        result: dict[str, Plain] = {}
        merged: dict[str, Plain] = {}
        for key_node, value_node in node.value:
            value = self.build(value_node, depth)
            if key_node.tag == _TAG + "merge":
                merged |= _merge(value)
                continue
            key = _key(key_node)
            if key in result:
                line = key_node.start_mark.line + 1
                self.problems.append(f"line {line}: key {json.dumps(key)} already set in map")
            result[key] = value
        return merged | result


def _merge(value: Plain) -> dict[str, Plain]:
    result: dict[str, Plain] = {}
    for part in reversed(value if isinstance(value, list) else [value]):
        if not isinstance(part, dict):
            raise yaml.YAMLError("map merge requires map or sequence of maps as the value")
        result |= part
    return result


def _key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: a key must be a scalar")
    return str(node.value)


def _scalar(node: yaml.Node) -> Plain:
    text = str(node.value)
    match str(node.tag).removeprefix(_TAG):
        case "null":
            return None
        case "bool" if text.lower() in _BOOLS:
            return _BOOLS[text.lower()]
        case "int":
            return _number(text)
        case "float":
            return _fraction(text)
        case _:
            return text


def _number(text: str) -> int:
    try:
        return parse_int(text, low=-(2**63), high=2**64 - 1)
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from error


def _fraction(text: str) -> float:
    try:
        value = float(text.replace("_", ""))
    except ValueError as error:
        raise yaml.YAMLError(f"{text!r} is not a number") from error
    if value - value != 0:
        raise yaml.YAMLError(f"{text!r} is not a finite number")
    return value
