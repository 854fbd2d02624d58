"""Times in RFC 3339, as Kubernetes prints them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(nanoseconds: int, digits: int | None = None) -> str:
    """Return a time in UTC.

    Args:
        nanoseconds: since 1970.
        digits: those of the fraction; None for as many as it has, at most nine, as Go prints it.
    """
    seconds, rest = divmod(nanoseconds, 10**9)
    text = datetime.fromtimestamp(seconds, UTC).isoformat().removesuffix("+00:00")
    fraction = f"{rest:09d}".rstrip("0") if digits is None else f"{rest:09d}"[:digits]
    return f"{text}.{fraction}Z" if fraction else f"{text}Z"
