"""The words of a command line, as typed values by flag.

Go-style flags: `--x=y`, `--x y`, `-v=2`, `-v 2`, `-v2`, `--flag`, `--`. Underscores in names are
dashes, as in all of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from steersman.config.errors import UsageError
from steersman.config.features import suggest
from steersman.config.flags_upstream import Flag
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
    """A command line, parsed and typed."""

    values: dict[str, Value]
    """Values by the flag's name; lists and maps of repeated flags are joined."""
    positional: tuple[str, ...] = ()
    stopped: str = ""
    """`help` if that flag was found: the words after it were not read."""


def parse_arguments(argv: Sequence[str], flags: Mapping[str, Flag]) -> Arguments:
    """Parse and type a command line.

    Raises:
        UsageError: a flag is unknown, or its value is missing or of the wrong type.
    """
    values: dict[str, Value] = {}
    positional: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            positional += words
        elif word.startswith("-") and word != "-":
            flag, shown, text = _split(word, flags)
            if text is None:
                text = flag.optional_value or next(words, None)
            if text is None:
                raise UsageError(f"flag needs an argument: {shown}")
            old, value = values.get(flag.name), read_value(flag, shown, text)
            if isinstance(old, tuple) and isinstance(value, tuple):
                value = (*old, *value)  # both are of one flag
            elif isinstance(old, dict) and isinstance(value, dict):
                value = old | value
            values[flag.name] = value
            if flag.name == "help" and value:
                return Arguments(values, tuple(positional), "help")
        else:
            positional.append(word)
    return Arguments(values, tuple(positional))


def _split(word: str, flags: Mapping[str, Flag]) -> tuple[Flag, str, str | None]:
    """Return the flag of a word, how to show it, and its value if the word has one."""
    if word.startswith("--"):
        given, equals, text = word[2:].partition("=")
        name = given.replace("_", "-")
        if name not in flags:
            raise UsageError(f"unknown flag: --{given}{_nearest(name, flags)}")
        return flags[name], f"--{name}", text if equals else None
    flag = next((flag for flag in flags.values() if flag.short == word[1]), None)
    rest = word[2:]
    if flag is None:
        name = word[1:].partition("=")[0].replace("_", "-")
        hint = f" (did you mean -{word}?)" if name in flags else _nearest(name, flags)
        raise UsageError(f"unknown shorthand flag: {word[1]!r} in {word}{hint}")
    if flag.optional_value and rest and not rest.startswith("="):
        raise UsageError(f"{word}: -{flag.short} takes no value; give flags apart from each other")
    return flag, f"-{flag.short}, --{flag.name}", rest.removeprefix("=") if rest else None


def _nearest(name: str, flags: Mapping[str, Flag]) -> str:
    shown = {f"--{flag.name}": flag for flag in flags.values() if not flag.deprecated}
    return (len(name) > 1 and suggest(f"--{name}", shown)) or "; --help lists them all"


def read_value(flag: Flag, shown: str, text: str) -> Value:
    """Return the typed value of a flag; raise UsageError if its form is wrong."""
    try:
        value = split_list(text) if flag.repeatable else READERS[flag.kind](text)
        # Those of the configuration are checked with it, wherever they are from.
        if flag.choices and not flag.target and value not in flag.choices:
            raise ValueError(f"give one of {', '.join(flag.choices)}")
        return value
    except ValueError as error:
        raise UsageError(f'invalid argument "{text}" for "{shown}" flag: {error}') from error


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


READERS: Final[Mapping[str, Callable[[str], Value]]] = {
    "string": str,
    "strings": split_list,
    "bool": parse_bool,
    "int32": parse_int,
    "uint32": _level,
    "float32": _float32,
    "duration": Duration.parse,
    "ip": _ip,
    "ipport": _ip_port,
    "quantity": Quantity.parse,
    "mapStringBool": lambda text: {k: parse_bool(v) for k, v in split_pairs(text).items()},
    "pattern=N,...": lambda text: tuple(
        VModule(file_pattern=name, verbosity=_level(level))
        for name, level in split_pairs(text).items()
    ),
    "Level": _level,
    "version": lambda text: (
        text if text == "raw" or text.startswith("v") else str(parse_bool(text)).lower()
    ),
    "ProxyMode": str,
    "LocalMode": str,
}
"""Readers of values by the flag's kind; they raise ValueError with the reason."""
