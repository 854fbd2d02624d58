"""What is said about the flags: `--help`, shell completion, `/flagz`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from steersman.config.commandline import Value
from steersman.config.flags import FLAGS, UPSTREAM
from steersman.config.flags_upstream import Flag, Group
from steersman.config.types import VModule
from steersman.model.addresses import without_password

_WIDTH: Final = 100
_COLUMN: Final = 44
_ZERO: Final = frozenset({"", "0", "0s", "false"})
_FILES: Final = frozenset({"config", "kubeconfig", "manifests", "write-config-to"})
SHELLS: Final = ("bash", "zsh", "fish")
"""Shells that `completion` knows."""


def help_text(program: str = "kube-proxy", extra: Sequence[Flag] = ()) -> str:
    """All flags under their headings, old ones left out."""
    intro = f"Usage: {program} [flags]\n"
    sections = [_section(group, extra) for group in Group if group is not Group.OLD]
    return "\n".join([intro, *filter(None, sections)])


def _section(group: Group, extra: Sequence[Flag]) -> str:
    shown = [f for f in (*FLAGS.values(), *extra) if f.group is group and not f.deprecated]
    lines = [line for flag in shown for line in _described(flag)]
    return "\n".join([f"{group}:", *lines, ""]) if lines else ""


def _described(flag: Flag) -> Iterator[str]:
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
    """The body of `/flagz`: upstream's flags and the values that were given for them."""
    head = (
        f"\n{program} flagz\n"
        "Warning: This endpoint is not meant to be machine parseable, has no formatting "
        "compatibility guarantees and is for debugging purposes only.\n"
    )
    rows = (f"{name} {_flag_value(FLAGS[name], values)}" for name in sorted(UPSTREAM))
    return head + without_password("\n".join(rows)) + "\n"


def _flag_value(flag: Flag, values: Mapping[str, Value]) -> str:
    if flag.name not in values:
        return "[]" if flag.kind == "strings" else flag.default
    return show_value(flag, values[flag.name])


def show_value(flag: Flag, value: Value) -> str:
    """A flag's value as upstream prints it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ",".join(f"{name}={str(on).lower()}" for name, on in sorted(value.items()))
    if isinstance(value, tuple):
        items = ",".join(map(_item, value))
        return f"[{items}]" if flag.kind == "strings" else items
    return f"{value:g}" if isinstance(value, float) else str(value)


def _item(item: str | VModule) -> str:
    return f"{item.file_pattern}={item.verbosity}" if isinstance(item, VModule) else item


def completion(shell: str, *, program: str = "kube-proxy", commands: Sequence[str] = ()) -> str:
    """A completion script for a shell; ValueError where the shell is none of SHELLS."""
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in scripts:
        raise ValueError(f"completion for {shell!r}: give one of {', '.join(SHELLS)}")
    return scripts[shell](program, commands)


def _offered() -> list[Flag]:
    return [flag for flag in FLAGS.values() if not flag.deprecated]


def _bash(program: str, commands: Sequence[str]) -> str:
    function = f"_{program.replace('-', '_')}"
    names = " ".join(f"--{flag.name}" for flag in _offered())
    cases = "".join(
        f'    --{flag.name}) COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$cur")); '
        "return ;;\n"
        for flag in _offered()
        if flag.choices
    )
    files = "|".join(f"--{flag.name}" for flag in _offered() if flag.name in _FILES)
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


def _zsh(program: str, commands: Sequence[str]) -> str:
    rows = [f"  '{_zsh_flag(flag)}'" for flag in _offered()]
    if commands:
        rows.append(f"  '1:command:({' '.join(commands)})'")
    return f"#compdef {program}\n_arguments \\\n" + " \\\n".join(rows) + "\n"


def _zsh_flag(flag: Flag) -> str:
    text = _zsh_text(flag.help)
    if flag.optional_value:
        return f"--{flag.name}[{text}]"
    action = f"({' '.join(flag.choices)})" if flag.choices else ""
    if flag.name in _FILES:
        action = "_files"
    return f"--{flag.name}=[{text}]:{_zsh_text(flag.kind)}:{action}"


def _zsh_text(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace("'", "'\\''")
    for mark in "[]:":
        quoted = quoted.replace(mark, "\\" + mark)
    return quoted


def _fish(program: str, commands: Sequence[str]) -> str:
    lines = [f"complete -c {program} -f"]
    lines += [f"complete -c {program} -n __fish_use_subcommand -a {name}" for name in commands]
    return "\n".join([*lines, *(_fish_flag(program, flag) for flag in _offered())]) + "\n"


def _fish_flag(program: str, flag: Flag) -> str:
    text = flag.help.replace("\\", "\\\\").replace("'", "\\'")
    short = f" -s {flag.short}" if flag.short else ""
    value = "" if flag.optional_value else (" -rF" if flag.name in _FILES else " -x")
    choices = f" -a '{' '.join(flag.choices)}'" if flag.choices else ""
    return f"complete -c {program}{short} -l {flag.name}{value}{choices} -d '{text}'"
