"""A command: its texts, flags and arguments. Help, man pages and completion are made of these."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steersman.config.flags import FLAGS
from steersman.config.flags_upstream import Flag, Group
from steersman.config.help import WIDTH, beside, flag_lines

if TYPE_CHECKING:
    from steersman.config.commandline import Parsed
    from steersman.operate.answer import Answer

_COMMANDS: Final = "steersman.cli.commands"
_DEFAULTS: Final = {"string": "", "strings": "", "bool": "false", "uint32": "0"}


def option(
    name: str,
    text: str,
    *,
    kind: str = "string",
    default: str | None = None,
    short: str = "",
    choices: tuple[str, ...] = (),
    completes: str = "",
) -> Flag:
    """Return a flag that upstream lacks; see the fields of Flag."""
    default = _DEFAULTS[kind] if default is None else default
    return Flag(
        name, kind, default, Group.OWN, text, short=short, choices=choices, completes=completes
    )


OUTPUT: Final = option(
    "output",
    "text, wide (more columns), json or yaml.",
    default="text",
    short="o",
    choices=("text", "wide", "json", "yaml"),
)
WATCH: Final = (
    option("watch", "Ask again until interrupted.", kind="bool", short="w"),
    option("interval", "Time between two questions with --watch.", kind="duration", default="2s"),
)
NAMESPACE: Final = option(
    "namespace", "Namespace of names without one.", short="n", completes="namespace"
)
"""For commands that take names."""
WHERE: Final = (
    "manifests",
    "kubeconfig",
    "kubeconfig-context",
    "master",
    "config",
    "proxy-mode",
    "hostname-override",
    "cluster-cidr",
)
"""Flags that say which World a question is about, as the help of a command lists them; all other
settings of `steersman run` are accepted, too."""
WORLD: Final = frozenset(FLAGS) - {
    *("write-config-to", "init-only", "dry-run", "cleanup", "cleanup-iptables")
}
"""All flags of `steersman run` but those that ask it to do something else."""
CLUSTER: Final = frozenset(
    {"kubeconfig", "kubeconfig-context", "master", "config", "kube-api-content-type"}
)
"""Flags of `steersman run` that say how to reach the API server."""


class Argument(msgspec.Struct, frozen=True):
    """A word of the command line that is no flag."""

    name: str
    """As usage shows it, such as `SERVICE`."""
    help: str
    completes: str = ""
    """Kind of names that completion offers: see Flag.completes."""
    required: bool = False
    repeated: bool = False


class Example(msgspec.Struct, frozen=True):
    """A command line, and its purpose."""

    words: str
    purpose: str


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One command of `steersman`. Either `answer` or `main` does the work."""

    name: str
    summary: str
    """One line, without a capital and a full stop."""
    description: str = ""
    """Paragraphs, with an empty line between two."""
    group: str = "Ask"
    """Heading in the list of commands."""
    arguments: tuple[Argument, ...] = ()
    flags: tuple[Flag, ...] = ()
    examples: tuple[Example, ...] = ()
    answer: Callable[[Parsed], Coroutine[Any, Any, Answer]] | None = None
    """Answers a question: its output flags, `--watch` and exit status come from the caller."""
    watch: bool = False
    """Whether `--watch` makes sense."""
    follow: Callable[[Parsed, float], AsyncIterator[Answer] | None] | None = None
    """Answers again and again for `--watch`, once in so many seconds; None, or what returns None,
    asks each time."""
    takes: frozenset[str] = WORLD
    """Flags of `steersman run` that it uses; any other is an error."""
    exit_codes: tuple[tuple[int, str], ...] = (
        (0, "All is well."),
        (1, "Something is wrong."),
        (2, "The question could not be answered."),
    )
    main: Callable[[Sequence[str]], int] | None = None
    """Does everything itself, from the words behind the command's name to the exit status."""
    own_help: bool = False
    """Whether `main` prints the help itself."""

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """The flags of this command, without those of the configuration."""
        if self.answer is None:
            return self.flags
        return (*self.flags, OUTPUT, *(WATCH if self.watch else ()))

    @property
    def reads_world(self) -> bool:
        """Whether it is a question about a World, which flags may name."""
        return self.answer is not None and self.takes >= set(WHERE)

    def check_flags(self, parsed: Parsed) -> None:
        """Refuse flags that would be ignored.

        Raises:
            UsageError: one is given.
        """
        from steersman.config.errors import UsageError  # noqa: PLC0415 - not for --help

        own = {flag.name for flag in self.all_flags}
        for name in parsed.values:
            if name not in own | self.takes:
                hint = (
                    "; `steersman services`, `explain` and `plan` use it" if name in WHERE else ""
                )
                raise UsageError(
                    f"--{name} is a flag of `steersman run` that {self.name} does not use: "
                    f"leave it out{hint}"
                )
        if "interval" in parsed.values and not parsed.values.get("watch"):
            raise UsageError("--interval is for --watch: give that, too, or leave it out")

    @property
    def usage(self) -> str:
        """The line that shows how to call it."""
        words = [f"steersman {self.name}"]
        for each in self.arguments:
            word = each.name + ("..." if each.repeated else "")
            words.append(word if each.required else f"[{word}]")
        if self.all_flags or self.group == "Run":
            words.append("[flags]")
        return " ".join(words)


def command_names() -> tuple[str, ...]:
    """Return the names of all commands, without importing them."""
    from pkgutil import iter_modules  # noqa: PLC0415 - only a list of all needs it

    package = import_module(_COMMANDS)
    return tuple(sorted(module.name for module in iter_modules(package.__path__)))


def find_command(name: str) -> Command:
    """Import a command; raise KeyError if there is none of this name."""
    if not name.isidentifier() or "__" in name or find_spec(f"{_COMMANDS}.{name}") is None:
        raise KeyError(name)
    command: Command = import_module(f"{_COMMANDS}.{name}").COMMAND
    return command


def command_help(command: Command) -> str:
    """Return the text of `steersman COMMAND --help`."""
    parts = [f"Usage: {command.usage}\n"]
    for paragraph in (command.description or command.summary).split("\n\n"):
        text = paragraph if is_table(paragraph) else textwrap.fill(paragraph, WIDTH)
        parts.append(f"{text}\n")
    if command.arguments:
        column = max(len(each.name) for each in command.arguments) + 4
        rows = [beside(f"  {each.name}", each.help, column) for each in command.arguments]
        parts.append("\n".join(["Arguments:", *chain(*rows), ""]))
    if command.all_flags:
        parts.append("\n".join(["Flags:", *flag_lines(command.all_flags), ""]))
    if command.reads_world:
        where = [FLAGS[name] for name in WHERE]
        note = "  By default, the running process of this node. Other flags of `run` also work."
        parts.append("\n".join(["Where to read from:", *flag_lines(where), note, ""]))
    if command.examples:
        examples = [f"  # {each.purpose}\n  {each.words}\n" for each in command.examples]
        parts.append("\n".join(["Examples:", *examples]))
    if command.answer is not None:
        rows = [beside(f"  {code}", text, 5) for code, text in command.exit_codes]
        parts.append("\n".join(["Exit status:", *chain(*rows), ""]))
    return "\n".join(parts).rstrip("\n")


def is_table(paragraph: str) -> bool:
    """Whether the lines of a paragraph of a description are rows, which stay as they are."""
    return "  " in paragraph
