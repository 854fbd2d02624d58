"""Read a configuration file: YAML or JSON text, plain data, then the typed document.

    text --parse_document--> plain data --decode--> KubeProxyConfiguration --defaults--> ProxyConfig

The file is decoded strictly first; what only strictness refuses is a warning (behaviour 1.3).
Scalars are resolved as Kubernetes' YAML library does: YAML 1.1 without dates and base 60.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, cast, get_args, get_origin

import msgspec
import yaml
from msgspec.structs import FieldInfo

from steersman.config.convert import apply_defaults, to_internal, to_v1alpha1
from steersman.config.errors import ConfigError
from steersman.config.features import suggest
from steersman.config.go import Duration, Quantity, parse_int
from steersman.config.types import GROUP_VERSION, KIND, RESTART, KubeProxyConfiguration, ProxyConfig
from steersman.model.yaml_bounds import refuse_deep

# -- Reading ---------------------------------------------------------------------------------------

Plain: TypeAlias = "dict[str, Plain] | list[Plain] | str | int | float | bool | None"

_MAX_DEPTH = 50
_MAX_NODES = 20_000
_TAG = "tag:yaml.org,2002:"
_BOOLS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


class Loaded(msgspec.Struct, frozen=True):
    """A configuration file, decoded."""

    document: KubeProxyConfiguration
    """The document as written."""
    config: ProxyConfig
    """With defaults, in the internal form."""
    warnings: tuple[str, ...] = ()
    """Sentences about what strict decoding refuses: unknown and repeated fields."""


def load(data: bytes | str, mode: str = "") -> Loaded:
    """Decode a configuration, fill in defaults and convert it; rules.py validates it.

    Args:
        data: the file.
        mode: overrides the file's mode, on which sections and defaults depend.

    Raises:
        ConfigError: it cannot be decoded, not even leniently.
    """
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"failed to decode: yaml: not UTF-8 at byte {error.start}") from error
    plain, problems = parse_document(data)
    fields = _check_kind(plain)
    problems += [f"unknown field {path}" for path in _unknown(KubeProxyConfiguration, fields, "")]
    document = decode(fields)
    if mode:
        document = msgspec.structs.replace(document, mode=mode)
    return Loaded(document, to_internal(apply_defaults(document)), tuple(problems))


# Text to plain data


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


def is_plain_text(text: str) -> bool:
    """Return whether an unquoted scalar is read back as this text."""
    return not any(
        pattern.match(text)
        for first in (text[:1], "")
        for _, pattern in _Loader.yaml_implicit_resolvers.get(first, ())
    )


def parse_document(text: str) -> tuple[Plain, list[str]]:
    """Return the data of the first document, and sentences about what strictness refuses.

    Raises:
        ConfigError: it is neither YAML nor JSON.
    """
    if text.lstrip().startswith("{"):
        duplicates: list[str] = []

        def unite(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
            result: dict[str, Any] = {}
            for key, value in pairs:
                if key in result:
                    duplicates.append(f"key {json.dumps(key)} already set in map")
                result[key] = value
            return result

        try:
            return cast("Plain", json.loads(text, object_pairs_hook=unite)), duplicates
        except (ValueError, RecursionError):
            pass  # flow-style YAML begins with a brace, too; its parser reports the error
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


# Plain data to the document


def decode(fields: dict[str, Plain]) -> KubeProxyConfiguration:
    """Return the document of plain data, without unknown fields.

    Raises:
        ConfigError: a value has the wrong type.
    """
    try:
        return msgspec.convert(_prune(fields), KubeProxyConfiguration, dec_hook=_decode_hook)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        raise ConfigError(
            f"failed to decode: {field}: {reason}" if field else f"failed to decode: {reason}"
        ) from error


def _check_kind(plain: Plain) -> dict[str, Plain]:
    """Return the fields of a document that has the right kind and version."""
    fields = {} if plain is None else plain
    if not isinstance(fields, dict):
        found = "a list" if isinstance(fields, list) else "a scalar"
        raise ConfigError(
            f"failed to decode: a {KIND} is a mapping, not {found}; "
            f"begin with apiVersion: {GROUP_VERSION}"
        )
    for field in ("kind", "apiVersion"):
        if not isinstance(fields.get(field), str) or not fields[field]:
            shown = field.capitalize() if field == "kind" else field
            raise ConfigError(f"failed to decode: Object '{shown}' is missing; add it")
    if (fields["apiVersion"], fields["kind"]) != (GROUP_VERSION, KIND):
        raise ConfigError(
            f'failed to decode: no kind "{fields["kind"]}" is registered for version '
            f'"{fields["apiVersion"]}"; use kind {KIND} of {GROUP_VERSION}'
        )
    return fields


def _prune(value: Plain) -> Any:
    """Leave out nulls: Go's decoder takes null as the zero value of any type."""
    if isinstance(value, dict):
        return {key: _prune(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return ["" if item is None else _prune(item) for item in value]
    return value


def _decode_hook(kind: type, value: object) -> object:
    if kind is Quantity:
        return Quantity.parse(str(value))
    if isinstance(value, str):
        return Duration.parse(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return Duration(value)  # nanoseconds, as upstream reads logging.flushFrequency
    raise ValueError("expected a duration such as 30s")


def _unknown(kind: Any, value: Plain, path: str) -> Iterator[str]:
    """Yield the paths of unknown fields in a value of a type, with the nearest known name."""
    if get_origin(kind) is Annotated:
        kind = kind.__origin__
    if isinstance(value, list):
        inner = next(iter(get_args(kind)), kind)
        for index, item in enumerate(value):
            yield from _unknown(inner, item, f"{path}[{index}]")
    elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        for name, item in value.items():
            inside = f"{path}.{name}" if path else name
            if name in known:
                yield from _unknown(known[name], item, inside)
            elif path or name not in ("apiVersion", "kind"):
                yield f'"{inside}"{suggest(name, known)}'


# -- Comparing -------------------------------------------------------------------------------------
#
# Compare a changed configuration with the one in force: which changes apply without a restart.
#
# types.py marks the fields that are read once, at the start (RESTART); this module derives the
# rest.

_Section = TypeVar("_Section", bound=msgspec.Struct)


class ReloadPlan(NamedTuple):
    """The fields that changed, by their paths in the document, in its order."""

    applied_live: list[str]
    needs_restart: list[str]


def reload_plan(old: ProxyConfig, new: ProxyConfig) -> ReloadPlan:
    """Return which changes of a configuration take effect at runtime, and which need a restart.

    If the mode changes, everything waits for the restart: defaults and sections depend on it.
    """
    if new.mode != old.mode:
        return ReloadPlan([], ["mode"])
    plan = ReloadPlan([], [])
    for path, restart in _changed_fields(to_v1alpha1(old), to_v1alpha1(new)):
        (plan.needs_restart if restart else plan.applied_live).append(path)
    return plan


def applied(old: ProxyConfig, new: ProxyConfig) -> ProxyConfig:
    """Return the configuration in force after a reload: `new`, but restart-only fields of `old`."""
    return old if new.mode != old.mode else _with_old_fields(old, new)


def _with_old_fields(old: _Section, new: _Section) -> _Section:
    """Return a section of `new` with the restart-only fields of `old`, at any depth."""
    kept = {}
    for field in msgspec.structs.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if needs_restart(field):
            kept[field.name] = before
        elif isinstance(before, msgspec.Struct):
            kept[field.name] = _with_old_fields(before, after)
    return msgspec.structs.replace(new, **kept)


def _changed_fields(
    old: msgspec.Struct, new: msgspec.Struct, prefix: str = "", *, restart: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yield the paths of fields that differ, and whether the field or its section is marked."""
    for field in msgspec.structs.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        path, marked = prefix + field.encode_name, restart or needs_restart(field)
        if isinstance(before, msgspec.Struct):
            yield from _changed_fields(before, after, f"{path}.", restart=marked)
        elif before != after:
            yield path, marked


def needs_restart(field: FieldInfo) -> bool:
    """Return whether a field is read only at the start."""
    return get_origin(field.type) is Annotated and RESTART in field.type.__metadata__
