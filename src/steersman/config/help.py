"""Print the flags: `--help`, shell completion and `/flagz`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from steersman.config.flags import FLAGS, UPSTREAM
from steersman.config.flags_upstream import Flag, Group
from steersman.config.types import VModule
from steersman.model.addresses import without_password

if TYPE_CHECKING:  # the help of a command needs no parser
    from steersman.config.commandline import Value

_WIDTH: Final = 100
_COLUMN: Final = 44
_ZERO: Final = frozenset({"", "0", "0s", "false"})
_FILES: Final = frozenset({"config", "kubeconfig", "manifests", "write-config-to"})
SHELLS: Final = ("bash", "zsh", "fish")
"""Shells that `completion` supports."""


def help_text(program: str = "kube-proxy", extra: Sequence[Flag] = ()) -> str:
    """Return all flags under their headings, without deprecated ones."""
    sections = [f"Usage: {program} [flags]\n"]
    for group in Group:
        flags = [f for f in (*FLAGS.values(), *extra) if f.group is group and not f.deprecated]
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
        first, *rest = textwrap.wrap(text, _WIDTH - _COLUMN)
        if len(left) + 2 > _COLUMN:
            yield left
            left = ""
        yield f"{left:{_COLUMN}}{first}"
        yield from (" " * _COLUMN + line for line in rest)


def flagz(values: Mapping[str, Value], program: str = "kube-proxy") -> str:
    """Return the body of `/flagz`: upstream's flags and their values."""
    lines = [
        f"\n{program} flagz",
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


# Shell completion


def completion(shell: str, *, program: str = "kube-proxy", commands: Sequence[str] = ()) -> str:
    """Return a completion script; raise ValueError if the shell is none of SHELLS."""
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in scripts:
        raise ValueError(f"completion for {shell!r}: give one of {', '.join(SHELLS)}")
    offered = [flag for flag in FLAGS.values() if not flag.deprecated]
    return scripts[shell](program, commands, offered)


def _bash(program: str, commands: Sequence[str], flags: Sequence[Flag]) -> str:
    function = f"_{program.replace('-', '_')}"
    names = " ".join(f"--{flag.name}" for flag in flags)
    cases = "".join(
        f'    --{flag.name}) COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$cur")); '
        "return ;;\n"
        for flag in flags
        if flag.choices
    )
    files = "|".join(f"--{flag.name}" for flag in flags if flag.name in _FILES)
    return (
        f"# bash completion of {program}\n"
        f"{function}() {{\n"
        '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}"\n'
        '  [[ $cur == = ]] && cur=""\n'
        '  [[ $prev == = ]] && prev="${COMP_WORDS[COMP_CWORD-2]}"\n'
        '  case "$prev" in\n'
        f"{cases}"
        f'    {files}) COMPREPLY=($(compgen -f -- "$cur")); return ;;\n'
        "  esac\n"
        f'  COMPREPLY=($(compgen -W "{" ".join([*commands, names])}" -- "$cur"))\n'
        "}\n"
        f"complete -o default -F {function} {program}\n"
    )


def _zsh(program: str, commands: Sequence[str], flags: Sequence[Flag]) -> str:
    rows = []
    for flag in flags:
        text = _escaped(flag.help)
        if flag.optional_value:
            rows.append(f"  '--{flag.name}[{text}]'")
        else:
            action = f"({' '.join(flag.choices)})" if flag.choices else ""
            action = "_files" if flag.name in _FILES else action
            rows.append(f"  '--{flag.name}=[{text}]:{_escaped(flag.kind)}:{action}'")
    if commands:
        rows.append(f"  '1:command:({' '.join(commands)})'")
    return f"#compdef {program}\n_arguments \\\n" + " \\\n".join(rows) + "\n"


def _escaped(text: str) -> str:
    """Quote a text for zsh's _arguments."""
    quoted = text.replace("\\", "\\\\").replace("'", "'\\''")
    for mark in "[]:":
        quoted = quoted.replace(mark, "\\" + mark)
    return quoted


def _fish(program: str, commands: Sequence[str], flags: Sequence[Flag]) -> str:
    lines = [f"complete -c {program} -f"]
    lines += [f"complete -c {program} -n __fish_use_subcommand -a {name}" for name in commands]
    for flag in flags:
        text = flag.help.replace("\\", "\\\\").replace("'", "\\'")
        short = f" -s {flag.short}" if flag.short else ""
        value = "" if flag.optional_value else (" -rF" if flag.name in _FILES else " -x")
        choices = f" -a '{' '.join(flag.choices)}'" if flag.choices else ""
        lines.append(f"complete -c {program}{short} -l {flag.name}{value}{choices} -d '{text}'")
    return "\n".join(lines) + "\n"
