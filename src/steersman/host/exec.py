"""The only door to other programs: run one, feed it, take what it said.

Nothing here knows what the programs are for; a mode says what their exit status means.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

_PATH = (
    ""
    if sys.platform == "win32"
    else "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)


class Result(NamedTuple):
    """How a program ended."""

    returncode: int
    """Exit status; negative for the signal that ended it."""
    stdout: bytes
    stderr: bytes

    @property
    def message(self) -> str:
        """What it said on standard error, in one line."""
        return " ".join(self.stderr.decode(errors="replace").split())


class Exec(Protocol):
    """Runs programs."""

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        """Run a program to its end.

        Args:
            argv: the program, looked up in PATH, and its arguments.
            stdin: what it reads.
            timeout: seconds after which it is killed.

        Raises:
            FileNotFoundError: there is no such program.
            TimeoutError: it did not end in time.
        """
        ...


class SubprocessExec:
    """Runs programs as child processes."""

    def __init__(
        self, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """Take what every command gets.

        Args:
            prefix: words to put before it, such as `ip netns exec NAME`.
            environment: variables to add to our own.
        """
        self.prefix = tuple(prefix)
        path = os.environ.get("PATH", "")
        self._environment = {
            **os.environ,
            "LC_ALL": "C",  # messages are shown and looked at
            "PATH": os.pathsep.join(filter(None, (path, _PATH))),  # daemons often lack sbin
            **(environment or {}),
        }

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        """Run a program to its end, see `Exec.run`; cancelling kills it."""
        process = await asyncio.create_subprocess_exec(
            *self.prefix,
            *argv,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
        )
        try:
            async with asyncio.timeout(timeout):
                stdout, stderr = await process.communicate(stdin or None)
        except TimeoutError:
            raise TimeoutError(f"{argv[0]} did not end within {timeout:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        assert process.returncode is not None
        return Result(process.returncode, stdout, stderr)
