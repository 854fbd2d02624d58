"""Filters of the templates: times, sizes and shares as people read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from markupsafe import Markup, escape

_LONGEST_PART = 700  # characters


def live(name: str) -> Markup:
    """Return the attributes of an element that holds the block `live_NAME` and follows it."""
    return Markup('id="live_{0}" sse-swap="live_{0}" hx-swap="morph:innerHTML"').format(name)


def moment(at: float) -> Markup:
    """Return a time as an element; the browser shows it in the reader's time zone."""
    if not at:
        return Markup("never")
    when = datetime.fromtimestamp(at, UTC)
    text = when.strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}">{}</time>').format(when.isoformat(), text)


def duration(seconds: float | None) -> str:
    """Return a duration: `850 us`, `12 ms`, `3.2 s`, `5 min`, `3 h`, `12 d`; `-` for None."""
    if seconds is None:
        return "-"
    for unit, size, below in (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0)):
        if seconds < below:
            return f"{seconds / size:.0f} {unit}"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, size, limit in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def size(number: float) -> str:
    """Return a number of bytes: `512 B`, `1.5 kB`, `49 MB`."""
    units = iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while number >= 1000 and unit != "GB":
        number, unit = number / 1000, next(units)
    return f"{number:.0f} {unit}" if number >= 10 or unit == "B" else f"{number:.1f} {unit}"


def percent(share: float | None) -> str:
    """Return a share of 1 in percent, `-` for None."""
    return "-" if share is None else f"{share * 100:.1f} %"


def cut(text: str, length: int = 60) -> Markup:
    """Return a text that may be long, isolated from the direction of its surroundings.

    Beyond `length` characters the middle is left out and the whole is the title.
    """
    if len(text) <= length:
        return Markup("<bdi>{}</bdi>").format(text)
    head, tail = length * 2 // 3, length // 3 - 1
    short = f"{text[:head]}…{text[-tail:]}"
    return Markup('<bdi title="{}">{}</bdi>').format(text, escape(short))


def with_code(text: str) -> Markup:
    """Return a text in which words between backticks are code; `cut` shortens each part."""
    parts = [cut(part, _LONGEST_PART) for part in text.split("`")]
    parts[1::2] = [Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    return Markup("").join(parts)


def json(value: Any) -> str:
    """Return a struct as JSON, for `data-` attributes; templates escape it as any text."""
    return msgspec.json.encode(value).decode()


def address(query: Mapping[str, str], **changes: object) -> str:
    """Return the query string of an address, with some values changed; "" removes one.

    Another search begins at its first page, so `page` goes unless it is among the changes.
    """
    values = {**query, "page": "", **{name: str(value) for name, value in changes.items()}}
    return "?" + urlencode({name: value for name, value in values.items() if value})


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "address": address,
    "moment": moment,
    "duration": duration,
    "size": size,
    "percent": percent,
    "cut": cut,
    "with_code": with_code,
    "json": json,
}
"""Filters by their names in templates."""
