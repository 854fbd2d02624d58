"""Read a configuration file: YAML or JSON text, plain data, then the typed document.

    text --parse_document--> plain data --decode--> ProxyConfig --defaults.py--> ProxyConfig

The file is decoded strictly first; what only strictness refuses is a warning (behaviour 1.3).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin

import msgspec

from steersman.config.defaults import apply_defaults, in_mode
from steersman.config.errors import ConfigError
from steersman.config.features import suggest
from steersman.config.go import Duration, Quantity
from steersman.config.types import GROUP_VERSION, KIND, ProxyConfig

if TYPE_CHECKING:
    from steersman.model.yaml_reader import Plain

_MAX_DEPTH = 50
_MAX_NODES = 40_000


class Loaded(msgspec.Struct, frozen=True):
    """A configuration file, decoded."""

    config: ProxyConfig
    """With defaults, for its mode."""
    warnings: tuple[str, ...] = ()
    """Sentences about what strict decoding refuses: unknown and repeated fields."""


def load(data: bytes | str, mode: str = "") -> Loaded:
    """Decode a configuration and fill in defaults; rules.py validates it.

    A mode that is given overrides the file's: sections and defaults depend on it.

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
    problems += [f"unknown field {path}" for path in _unknown(ProxyConfig, fields, "")]
    document = decode(fields)
    if mode:
        document = msgspec.structs.replace(document, mode=mode)
    config = apply_defaults(document)
    return Loaded(in_mode(config, config.mode), tuple(problems))


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
    # 1.5 MB, for YAML only
    from steersman.model.yaml_reader import Budget, YamlError, read_yaml  # noqa: PLC0415

    documents = read_yaml(text, Budget(_MAX_NODES, _MAX_DEPTH))
    try:
        first = next(documents, None)
    except YamlError as error:
        raise ConfigError(f"failed to decode: yaml: {error}") from error
    if first is None:
        return None, []
    problems = list(first.repeated)
    try:
        is_single = next(documents, None) is None
    except YamlError:  # of a document that is not used
        is_single = False
    if not is_single:
        problems.append("only the first of several YAML documents is used")
    return first.value, problems


def decode(fields: dict[str, Plain]) -> ProxyConfig:
    """Return the document of plain data, without unknown fields.

    Raises:
        ConfigError: a value has the wrong type.
    """
    try:
        return msgspec.convert(_prune(fields), ProxyConfig, dec_hook=_decode_hook)
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
    """Leave out nulls: Go's decoder takes null as the zero value of any type.

    Raises:
        ConfigError: there is a number that JSON cannot hold.
    """
    if isinstance(value, dict):
        return {key: _prune(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return ["" if item is None else _prune(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"failed to decode: {value} is not a finite number")
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
