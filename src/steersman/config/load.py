"""Read a configuration file: YAML or JSON text, plain data, then the typed document.

    text --parse_document--> plain data --decode--> KubeProxyConfiguration --defaults--> ProxyConfig

The file is decoded strictly first; what only strictness refuses is a warning (behaviour 1.3).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from steersman.config.convert import apply_defaults, to_internal, to_v1alpha1
from steersman.config.errors import ConfigError
from steersman.config.features import suggest
from steersman.config.go import Duration, Quantity
from steersman.config.types import GROUP_VERSION, KIND, RESTART, KubeProxyConfiguration, ProxyConfig

if TYPE_CHECKING:
    from steersman.model.yaml_reader import Plain

# -- Reading ---------------------------------------------------------------------------------------

_MAX_DEPTH = 50
_MAX_NODES = 40_000


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
