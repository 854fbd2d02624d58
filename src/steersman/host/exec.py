"""The only door to other programs: run one, feed it, take what it said.

Nothing here knows what the programs are for; a mode says what their exit status means.

A program gets a process group of its own, and is killed with all that it has started. It is not
tied to the life of this process (PR_SET_PDEATHSIG): that takes code between fork and exec, which is
unsafe beside threads and gives up vfork, on which the cost of a start depends. What is left behind
after kill -9 ends by itself: its pipes are closed, so it reads the end of an unfinished script.

A program that is fed is a writer. When its caller is cancelled (SIGTERM), it gets a moment to
finish what it writes, so that a script is carried out whole or, where it does not end, killed;
the next start repairs that as it does after kill -9.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

log = logging.getLogger(__name__)

_GRACE = 1.0  # seconds that a writer has to finish after its caller was cancelled
_REAPED = 0.5  # seconds within which a killed program ends, unless the kernel does not let it go
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
            PermissionError: it cannot be executed; `strerror` is a sentence.
            TimeoutError: it did not end in time.
            OSError: it cannot be started now (no descriptors, no processes); `strerror` likewise.
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
        """Run a program to its end, see `Exec.run`; cancelling ends it."""
        process = await self._start(argv, fed=bool(stdin))
        talk = asyncio.ensure_future(process.communicate(stdin or None))
        try:
            async with asyncio.timeout(timeout):
                stdout, stderr = await asyncio.shield(talk)
        except TimeoutError:
            raise TimeoutError(f"{argv[0]} did not end within {timeout:g} s") from None
        except asyncio.CancelledError:
            if stdin:
                await asyncio.wait((talk,), timeout=_GRACE)
            raise
        finally:
            if not talk.done():
                await _kill(process, talk, argv[0])
        assert process.returncode is not None
        return Result(process.returncode, stdout, stderr)

    async def _start(self, argv: Sequence[str], *, fed: bool) -> asyncio.subprocess.Process:
        group: dict[str, Any] = {} if sys.platform == "win32" else {"process_group": 0}
        try:
            return await asyncio.create_subprocess_exec(
                *self.prefix,
                *argv,
                stdin=asyncio.subprocess.PIPE if fed else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                **group,
            )
        except FileNotFoundError:
            raise
        except PermissionError as error:
            text = f"{argv[0]} cannot be executed: {error.strerror}"
            raise PermissionError(error.errno, text) from error
        except OSError as error:
            text = f"{argv[0]} cannot be started: {error.strerror}"
            raise OSError(error.errno, text) from error
        except RuntimeError as error:  # asyncio cannot start the thread that waits for it
            raise OSError(errno.EAGAIN, f"{argv[0]} cannot be waited for: {error}") from error


async def _kill(
    process: asyncio.subprocess.Process, talk: asyncio.Future[tuple[bytes, bytes]], name: str
) -> None:
    """Kill a program and what it has started; go on without it if the kernel holds it."""
    with contextlib.suppress(ProcessLookupError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait((talk,), timeout=_REAPED)
    if not talk.done():  # it is reaped when it ends
        talk.cancel()
        log.warning("%s (pid %d) was killed and does not end", name, process.pid)
