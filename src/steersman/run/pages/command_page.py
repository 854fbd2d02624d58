"""Questions of pages that only a command on this node can answer: `POST /run`.

A page asks for a doctor's verdict, a dump or a trace of this node. Their code is in operate/, which
this process does not load: it runs the command as a program of its own, with few flags, for a
limited time, and at most two at once. None of the flags names a file, so nobody can read one.

    {"command": "doctor", "arguments": ["shop/web"]}
    --> {"running": 1.0}  every second, then  {"exitCode": 1, "answer": {...}}
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from steersman.host.exec import Exec, Result, SubprocessExec
from steersman.model.command_run import RunLine, RunRequest
from steersman.model.findings import clipped, printable, quoted
from steersman.run.serve.http import Answer, Request

_AT_ONCE = 2
_SECONDS = 60.0
_BEAT = 1.0
"""Seconds between two lines while the command runs, and until it ends if the client has left."""
_MOST_ARGUMENTS, _LONGEST = 16, 600
_LONGEST_ERROR = 2000

COMMANDS: Mapping[str, Mapping[str, bool]] = {
    "doctor": {
        "from": True,
        "to": True,
        "from-pod": True,
        "namespace": True,
        "no-dial": False,
    },
    "dump": {"namespace": True},
    "explain": {
        **{"from": True, "to": True, "node": True, "interface": True, "namespace": True},
        "problems": False,
    },
    "trace": {"from": True, "to": True, "namespace": True, "timeout": True, "wait": False},
}
"""The commands, and their flags that are allowed: whether each has a value."""


def words_of(request: RunRequest) -> list[str]:
    """Return the words of the command line, without the program.

    Raises:
        ValueError: something of it is not allowed; the message names all that are.
    """
    flags = COMMANDS.get(request.command)
    if flags is None:
        raise ValueError(f"{quoted(request.command)} cannot be run; there is {', '.join(COMMANDS)}")
    if len(request.arguments) > _MOST_ARGUMENTS:
        raise ValueError(f"at most {_MOST_ARGUMENTS} arguments are allowed")
    found, names = [request.command, "--output=json"], list[str]()
    arguments = iter(request.arguments)
    for argument in arguments:
        if len(argument) > _LONGEST or not argument.isprintable():
            raise ValueError(
                f"the argument {quoted(argument)} is longer than {_LONGEST} characters, or has "
                "some that cannot be printed"
            )
        if not argument.startswith("-"):
            names.append(argument)
            continue
        # A value is attached to its flag, so that it is never read as another flag.
        name, given, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in flags:
            known = ", ".join(f"--{each}" for each in flags)
            raise ValueError(f"{request.command} has no flag {quoted(argument)} here, but {known}")
        if flags[name] and not given:
            value = next(arguments, "")
        if not flags[name] and given and value not in ("true", "false"):
            raise ValueError(f"--{name} is true or false, not {quoted(value)}")
        found.append(f"--{name}={value}" if flags[name] or given else f"--{name}")
    if len(names) > (request.command != "trace"):
        raise ValueError(f"unexpected argument {quoted(names[-1])}")
    return [*found, *names]


class CommandPage:
    """Runs commands for pages."""

    def __init__(self, execute: Exec | None = None) -> None:
        self._execute = execute or SubprocessExec()
        self._running = 0

    async def serve(self, request: Request) -> Answer:
        """Answer `POST /run` with lines of JSON; the last one has the answer."""
        try:
            words = words_of(msgspec.json.decode(await request.read(), type=RunRequest))
        except (msgspec.MsgspecError, ValueError) as error:
            return Answer(f"{error}\n", 400)
        if self._running >= _AT_ONCE:
            text = f"{_AT_ONCE} commands run for other pages; ask again when one has ended\n"
            return Answer(text, 503)
        return Answer(pieces=self._lines(words), content_type="application/x-ndjson")

    async def _lines(self, words: Sequence[str]) -> AsyncGenerator[bytes]:
        """Run a command; end it if the client leaves."""
        argv = [sys.executable, "-P", "-m", "steersman", *words]
        began = time.monotonic()
        self._running += 1
        task = asyncio.ensure_future(self._execute.run(argv, timeout=_SECONDS))
        try:
            while not (await asyncio.wait((task,), timeout=_BEAT))[0]:
                running = RunLine(running=round(time.monotonic() - began, 1))
                yield msgspec.json.encode(running) + b"\n"
            yield self.last_line(words[0], task) + b"\n"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._running -= 1

    @staticmethod
    def last_line(command: str, task: asyncio.Future[Result]) -> bytes:
        """Return the line about the end of a command."""
        try:
            result = task.result()
        except (OSError, TimeoutError) as error:
            return msgspec.json.encode(RunLine(exit_code=2, error=f"steersman {command}: {error}"))
        try:
            answer = msgspec.json.decode(result.stdout)
        except msgspec.DecodeError:  # the command says on stderr why it has no answer
            text = clipped(printable(result.message), _LONGEST_ERROR)
            text = text or f"steersman {command} ended with status {result.returncode}"
            return msgspec.json.encode(RunLine(exit_code=result.returncode or 2, error=text))
        return msgspec.json.encode(RunLine(exit_code=result.returncode, answer=answer))
