"""Shell completion: the shells ask `steersman __complete WORDS...` for candidates.

One implementation for bash, zsh and fish, which knows commands, flags, choices and, from the
running process, the names of Services, endpoints, pods and nodes. A candidate is a line, with its
description behind a tab; the line `:file` asks the shell to complete a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from steersman.cli.command import Argument, Command, command_names, find_command
from steersman.config.flags import FLAGS
from steersman.config.flags_upstream import Flag
from steersman.modes.specs import SPECS

SHELLS: Final = ("bash", "zsh", "fish")
"""Shells that are supported."""
FILE: Final = ":file"
"""The candidate that stands for any path."""
_FILES: Final = frozenset({"config", "kubeconfig", "manifests", "write-config-to"})
Names = Callable[[str], Sequence[str]]
"""Returns the names of a kind (service, endpoint, pod, node, namespace) that exist now."""


def candidates(words: Sequence[str], names: Names) -> Iterator[str]:
    """Yield the candidates for the last word, each with a tab and its description.

    Args:
        words: the command line up to the cursor, without `steersman`; the last one may be empty.
        names: looks up the objects of the cluster.
    """
    current = words[-1] if words else ""
    if len(words) <= 1:
        for name in command_names():
            if name.startswith(current):
                yield f"{name}\t{find_command(name).summary}"
        return
    try:
        command = find_command(words[0])
    except KeyError:
        return
    flags = _flags(command)
    name, equals, value = current.partition("=")
    if equals and (flag := flags.get(name)):
        yield from (f"{name}={found}" for found in _values(flag, value, names))
    elif (flag := flags.get(words[-2])) and not flag.optional_value:
        yield from _values(flag, current, names)
    elif current.startswith("-"):
        for shown, flag in flags.items():
            if shown.startswith(current):
                yield f"{shown}\t{flag.help}"
    else:
        given = _arguments_before(words[1:-1], flags)
        position = min(given, len(command.arguments) - 1)
        if command.arguments and (given <= position or command.arguments[-1].repeated):
            yield from _argument(command.arguments[position], current, names)


def _flags(command: Command) -> dict[str, Flag]:
    """Return the flags of a command as they are written."""
    own = command.all_flags
    taken = {"help", *(command.takes if own else ())}
    if command.group == "Run" and not own:  # `run` and `cleanup`
        taken = set(FLAGS)
    configuration = [flag for name, flag in FLAGS.items() if name in taken]
    offered = [flag for flag in (*own, *configuration) if not flag.deprecated]
    return {f"--{flag.name}": flag for flag in offered} | {
        f"-{flag.short}": flag for flag in offered if flag.short
    }


def _arguments_before(words: Sequence[str], flags: dict[str, Flag]) -> int:
    """Count the words that are neither flags nor values of flags."""
    count, is_value = 0, False
    for word in words:
        if is_value:
            is_value = False
        elif word.startswith("-"):
            flag = flags.get(word)
            is_value = flag is not None and not flag.optional_value
        else:
            count += 1
    return count


def _values(flag: Flag, current: str, names: Names) -> Iterator[str]:
    if flag.choices:
        yield from (choice for choice in flag.choices if choice.startswith(current))
    elif flag.name in _FILES or flag.completes == "file":
        yield FILE
    else:
        yield from _named(flag.completes, current, names)


def _argument(argument: Argument, current: str, names: Names) -> Iterator[str]:
    if argument.completes == "file":
        yield FILE
    elif argument.name.islower():  # the words themselves
        yield from (word for word in argument.name.split("|") if word.startswith(current))
    else:
        yield from _named(argument.completes, current, names)


def _named(kinds: str, current: str, names: Names) -> Iterator[str]:
    """Yield the names of one or more kinds, given with commas between them."""
    for kind in filter(None, kinds.split(",")):
        if kind == "mode":
            found: Sequence[str] = tuple(SPECS)
        elif kind == "command":
            found = command_names()
        elif kind == "shell":
            found = SHELLS
        else:
            found = names(kind)
        yield from (name for name in found if name.startswith(current))


def script(shell: str) -> str:
    """Return the script that makes a shell ask `__complete`; KeyError if it is none of SHELLS."""
    return {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}[shell]


# bash splits words at `:` and `=`, and replaces only the last part: the script therefore takes the
# words from the line itself, and cuts the part that bash keeps from each candidate.
_BASH: Final = r"""# bash completion of steersman
_steersman() {
    local line=${COMP_LINE:0:COMP_POINT} words current kept candidate
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current=${words[-1]}
    kept=${current%"${current##*[:=]}"}
    COMPREPLY=()
    while IFS=$'\t' read -r candidate _; do
        if [[ $candidate == :file ]]; then
            compopt -o default 2>/dev/null
            return
        fi
        COMPREPLY+=("${candidate#"$kept"}")
    done < <("${words[0]}" __complete "${words[@]:1}" 2>/dev/null)
}
complete -F _steersman steersman
"""
_ZSH: Final = r"""#compdef steersman
_steersman() {
    local line
    local -a found
    while IFS= read -r line; do
        if [[ $line == :file ]]; then
            _files
            return
        fi
        line=${line//:/\\:}
        found+=("${line/$'\t'/:}")
    done < <(${words[1]} __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
    _describe -o steersman found
}
compdef _steersman steersman
"""
_FISH: Final = r"""# fish completion of steersman
function __steersman_complete
    set -l words (commandline -opc)
    for line in ($words[1] __complete $words[2..-1] (commandline -ct) 2>/dev/null)
        if test "$line" = :file
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c steersman -f -a '(__steersman_complete)'
"""
