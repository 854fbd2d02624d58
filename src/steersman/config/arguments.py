"""Take a Go-style command line apart: `--x=y`, `--x y`, `-v=2`, `-v 2`, `-v2`, `--flag`, `--`.

Underscores in names are dashes, as in all of Kubernetes. Not here: what the values are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from steersman.config.errors import UsageError
from steersman.config.features import suggest
from steersman.config.flag import Flag
from steersman.config.go import (
    Duration,
    Quantity,
    parse_bool,
    parse_int,
    split_address,
    split_list,
    split_pairs,
)
from steersman.config.types import VModule
from steersman.model.addresses import canonical_ip

Value: TypeAlias = (
    "str | bool | int | float | Duration | tuple[str, ...] | tuple[VModule, ...] | dict[str, bool]"
)


class Arguments(msgspec.Struct, frozen=True):
    """A command line, taken apart and typed."""

    values: dict[str, Value]
    """What was given, by the flag's name; lists and maps of repeated flags joined."""
    positional: tuple[str, ...] = ()
    stopped: str = ""
    """`help` where that flag was met: what follows it was not read."""


def parse_arguments(argv: Sequence[str], flags: Mapping[str, Flag]) -> Arguments:
    """Type everything on a command line.

    Raises:
        UsageError: a flag is unknown, or its value is missing or of the wrong type.
    """
    values: dict[str, Value] = {}
    positional: list[str] = []
    shorts = {flag.short: flag for flag in flags.values() if flag.short}
    words = iter(argv)
    for word in words:
        if word == "--":
            positional += words
        elif word.startswith("-") and word != "-":
            flag, shown, text = _split(word, flags, shorts)
            if text is None:
                text = flag.optional_value or _next(words, shown)
            values[flag.name] = _join(values.get(flag.name), read_value(flag, shown, text))
            if flag.name == "help" and values["help"]:
                return Arguments(values, tuple(positional), "help")
        else:
            positional.append(word)
    return Arguments(values, tuple(positional))


def _split(
    word: str, flags: Mapping[str, Flag], shorts: Mapping[str, Flag]
) -> tuple[Flag, str, str | None]:
    if not word.startswith("--"):
        return _split_short(word, flags, shorts)
    given, equals, text = word[2:].partition("=")
    name = given.replace("_", "-")
    if name not in flags:
        raise UsageError(f"unknown flag: --{given}{_instead(name, flags)}")
    return flags[name], f"--{name}", text if equals else None


def _split_short(
    word: str, flags: Mapping[str, Flag], shorts: Mapping[str, Flag]
) -> tuple[Flag, str, str | None]:
    flag, rest = shorts.get(word[1]), word[2:]
    if flag is None:
        name = word[1:].partition("=")[0].replace("_", "-")
        hint = f" (did you mean -{word}?)" if name in flags else _instead(name, flags)
        raise UsageError(f"unknown shorthand flag: {word[1]!r} in {word}{hint}")
    if flag.optional_value and rest and not rest.startswith("="):
        raise UsageError(f"{word}: -{flag.short} takes no value; give flags apart from each other")
    return flag, f"-{flag.short}, --{flag.name}", rest.removeprefix("=") if rest else None


def _instead(name: str, flags: Mapping[str, Flag]) -> str:
    shown = {f"--{flag.name}": flag for flag in flags.values() if not flag.deprecated}
    return (len(name) > 1 and suggest(f"--{name}", shown)) or "; --help lists them all"


def _next(words: Iterable[str], shown: str) -> str:
    for word in words:
        return word
    raise UsageError(f"flag needs an argument: {shown}")


def read_value(flag: Flag, shown: str, text: str) -> Value:
    """Type a flag's value; UsageError where it has the wrong form."""
    try:
        return split_list(text) if flag.repeatable else READERS[flag.kind](text)
    except ValueError as error:
        raise UsageError(f'invalid argument "{text}" for "{shown}" flag: {error}') from error


def _join(old: Value | None, new: Value) -> Value:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return (*old, *new)  # both are of one flag
    if isinstance(old, dict) and isinstance(new, dict):
        return old | new
    return new


def _ip(text: str) -> str:
    if text and canonical_ip(text) is None:
        raise ValueError(f"{text!r} is not a valid IP address")
    return text


def _ip_port(text: str) -> str:
    if not text or canonical_ip(text) is not None:
        return text
    halves = split_address(text)
    if halves is None:
        raise ValueError(f"{text!r} is not in a valid format (ip or ip:port)")
    host, port = halves
    if canonical_ip(host) is None:
        raise ValueError(f"{host!r} is not a valid IP address")
    parse_int(port, low=0, high=65535)
    return text


def _float32(text: str) -> float:
    value = float(text)
    if not -3.4e38 <= value <= 3.4e38:
        raise ValueError(f"{text!r} is not a finite number")
    return value


def _level(text: str) -> int:
    return parse_int(text, low=0)


def _gates(text: str) -> dict[str, bool]:
    return {name: parse_bool(value) for name, value in split_pairs(text).items()}


def _vmodule(text: str) -> tuple[VModule, ...]:
    return tuple(
        VModule(file_pattern=pattern, verbosity=_level(level))
        for pattern, level in split_pairs(text).items()
    )


def _version(text: str) -> str:
    if text == "raw" or text.startswith("v"):
        return text
    return str(parse_bool(text)).lower()


READERS: Final[Mapping[str, Callable[[str], Value]]] = {
    "string": str,
    "strings": split_list,
    "bool": parse_bool,
    "int32": parse_int,
    "float32": _float32,
    "duration": Duration.parse,
    "ip": _ip,
    "ipport": _ip_port,
    "quantity": Quantity.parse,
    "mapStringBool": _gates,
    "pattern=N,...": _vmodule,
    "Level": _level,
    "version": _version,
    "ProxyMode": str,
    "LocalMode": str,
}
"""How to read a value, by the kind of the flag; ValueError says what is wrong with it."""
