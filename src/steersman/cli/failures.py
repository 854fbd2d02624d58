"""What a command that fails prints, and its exit status."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import Final, TextIO

_PIPE_CLOSED: Final = 128 + 13  # as shells report SIGPIPE
_INTERRUPTED: Final = 128 + 2


class CommandError(Exception):
    """A command failed; the message says why and what to do."""


def expected_errors() -> tuple[type[BaseException], ...]:
    """Return the errors whose text is enough for a user; others are defects."""
    from steersman.config import ConfigError  # noqa: PLC0415 - only a failure needs them
    from steersman.host.sysctl import SysctlError  # noqa: PLC0415
    from steersman.model.errors import ApplyError, BusyError  # noqa: PLC0415
    from steersman.operate.answer import QuestionError  # noqa: PLC0415
    from steersman.run.process.startup import StartError  # noqa: PLC0415
    from steersman.source.kubeconfig import KubeconfigError  # noqa: PLC0415

    known = (ApplyError, BusyError, ConfigError, KubeconfigError, QuestionError)
    return (CommandError, StartError, SysctlError, TimeoutError, *known)


def guarded(call: Callable[[], int], program: str) -> int:
    """Run a command; report its failures, also those of writing to standard output."""
    try:
        status = call()
        sys.stdout.flush()
    except BaseException as error:
        status = report(error, program)
    try:
        if sys.stderr is not None:  # it was closed before we began
            sys.stderr.flush()
    except OSError:  # what could not be logged, as a disk is full, is no failure of the command
        _drop(sys.stderr)
    return status


def report(error: BaseException, program: str) -> int:
    """Print an error, also of a task of the daemon; return the exit status.

    Expected errors are a sentence each. All others are defects and get a traceback.
    """
    match error:
        case BrokenPipeError():  # the reader of a pipe is gone: `steersman run --help | head`
            _drop(sys.stdout)
            return _PIPE_CLOSED
        case OSError(errno=errno.ENOSPC):
            _drop(sys.stdout)
            print(f"{program}: output: {error.strerror}", file=sys.stderr)
        case BaseExceptionGroup():
            for inner in error.exceptions:
                report(inner, program)
        case KeyboardInterrupt():
            return _INTERRUPTED
        case SystemExit():
            raise error
        case _ if isinstance(error, expected_errors()):
            print(f"{program}: {text_of(error)}", file=sys.stderr)
            return 1 if program == "kube-proxy" else _status_of(error)
        case _:
            traceback.print_exception(error)
    return 1


def _status_of(error: BaseException) -> int:
    """Return 2 for a question without an answer and a command line that is not understood."""
    from steersman.config import UsageError  # noqa: PLC0415 - only a failure needs them
    from steersman.operate.answer import QuestionError  # noqa: PLC0415

    return 2 if isinstance(error, UsageError | QuestionError) else 1


def text_of(error: BaseException) -> str:
    """Return the lines of an error, printable: names of objects in them may hold anything."""
    from steersman.model.findings import printable  # noqa: PLC0415 - only a failure needs it

    return "\n".join(map(printable, str(error).split("\n")))


def _drop(stream: TextIO) -> None:
    """Discard what a stream still holds, so that the interpreter's last flush cannot fail."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
