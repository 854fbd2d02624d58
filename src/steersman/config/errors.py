"""Errors of a configuration, as values with upstream's paths and wording."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from steersman.config.go import Duration
from steersman.model import codes
from steersman.model.findings import Finding, Severity

ROOT = "KubeProxyConfiguration"
"""First part of every path of a FieldError (behaviour 1.4)."""


class ConfigError(Exception):
    """A configuration or command line is invalid; the text says why and what to do."""


class UsageError(ConfigError):
    """A command line that cannot be understood."""


class FieldError(msgspec.Struct, frozen=True):
    """One broken rule of a configuration. Its text is upstream's `field.Error` (behaviour 1.4)."""

    path: str
    """Path in the internal configuration, as upstream prints it."""
    kind: str
    """`Invalid value`, `Unsupported value`, `Required value` or `Forbidden`."""
    value: str
    """The offending value as printed; "" if the kind prints none."""
    detail: str
    """The rule for valid values."""

    def __str__(self) -> str:
        parts = (self.path, self.kind, self.value, self.detail)
        return ": ".join(part for part in parts if part)


class Invalid(ConfigError):
    """A configuration breaks rules; `errors` has all of them."""

    def __init__(self, errors: Iterable[FieldError]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(map(str, self.errors)))


def findings(error: ConfigError, name: str) -> tuple[Finding, ...]:
    """Return a Finding for each error of a configuration that was refused.

    Args:
        name: of the file, for an error about the file as a whole.
    """
    if not isinstance(error, Invalid):
        reason = f"{error}; keeping the previous configuration"
        return (Finding(name, "", reason, Severity.ERROR, codes.CONFIGURATION),)
    found = []
    for broken in error.errors:
        reason = f"{broken.kind} {broken.value}: {broken.detail}" if broken.value else broken.detail
        field = broken.path.removeprefix(f"{ROOT}.")
        found.append(Finding(ROOT, field, reason, Severity.ERROR, codes.CONFIGURATION))
    return tuple(found)


def printed(value: object) -> str:
    """Return a value as upstream prints it in errors: texts and durations quoted, lists as JSON."""
    if isinstance(value, Duration):
        return f'"{value}"'
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, sort_keys=True)


def invalid(path: str, value: object, detail: str) -> FieldError:
    """Return the error of a value that breaks a rule."""
    return FieldError(path, "Invalid value", printed(value), detail)


def unsupported(path: str, value: str, choices: Iterable[str]) -> FieldError:
    """Return the error of a value that is none of the choices."""
    listed = ", ".join(map(printed, choices))
    return FieldError(path, "Unsupported value", printed(value), f"supported values: {listed}")


def required(path: str, detail: str) -> FieldError:
    """Return the error of a missing value."""
    return FieldError(path, "Required value", "", detail)


def forbidden(path: str, detail: str) -> FieldError:
    """Return the error of a value that is not allowed here."""
    return FieldError(path, "Forbidden", "", detail)
