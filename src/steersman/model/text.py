"""Text that others wrote, made safe to show: one line, nothing invisible, bounded in length."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 64  # characters
_LISTED = 3


def printable(text: str) -> str:
    """Return a text with line breaks, control codes and all else invisible escaped (`\\n`)."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def clipped(text: str, most: int) -> str:
    """Return a text, cut after `most` characters; a cut one says so."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def quoted(value: str | None) -> str:
    """Return a value in quotes, made printable and cut where it is long."""
    if value is None or len(value) <= _SHOWN:
        return repr(value)
    return f"{value[:_SHOWN]!r}... ({len(value)} characters)"


def listed(values: Sequence[str]) -> str:
    """Return the first few of some values, quoted, and how many more there are."""
    first = ", ".join(quoted(value) for value in values[:_LISTED])
    return first if len(values) <= _LISTED else f"{first} and {len(values) - _LISTED} more"
