"""Running the programs that modes need: whatever keeps one from running is a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from steersman.host.exec import Exec, Result
from steersman.modes.base import BusyError


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
        BusyError: it did not run to its end; trying again may help.
    """
    try:
        return await execute.run(argv, stdin, timeout=timeout)
    except OSError as error:  # TimeoutError, too
        raise BusyError(reason(argv[0], package, error)) from error
