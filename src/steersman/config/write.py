"""Print a configuration: `--write-config-to`, `/configz`, `config check` and `config show`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from steersman.config.defaults import apply_platform_defaults
from steersman.config.errors import ConfigError
from steersman.config.features import gate_warnings
from steersman.config.go import Duration
from steersman.config.load import load
from steersman.config.rules import validate
from steersman.config.types import GROUP_VERSION, KIND, ProxyConfig, Steersman
from steersman.model.addresses import without_password

_OMIT_EMPTY = frozenset(
    {"featureGates", "vmodule", "splitStream", "windowsRunAsService", "steersman"}
)
"""Fields that are left out if they are empty; upstream writes all others."""
_NULL_IF_EMPTY = frozenset({"excludeCIDRs", "nodePortAddresses"})


def to_document(config: ProxyConfig) -> dict[str, Any]:
    """Return plain data of the v1alpha1 document, fields in upstream's order."""
    return {"kind": KIND, "apiVersion": GROUP_VERSION, **plain(config)}


def to_yaml(config: ProxyConfig) -> str:
    """Return the file that `--write-config-to` writes: keys sorted, as upstream's."""
    from steersman.config.yaml_writer import dump_yaml  # noqa: PLC0415 - 1 MB, for YAML only

    return dump_yaml(to_document(config))


def configz(config: ProxyConfig) -> bytes:
    """Return the body of `/configz`."""
    document = {GROUP_VERSION.partition("/")[0]: to_document(config)}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return without_password(text).encode()


def plain(section: msgspec.Struct) -> dict[str, Any]:
    """Return a section as plain data."""
    result = {}
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if field.encode_name in _OMIT_EMPTY and (not value or value == Steersman()):
            continue
        is_null = value == () and field.encode_name in _NULL_IF_EMPTY
        result[field.encode_name] = None if is_null else _plain(value)
    return result


def _plain(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return plain(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return str(value) if isinstance(value, Duration | str) else value


class CommandOutput(NamedTuple):
    """The exit status and the text of a command."""

    status: int
    """0 valid, 1 invalid (if strict, also with warnings), 2 a flag with an unknown value."""
    text: str


def check_config(name: str, data: bytes | str, *, strict: bool = False) -> CommandOutput:
    """Check a configuration file as the daemon would, and return everything that is wrong.

    Args:
        strict: treat warnings as errors, and refuse modes that upstream lacks.
    """
    try:
        loaded = load(data)
    except ConfigError as error:
        return CommandOutput(1, f"{name}: error: {error}\n")
    config = apply_platform_defaults(loaded.config)
    warnings = [*loaded.warnings, *gate_warnings(config.feature_gates)]
    errors = validate(config, strict_upstream=strict)
    lines = [f"{name}: error: {error}" for error in errors]
    lines += [f"{name}: warning: {warning}" for warning in warnings]
    bad = bool(errors) or (strict and bool(warnings))
    if not bad:
        lines.append(f"{name}: ok, mode {config.mode}")
    return CommandOutput(int(bad), "\n".join(lines) + "\n")


def show_config(config: ProxyConfig, output: str = "yaml") -> CommandOutput:
    """Return the configuration in force, with defaults and flags, as `yaml` or `json`.

    Passwords in URLs are left out: people paste this into tickets.
    """
    if output == "yaml":
        return CommandOutput(0, without_password(to_yaml(config)))
    if output == "json":
        text = json.dumps(to_document(config), indent=2, ensure_ascii=False)
        return CommandOutput(0, without_password(text) + "\n")
    return CommandOutput(2, f"output {output!r}: give yaml or json\n")
