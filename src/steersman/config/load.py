"""Read a configuration file: strictly first, leniently where that fails (behaviour 1.3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from steersman.config.convert import to_internal
from steersman.config.defaults import apply_defaults
from steersman.config.document import Plain, parse_document
from steersman.config.errors import ConfigError
from steersman.config.features import suggest
from steersman.config.go import Duration, Quantity
from steersman.config.types import (
    GROUP_VERSION,
    KIND,
    KubeProxyConfiguration,
    ProxyConfig,
)


class Loaded(msgspec.Struct, frozen=True):
    """A configuration file, read."""

    document: KubeProxyConfiguration
    """What was written."""
    config: ProxyConfig
    """With defaults, in the internal form."""
    warnings: tuple[str, ...] = ()
    """What strict decoding has against the file: unknown and repeated fields."""


def load(data: bytes | str) -> Loaded:
    """Decode, default and convert a configuration; validation is another matter.

    Raises:
        ConfigError: it cannot be decoded, also leniently.
    """
    plain, problems = parse_document(_text(data))
    fields = _check_kind(plain)
    problems += [f"unknown field {path}" for path in _unknown(KubeProxyConfiguration, fields, "")]
    document = decode(fields)
    config = to_internal(apply_defaults(document))
    return Loaded(document, config, tuple(problems))


def decode(fields: dict[str, Plain]) -> KubeProxyConfiguration:
    """Make a document of plain data, unknown fields left out; ConfigError where a type is wrong."""
    try:
        return msgspec.convert(_prune(fields), KubeProxyConfiguration, dec_hook=_decode_hook)
    except msgspec.ValidationError as error:
        raise ConfigError(f"failed to decode: {_in_words(str(error))}") from error


def _text(data: bytes | str) -> str:
    if isinstance(data, str):
        return data
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"failed to decode: yaml: not UTF-8 at byte {error.start}") from error


def _check_kind(plain: Plain) -> dict[str, Plain]:
    fields = {} if plain is None else plain
    if not isinstance(fields, dict):
        raise ConfigError(
            f"failed to decode: a {KIND} is a mapping, not {_word(fields)}; "
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


def _word(value: Plain) -> str:
    return "a list" if isinstance(value, list) else "a scalar"


def _prune(value: Plain) -> Any:
    """Leave out nulls: Go's decoder takes one for the zero value, whatever the type."""
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


def _in_words(error: str) -> str:
    reason, _, path = error.partition(" - at `$")
    where = path.rstrip("`").lstrip(".")
    return f"{where}: {reason}" if where else reason


def _unknown(kind: type[msgspec.Struct], fields: dict[str, Plain], prefix: str) -> Iterator[str]:
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in fields.items():
        if name not in known:
            if prefix or name not in ("apiVersion", "kind"):
                yield f'"{prefix}{name}"{suggest(name, known)}'
        else:
            yield from _unknown_inside(known[name], value, f"{prefix}{name}")


def _unknown_inside(kind: Any, value: Plain, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            inner = kind.__args__[0] if getattr(kind, "__args__", None) else kind
            yield from _unknown_inside(inner, item, f"{path}[{index}]")
    elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield from _unknown(kind, value, f"{path}.")
