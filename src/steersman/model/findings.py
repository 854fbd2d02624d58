"""Findings, the problems of objects as data, and foreign text made safe to show.

Text of Services and EndpointSlices is untrusted: it is shown on one line, without invisible
characters, and cut to a limited length.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec

_NAME, _REASON = 400, 600  # characters
_SHOWN = 64  # characters
_LISTED = 3


class Severity(enum.StrEnum):
    """How bad a Finding is."""

    WARNING = "warning"  # something was ignored, the rest is in force
    ERROR = "error"  # the object (or this part of it) is not served


class Finding(msgspec.Struct, frozen=True, gc=False, order=True):
    """A problem of an object, reported to users instead of raised as an exception."""

    object: str
    """Kind and name, as in `Service shop/cart`; the file if the object has no name."""
    field: str
    """Path of the field, as in `spec.ports[0].port`; "" for the whole object."""
    reason: str
    """The problem, and how to fix it."""
    severity: Severity = Severity.WARNING
    code: str = ""
    """Stays the same for a kind of problem (model/codes.py); "" from a node without codes."""

    def __str__(self) -> str:
        where = f"{self.object} {self.field}" if self.field else self.object
        return f"{where}: {self.reason}" + (f" [{self.code}]" if self.code else "")


def worst(findings: Iterable[Finding], most: int, characters: int) -> tuple[Finding, ...]:
    """Return the first Findings, errors before warnings, within a number and a size.

    Args:
        most: number of Findings.
        characters: of all their texts together.
    """
    ordered = sorted(findings, key=lambda each: (each.severity is not Severity.ERROR, each))
    found: list[Finding] = []
    for finding in ordered[:most]:
        characters -= len(finding.object) + len(finding.field) + len(finding.reason)
        if characters < 0:
            break
        found.append(finding)
    return tuple(found)


def printable(text: str) -> str:
    """Escape line breaks, control codes and other invisible characters (`\\n`)."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def clipped(text: str, most: int) -> str:
    """Cut a text after `most` characters; a cut text ends with its full length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def safe(finding: Finding) -> Finding:
    """Make the text of a Finding printable, and limit its length (docs/limits.md)."""
    return Finding(
        printable(clipped(finding.object, _NAME)),
        printable(clipped(finding.field, _NAME)),
        printable(clipped(finding.reason, _REASON)),
        finding.severity,
        finding.code,
    )


def quoted(value: str | None) -> str:
    """Return a value in quotes, printable, and cut if it is long."""
    if value is None or len(value) <= _SHOWN:
        return repr(value)
    return f"{value[:_SHOWN]!r}... ({len(value)} characters)"


def listed(values: Sequence[str]) -> str:
    """Return the first few values, quoted, and the number of the others."""
    first = ", ".join(quoted(value) for value in values[:_LISTED])
    return first if len(values) <= _LISTED else f"{first} and {len(values) - _LISTED} more"
