"""The YAML text of a configuration, both ways: text to plain data, and plain data to text.

Only what reads or writes YAML imports this: PyYAML takes 1.5 MB of a process. JSON is YAML, too,
but load.py reads it without. Scalars are resolved as Kubernetes' YAML library does: YAML 1.1
without dates and base 60.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from steersman.config.errors import ConfigError
from steersman.config.go import parse_int
from steersman.config.load import Plain
from steersman.model.yaml_bounds import refuse_deep

_MAX_DEPTH = 50
_MAX_NODES = 20_000
_TAG = "tag:yaml.org,2002:"
_BOOLS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}

# -- Reading ---------------------------------------------------------------------------------------


class _Loader(yaml.CSafeLoader):
    """libyaml's parser with only the resolvers that JSON has counterparts of."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _kind, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    (
        "bool",
        r"^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$",
        "yYnNtTfFoO",
    ),
    ("int", r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]*|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9_]+(?:[eE][-+]?[0-9]+)?"
        r"|\.(?:inf|Inf|INF|nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("merge", r"^<<$", "<"),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(_pattern), list(_first))
_Loader.yaml_implicit_resolvers[""] = [(_TAG + "null", re.compile(r"^$"))]


def _is_plain_text(text: str) -> bool:
    """Return whether an unquoted scalar is read back as this text."""
    return not any(
        pattern.match(text)
        for first in (text[:1], "")
        for _, pattern in _Loader.yaml_implicit_resolvers.get(first, ())
    )


def parse_yaml(text: str) -> tuple[Plain, list[str]]:
    """Return the data of the first document, and sentences about what strictness refuses.

    Raises:
        ConfigError: it is not YAML.
    """
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
    """Return libyaml's error as upstream's parser words it."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    if mark is None:
        return " ".join(str(problem).split())
    # upstream's parser counts lines from 0, except in errors of the scanner
    line = mark.line + isinstance(error, yaml.scanner.ScannerError)
    return f"line {line}: {problem}" if line else str(problem)


class _Builder:
    """Builds plain data from YAML nodes, within limits: aliases can grow without bound."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._nodes = 0

    def build(self, node: yaml.Node, depth: int) -> Plain:
        """Return the data of a node and of those below it."""
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise yaml.YAMLError("document contains excessive aliasing or nesting")
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, depth + 1)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, depth + 1) for item in node.value]
        return _scalar(str(node.value), str(node.tag).removeprefix(_TAG))

    def _build_mapping(self, node: yaml.MappingNode, depth: int) -> Plain:
        result: dict[str, Plain] = {}
        merged: dict[str, Plain] = {}
        for key_node, value_node in node.value:
            value = self.build(value_node, depth)
            if key_node.tag == _TAG + "merge":
                for part in reversed(value if isinstance(value, list) else [value]):
                    if not isinstance(part, dict):
                        raise yaml.YAMLError(
                            "map merge requires map or sequence of maps as the value"
                        )
                    merged |= part
                continue
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {line}: a key must be a scalar")
            key = str(key_node.value)
            if key in result:
                self.problems.append(f"line {line}: key {json.dumps(key)} already set in map")
            result[key] = value
        return merged | result


def _scalar(text: str, kind: str) -> Plain:
    """Return the value of a YAML scalar.

    Raises:
        yaml.YAMLError: it looks like a number and is none, or none that JSON can hold.
    """
    try:
        match kind:
            case "null":
                return None
            case "bool" if text.lower() in _BOOLS:
                return _BOOLS[text.lower()]
            case "int":
                return parse_int(text, low=-(2**63), high=2**64 - 1)
            case "float":
                try:
                    value = float(text.replace("_", ""))
                except ValueError:
                    raise ValueError(f"{text!r} is not a number") from None
                if value - value != 0:
                    raise ValueError(f"{text!r} is not a finite number")
                return value
            case _:
                return text
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from error


# -- Writing ---------------------------------------------------------------------------------------


def dump_yaml(document: dict[str, Any]) -> str:
    """Return a document as upstream writes it: keys sorted."""
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=True, default_flow_style=False, width=1000
    )
    return text


class _Dumper(yaml.SafeDumper):
    """Writes as upstream does: lists are not indented, nothing is an alias."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Quote texts that read as something else; upstream's writer uses double quotes."""
    tag = "tag:yaml.org,2002:str"
    # other YAML 1.1 readers know dates and numbers of base 60, too
    resolved = dumper.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    plain = _is_plain_text(text) and resolved == tag
    return dumper.represent_scalar(tag, text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)
