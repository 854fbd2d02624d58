"""Print the flags: `--help` and `/flagz`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from steersman.config.flags import FLAGS, UPSTREAM
from steersman.config.flags_upstream import Flag, Group
from steersman.config.types import VModule
from steersman.model.addresses import without_password

if TYPE_CHECKING:  # the help of a command needs no parser
    from steersman.config.arguments import Value

WIDTH: Final = 80
"""Columns of the terminals that help is made for."""
_COLUMN: Final = 34
_ZERO: Final = frozenset({"", "0", "0s", "false"})


def help_text(program: str = "kube-proxy") -> str:
    """Return all flags under their headings, without deprecated ones."""
    sections = [f"Usage: {program} [flags]\n"]
    for group in Group:
        flags = [f for f in FLAGS.values() if f.group is group and not f.deprecated]
        if not flags or group is Group.OLD:
            continue
        lines = [f"{group}:", *flag_lines(flags)]
        sections.append("\n".join([*lines, ""]))
    return "\n".join(sections)


def flag_lines(flags: Iterable[Flag]) -> Iterator[str]:
    """Yield the lines of `--help` about some flags."""
    for flag in flags:
        kind = "" if flag.optional_value else f" {flag.kind}"
        left = f"  {f'-{flag.short}, ' if flag.short else '    '}--{flag.name}{kind}"
        text = flag.help
        if flag.default not in _ZERO:
            text += f" (default {flag.default})"
        yield from beside(left, text, _COLUMN)


def beside(left: str, text: str, column: int) -> Iterator[str]:
    """Yield the lines of a text that begins at a column, with something on its left."""
    if len(left) + 2 > column:
        yield left
        left = ""
    for line in textwrap.wrap(text, WIDTH - column, break_on_hyphens=False):
        yield f"{left:{column}}{line}"
        left = ""


def flagz(values: Mapping[str, Value]) -> str:
    """Return the body of `/flagz`: upstream's flags and their values."""
    lines = [
        "\nkube-proxy flagz",
        "Warning: This endpoint is not meant to be machine parseable, has no formatting "
        "compatibility guarantees and is for debugging purposes only.",
    ]
    for name in sorted(UPSTREAM):
        flag = FLAGS[name]
        default = "[]" if flag.kind == "strings" else flag.default
        lines.append(f"{name} {show_value(flag, values[name]) if name in values else default}")
    return without_password("\n".join(lines)) + "\n"


def show_value(flag: Flag, value: Value) -> str:
    """Return a flag's value as upstream prints it."""
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return ",".join(f"{name}={str(on).lower()}" for name, on in sorted(value.items()))
        case tuple():
            items = ",".join(
                f"{item.file_pattern}={item.verbosity}" if isinstance(item, VModule) else item
                for item in value
            )
            return f"[{items}]" if flag.kind == "strings" else items
        case float():
            return f"{value:g}"
        case _:
            return str(value)
