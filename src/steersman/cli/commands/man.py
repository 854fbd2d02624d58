"""`steersman man`: print a man page, in roff, from the same texts as `--help`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from steersman import __version__
from steersman.cli.command import (
    WHERE,
    Argument,
    Command,
    Example,
    command_names,
    find_command,
    is_table,
)
from steersman.config.flags import FLAGS
from steersman.config.flags_upstream import Flag, Group

_OVERVIEW = (
    "steersman watches Services and EndpointSlices and programs this node's kernel so that "
    "traffic to a Service reaches one of its endpoints. Its commands run that process, answer "
    "questions about it, and change it."
)


def overview_page() -> str:
    """Return steersman(1): all commands."""
    commands = [find_command(name) for name in command_names()]
    lines = [*_head("steersman", "kube-proxy for every node"), ".SH SYNOPSIS"]
    lines += [".B steersman", ".I COMMAND", "[flags]", ".SH DESCRIPTION", _text(_OVERVIEW)]
    lines.append(".SH COMMANDS")
    for command in commands:
        lines += [".TP", f".BR steersman\\-{command.name} (1)", _text(command.summary)]
    return "\n".join(lines) + "\n"


def command_page(command: Command) -> str:
    """Return the page of one command, such as steersman-explain(1)."""
    name = f"steersman-{command.name}"
    lines = [*_head(name, command.summary), ".SH SYNOPSIS", f".B {_text(command.usage)}"]
    lines += [".SH DESCRIPTION", *_paragraphs(command.description or command.summary)]
    if command.arguments:
        lines.append(".SH ARGUMENTS")
        for each in command.arguments:
            lines += [".TP", f".I {_text(each.name)}", _text(each.help)]
    if command.all_flags:
        lines += [".SH OPTIONS", *_flags(command.all_flags)]
    if command.reads_world:
        lines += [".SH WHERE TO READ FROM"]
        lines += ["By default, the running process of this node.", *_flags(map(FLAGS.get, WHERE))]
    elif not command.all_flags and command.group == "Run":
        lines.append(".SH OPTIONS")
        for group in Group:
            flags = [f for f in FLAGS.values() if f.group is group and not f.deprecated]
            if flags and group is not Group.OLD:
                lines += [f".SS {_text(group.value)}", *_flags(flags)]
    if command.examples:
        lines.append(".SH EXAMPLES")
        for example in command.examples:
            lines += [
                ".TP",
                _text(example.purpose.capitalize()) + ":",
                f".B {_text(example.words)}",
            ]
    if command.answer is not None:
        lines.append(".SH EXIT STATUS")
        for code, text in command.exit_codes:
            lines += [".TP", f".B {code}", _text(text)]
    lines += [".SH SEE ALSO", ".BR steersman (1)"]
    return "\n".join(lines) + "\n"


def _head(name: str, summary: str) -> list[str]:
    title = f'.TH {_text(name).upper()} 1 "" "steersman {__version__}" "User Commands"'
    return [title, ".SH NAME", f"{_text(name)} \\- {_text(summary)}"]


def _flags(flags: Iterator[Flag | None] | tuple[Flag, ...] | list[Flag]) -> Iterator[str]:
    for flag in flags:
        assert flag is not None
        short = f"\\-{flag.short}, " if flag.short else ""
        value = "" if flag.optional_value else f" {_text(flag.kind)}"
        yield ".TP"
        yield f".B {short}\\-\\-{_text(flag.name)}{value}"
        default = f" (default {flag.default})" if flag.default not in ("", "false") else ""
        yield _text(flag.help + default)


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        if is_table(paragraph):
            yield from (".nf", *map(_text, paragraph.split("\n")), ".fi")
        else:
            yield _text(" ".join(paragraph.split()))


def _text(text: str) -> str:
    """Escape what roff would take for a request or an escape sequence."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _main(argv: Sequence[str]) -> int:
    from steersman.config import UsageError  # noqa: PLC0415 - only a failure needs it

    if not argv:
        print(overview_page(), end="")
        return 0
    if len(argv) > 1:
        raise UsageError("give one command: steersman man COMMAND")
    try:
        page = command_page(find_command(argv[0]))
    except KeyError as error:
        raise UsageError(f"there is no command {argv[0]!r}") from error
    print(page, end="")
    return 0


COMMAND = Command(
    name="man",
    summary="print the man page of steersman or of a command",
    description="Print the man page of steersman, or of one of its commands.",
    group="Tools",
    arguments=(Argument("COMMAND", "The command; none for the overview.", completes="command"),),
    examples=(Example("steersman man explain | man -l -", "read the page of a command"),),
    main=_main,
)
