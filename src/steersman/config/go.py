"""Go's spelling of durations, booleans, numbers and lists, in flags and configuration files."""

from __future__ import annotations

import re

from steersman.model.addresses import canonical_ip

_UNITS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # micro sign
    "μs": 1_000,  # Greek letter mu
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_MAX = 2**63 - 1
_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})
_INT = re.compile(r"[+-]?(0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO]?[0-7_]*|[1-9][0-9_]*)", re.ASCII)
_QUANTITY = re.compile(
    r"[+-]?[0-9]+(\.[0-9]*)?([EPTGM]i?|Ki|[numk]|[eE][+-]?[0-9]{1,3})?", re.ASCII
)


class Duration(int):
    """A span of time in whole nanoseconds, written as Go writes it (`1m30s`)."""

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Return the Duration of Go's spelling: a sum such as `1h15m30.5s`, or `0`.

        Raises:
            ValueError: it is none.
        """
        body = text.removeprefix("-").removeprefix("+") if text[:1] in ("+", "-") else text
        total, position = 0, int(body == "0")
        while match := _PART.match(body, position):
            whole, fraction, unit = match[1], match[2] or "", match[3]
            if not whole and not fraction:
                break
            fraction = fraction[:30]  # finer than a nanosecond anyway
            if len(whole) > 19:
                raise ValueError(f"duration {text!r} is longer than 292 years")
            scale = _UNITS[unit]
            total += int(whole or "0") * scale + int(fraction or "0") * scale // 10 ** len(fraction)
            position = match.end()
        if not body or position != len(body):
            raise ValueError(f"{text!r} is not a duration such as 30s, 1m or 2h22m")
        if total > _MAX:
            raise ValueError(f"duration {text!r} is longer than 292 years")
        return cls(-total if text.startswith("-") else total)

    @property
    def seconds(self) -> float:
        """The span in seconds."""
        return int(self) / 1e9

    def __str__(self) -> str:
        sign, rest = ("-", -int(self)) if self < 0 else ("", int(self))
        if rest == 0:
            return "0s"
        if rest < 1_000_000_000:
            unit = next((unit for unit in ("ms", "µs") if rest >= _UNITS[unit]), "ns")
            return sign + _decimal(rest, _UNITS[unit]) + unit
        minutes, nanoseconds = divmod(rest, _UNITS["m"])
        text = _decimal(nanoseconds, 1_000_000_000) + "s"
        if not minutes:
            return sign + text
        hours, minutes = divmod(minutes, 60)
        return f"{sign}{f'{hours}h' if hours else ''}{minutes}m{text}"

    def __repr__(self) -> str:
        return f"Duration({str(self)!r})"


def seconds(count: float) -> Duration:
    """Return the Duration of a number of seconds."""
    return Duration(round(count * 1_000_000_000))


def _decimal(value: int, scale: int) -> str:
    whole, rest = divmod(value, scale)
    digits = f"{rest:0{len(str(scale)) - 1}d}".rstrip("0")
    return f"{whole}.{digits}" if digits else str(whole)


def parse_bool(text: str) -> bool:
    """Return the value of Go's spellings of a boolean; raise ValueError for others."""
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return text in _TRUE


def parse_int(text: str, *, low: int = -(2**31), high: int = 2**31 - 1) -> int:
    """Return an integer in decimal, 0x, 0o, 0 or 0b notation.

    Raises:
        ValueError: it is none, or out of bounds.
    """
    if not _INT.fullmatch(text) or "__" in text or text.endswith("_") or len(text) > 80:
        raise ValueError(f"{text!r} is not a whole number")
    sign = -1 if text[0] == "-" else 1
    digits = text.lstrip("+-").lower()
    octal = digits[0] == "0" and digits[1:2] not in ("x", "b", "o") and len(digits) > 1
    value = sign * (int(digits, 8) if octal else int(digits, 0))
    if not low <= value <= high:
        raise ValueError(f"{text!r} is not between {low} and {high}")
    return value


class Quantity(str):
    """A Kubernetes quantity such as `0`, `512`, `4k` or `1Mi`, as it was written."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Quantity:
        """Return a quantity; raise ValueError if it is none."""
        if not _QUANTITY.fullmatch(text):
            raise ValueError(f"{text!r} is not a quantity such as 512, 4k or 1Mi")
        return cls(text)

    def __bool__(self) -> bool:
        return re.search("[1-9]", re.split("[eE]", self, maxsplit=1)[0]) is not None


def split_address(text: str) -> tuple[str, str] | None:
    """Split `host:port` or `[host]:port` as Go does; return None for anything else.

    Neither half is checked: `:x` gives `("", "x")`.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        return None
    if host.startswith("["):
        if not host.endswith("]"):
            return None
        host = host[1:-1]
    elif ":" in host:
        return None
    if set("[]") & set(host + port):
        return None
    return host, port


def with_port(address: str, port: int) -> str:
    """Append a port to an IP address that has none; leave anything else to validation."""
    if split_address(address) is not None or canonical_ip(address) is None:
        return address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split_list(text: str) -> tuple[str, ...]:
    """Split a comma-separated list; items with a comma are in double quotes; "" has no item."""
    if not text:
        return ()
    items = re.findall(r'(?:^|,)(?:"((?:[^"]|"")*)"|([^,"]*))(?=,|$)', text)
    commas = sum(part.count(",") for part in text.split('"')[::2])  # outside of quotes
    if len(items) != commas + 1:
        raise ValueError(f"{text!r} is not a comma-separated list")
    return tuple(quoted.replace('""', '"') or plain for quoted, plain in items)


def split_pairs(text: str) -> dict[str, str]:
    """Split `key=value,key=value`, without empty items; raise ValueError if `=` is missing."""
    pairs = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{item!r} is not KEY=VALUE")
        pairs[key.strip()] = value.strip()
    return pairs
