"""Where the commands begin: find the command, run it, report its failures.

    words --> Command --> main(words)                    run, cleanup, config, ...
                    \\--> parse --> answer(parsed) --> print, exit status

Exit status of a question: 0 fine, 1 something is wrong, 2 it could not be answered. A command line
that is not understood is 2 as well, except for `kube-proxy`, which exits with 1 as upstream does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from steersman import __version__
from steersman.cli.failures import expected_errors, guarded, text_of

if TYPE_CHECKING:
    from steersman.cli.command import Command
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


def main(argv: Sequence[str] | None = None) -> int:
    """Run `steersman`; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _dispatch(words), "steersman")


def kube_proxy(argv: Sequence[str] | None = None) -> int:
    """Run `kube-proxy`: upstream's command line; return the exit status."""
    import_msgspec()
    from steersman.cli.commands.run import run_words  # noqa: PLC0415 - the whole program

    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: run_words(words, "kube-proxy"), "kube-proxy")


def import_msgspec() -> None:
    """Import msgspec without typing_extensions, which it prefers to Python's own typing.

    That takes 0.3 MB, and nothing of ours needs it.
    """
    if "typing_extensions" not in sys.modules:
        sys.modules["typing_extensions"] = None  # type: ignore[assignment] # importing it fails
        import msgspec  # noqa: F401, PLC0415 - see above

        del sys.modules["typing_extensions"]


def _dispatch(words: Sequence[str]) -> int:
    if words in (["version"], ["--version"]):  # without importing anything
        print(f"steersman {__version__}")
        return 0
    import_msgspec()
    from steersman.cli.command import command_help, command_names, find_command  # noqa: PLC0415

    if words[:1] == ["__complete"]:
        from steersman.cli.completion import candidates  # noqa: PLC0415 - imports all commands
        from steersman.operate.client import known_names  # noqa: PLC0415

        for line in candidates(words[1:], known_names):
            print(line)
        return 0
    if words[:1] == ["help"] and words[1:]:  # `help run` is `run --help`
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    name = words[0]
    try:
        command = find_command(name)
    except KeyError:
        from difflib import get_close_matches  # noqa: PLC0415 - only a failure needs them

        from steersman.config import UsageError  # noqa: PLC0415

        close = get_close_matches(name, command_names(), 1)
        hint = f"did you mean {close[0]}?" if close else "steersman --help lists them all"
        raise UsageError(f"unknown command {name!r}; {hint}") from None
    if command.main is not None:
        if set(words[1:]) & {"--help", "-h"} and not command.own_help:
            print(command_help(command))
            return 0
        call = partial(command.main, words[1:])
    else:
        call = partial(ask, command, words[1:])
    return guarded(call, f"steersman {name}")


def usage() -> str:
    """Return the list of commands under their headings."""
    from steersman.cli.command import command_names, find_command  # noqa: PLC0415
    from steersman.config.help import beside  # noqa: PLC0415

    commands = [find_command(name) for name in command_names()]
    lines = ["Usage: steersman COMMAND [flags]"]
    for group in ("Run", "Ask", "Change", "Tools"):
        lines += ["", f"{group}:"]
        for command in commands:
            if command.group == group:
                lines += beside(f"  {command.name}", command.summary, 16)
    lines += ["", "steersman COMMAND --help shows flags and examples."]
    return "\n".join(lines)


# Questions


def ask(command: Command, words: Sequence[str]) -> int:
    """Answer a question of the command line; return the exit status."""
    from steersman.cli.command import command_help  # noqa: PLC0415

    try:
        from steersman.config import parse_command_line  # noqa: PLC0415 - not for `version`
        from steersman.host.process import gain_net_admin  # noqa: PLC0415

        parsed = parse_command_line(
            words, extra=command.all_flags, allow_arguments=bool(command.arguments)
        )
        if parsed.help:
            print(command_help(command))
            return 0
        if parsed.version:
            print(f"steersman {__version__}")
            return 0
        _check_arguments(command, parsed)
        gain_net_admin([sys.executable, "-m", "steersman", command.name, *words])
        return _watched(command, parsed) if parsed.values.get("watch") else _once(command, parsed)
    except expected_errors() as error:
        print(f"steersman {command.name}: {text_of(error)}", file=sys.stderr)
        return 2


def _check_arguments(command: Command, parsed: Parsed) -> None:
    from steersman.config import UsageError  # noqa: PLC0415 - not for `version`

    command.check_flags(parsed)
    required = [each for each in command.arguments if each.required]
    if len(parsed.arguments) < len(required):
        raise UsageError(f"give {required[len(parsed.arguments)].name}: {command.usage}")
    repeated = any(each.repeated for each in command.arguments)
    if len(parsed.arguments) > len(command.arguments) and not repeated:
        extra = parsed.arguments[len(command.arguments)]
        raise UsageError(f"unexpected argument {extra!r}: {command.usage}")


def _once(command: Command, parsed: Parsed) -> int:
    from steersman.cli.output import print_answer  # noqa: PLC0415
    from steersman.run.process.memory import collect_rarely  # noqa: PLC0415

    async def answer_and_print() -> int:
        assert command.answer is not None
        answer = await command.answer(parsed)
        print_answer(answer, str(parsed.values.get("output", "text")))
        return answer.exit_code

    collect_rarely()
    # The answer is not the result of the task: asyncio.run of Python 3.11 makes the repr of that
    # when it ends (by signal.getsignal), which takes half a second of 5,000 Services.
    return asyncio.run(answer_and_print())


def _watched(command: Command, parsed: Parsed) -> int:
    """Print the answer again whenever it differs, until interrupted."""
    from steersman.cli.output import print_next  # noqa: PLC0415

    output = str(parsed.values.get("output", "text"))
    status = 0

    async def watch() -> None:
        nonlocal status
        before: object = None
        async for answer in _answers(command, parsed):
            status = answer.exit_code
            if (now := answer.watched) != before:
                before = now
                print_next(answer, output)

    with suppress(KeyboardInterrupt):
        asyncio.run(watch())
    return status


async def _answers(command: Command, parsed: Parsed) -> AsyncIterator[Answer]:
    """Yield the answer after each interval.

    The first failure to answer is an error; a later one is reported, and the question asked again:
    the process restarts, and one watches to see that.
    """
    from steersman.config import UsageError  # noqa: PLC0415

    assert command.answer is not None
    seconds = float(getattr(parsed.values.get("interval"), "seconds", 2.0))
    if seconds <= 0:
        raise UsageError("--interval must be above 0s")
    following = command.follow(parsed, seconds) if command.follow is not None else None
    if following is not None:
        async for answer in following:
            yield answer
        return
    yield await command.answer(parsed)
    said = ""
    while True:
        await asyncio.sleep(seconds)
        try:
            answer = await command.answer(parsed)
        except expected_errors() as error:
            if (text := text_of(error)) != said:
                said = text
                print(f"steersman {command.name}: {text}", file=sys.stderr, flush=True)
        else:
            said = ""
            yield answer
