"""Running the programs that modes need: whatever keeps one from running is a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from steersman.host.exec import Exec, Result
from steersman.model.errors import BusyError

_KILLED = {9: "SIGKILL", 15: "SIGTERM"}
"""Signals that others send, for want of memory say; a crash may be due to what was written."""


def reason(program: str, package: str, error: OSError) -> str:
    """Say why a program did not run to its end, and what to do where that is known."""
    if isinstance(error, FileNotFoundError):
        return f"{program} is not installed; install the package {package}"
    return error.strerror or str(error)


async def run(
    execute: Exec, argv: Sequence[str], stdin: bytes = b"", *, package: str, timeout: float = 60.0
) -> Result:
    """Run a program to its end.

    Args:
        execute: runs programs.
        argv: the program and its arguments.
        stdin: what it reads.
        package: that the program is in.
        timeout: seconds after which it is killed.

    Raises:
        BusyError: it did not run to its end; how much it did is not known, and trying again may
            help.
    """
    try:
        result = await execute.run(argv, stdin, timeout=timeout)
    except OSError as error:  # TimeoutError, too
        raise BusyError(reason(argv[0], package, error)) from error
    if -result.returncode in _KILLED:
        raise BusyError(f"{argv[0]} was killed by {_KILLED[-result.returncode]}")
    return result
