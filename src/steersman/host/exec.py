"""Run other programs as child processes: the only module that starts any.

A program gets a process group of its own and is killed with everything that it started. It is not
tied to the life of this process (PR_SET_PDEATHSIG): that takes code between fork and exec, which is
unsafe beside threads and gives up vfork, on which the cost of a start depends. A program that
outlives us after kill -9 ends by itself: its pipes are closed, so its script ends early. A
`Successor` makes use of that.

A program with input is a writer. If its caller is cancelled (SIGTERM), it gets a moment to finish,
so that a script is carried out as a whole. A writer that does not finish in time is killed; the
next start repairs the rest, as it does after kill -9.

A thread waits for the program (`run_tool`): that of a KernelWorker, or one of its own for a caller
on the event loop (`run`). It looks several times a second whether the caller was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple, Protocol

from steersman.host.threads import in_thread
from steersman.model.errors import BusyError

log = logging.getLogger(__name__)

_GRACE = 1.0  # seconds for a writer to finish after its caller was cancelled
_LOOK = 0.1  # seconds between two looks whether the caller of a program was cancelled
_LOOK_AT_SIZE = 0.01  # or whether it has written too much
_REAPED = 0.5  # seconds within which a killed program ends, unless it is stuck in the kernel
_PATH = (
    ""
    if sys.platform == "win32"
    else "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)


# `process_group`, unlike a `preexec_fn`, does not rule vfork out.
_OWN_GROUP: dict[str, Any] = {} if sys.platform == "win32" else {"process_group": 0}


class Result(NamedTuple):
    """How a program ended."""

    returncode: int
    """Exit status; minus the signal number if a signal ended it."""
    stdout: bytes
    stderr: bytes
    pid: int = 0
    """Its process ID; 0 if it is not known."""

    @property
    def message(self) -> str:
        """Standard error in one line."""
        return " ".join(self.stderr.decode(errors="replace").split())


class Exec(Protocol):
    """Runs programs."""

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        """Run a program to its end.

        Args:
            argv: the program, looked up in PATH, and its arguments.
            stdin: its standard input.
            timeout: seconds after which it is killed.

        Raises:
            FileNotFoundError: there is no such program.
            PermissionError: it cannot be executed; `strerror` is a sentence.
            TimeoutError: it did not end in time.
            OSError: it cannot be started now (no descriptors, no processes); `strerror` is a
                sentence.
        """
        ...

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        """Do the same in the calling thread, which is blocked so long; for a KernelWorker."""
        ...


class RunTool(Protocol):
    """Runs a program to its end, and blocks the thread so long."""

    def __call__(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        """Run a program; arguments and errors are those of `Exec.run`."""
        ...


class Caller(threading.local):
    """What a thread knows of the caller of its tools."""

    is_cancelled: Callable[[], bool] = staticmethod(lambda: False)
    """Whether it needs no result any more."""


caller = Caller()


class SubprocessExec:
    """Runs programs as child processes."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        max_output: float = math.inf,
    ) -> None:
        """Set what all commands have in common.

        Args:
            environment: variables to add to our own.
            max_output: bytes of its output, or of its messages, above which a program is killed
                (OSError); all tools are trusted.
        """
        self._max_output = max_output
        self._look = _LOOK if max_output == math.inf else _LOOK_AT_SIZE
        path = os.environ.get("PATH", "")
        self._environment = {
            **os.environ,
            "LC_ALL": "C",  # messages are parsed
            "PATH": os.pathsep.join(filter(None, (path, _PATH))),  # daemons often lack sbin
            **(environment or {}),
        }

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        """Run a program to its end, see `Exec.run`; cancelling ends it."""
        cancelled = threading.Event()

        def call() -> Result:
            caller.is_cancelled = cancelled.is_set
            return self.run_tool(argv, stdin, timeout=timeout)

        running = asyncio.ensure_future(in_thread(call))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.gather(running, return_exceptions=True)
            raise

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        """Run a program to its end, see `Exec.run_tool`; a cancelled caller ends it."""
        if caller.is_cancelled():
            raise InterruptedError(errno.EINTR, f"{argv[0]} is not run: its caller is cancelled")
        with _errors_named(argv[0]):
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                **_OWN_GROUP,
            )
        if stdin:
            # `communicate` writes nothing more after a timeout (Python 3.11): a thread does.
            pipe, process.stdin = process.stdin, None
            threading.Thread(target=_feed, args=(pipe, stdin), daemon=True).start()
        deadline, cancelled = time.monotonic() + timeout, False
        while True:
            if not cancelled and caller.is_cancelled():
                cancelled = True
                deadline = min(deadline, time.monotonic() + (_GRACE if stdin else 0.0))
            left = max(deadline - time.monotonic(), 0.0)
            try:
                stdout, stderr = process.communicate(timeout=min(left, self._look))
                self._check_size(stdout, stderr)
                break
            except subprocess.TimeoutExpired as said:
                if left <= self._look:
                    _end(argv[0], process)
                    if cancelled:
                        text = f"{argv[0]} was ended with its caller"
                        raise InterruptedError(errno.EINTR, text) from None
                    raise TimeoutError(f"{argv[0]} did not end within {timeout:g} s") from None
                try:
                    self._check_size(said.stdout or b"", said.stderr or b"")
                except OSError:
                    _end(argv[0], process)
                    raise
        return Result(process.returncode, stdout, stderr, process.pid)

    def _check_size(self, *said: bytes) -> None:
        """Raise OSError if a program has written too much."""
        if max(map(len, said)) > self._max_output:
            raise OSError(errno.EFBIG, f"it wrote more than {self._max_output} bytes")


@contextlib.contextmanager
def _errors_named(program: str) -> Iterator[None]:
    """Say of a program that cannot be started which one it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except PermissionError as error:
        text = f"{program} cannot be executed: {error.strerror}"
        raise PermissionError(error.errno, text) from error
    except OSError as error:
        text = f"{program} cannot be started: {error.strerror}"
        raise OSError(error.errno, text) from error


def _feed(pipe: IO[bytes], data: bytes) -> None:
    """Write all input of a tool; one that ends or is killed may not have read it."""
    with contextlib.suppress(OSError), pipe:
        pipe.write(data)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program with its process group."""
    with contextlib.suppress(ProcessLookupError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def _end(program: str, process: subprocess.Popen[bytes]) -> None:
    """Kill a tool, and wait for its end for no longer than the kernel needs."""
    _kill(process)
    try:
        process.communicate(timeout=_REAPED)
    except subprocess.TimeoutExpired:
        log.warning("%s (pid %d) was killed but has not ended", program, process.pid)
        threading.Thread(target=process.communicate, daemon=True, name="reaper").start()


class Successor:
    """A child process that does one thing when this process ends, in whatever way.

    Its standard input is a pipe that only we hold: it ends with us, also after kill -9.
    """

    def __init__(self, code: str, arguments: Sequence[str]) -> None:
        """Start the child, in the network namespace of this thread.

        Args:
            code: Python that first reads standard input to its end; of the standard library only.
            arguments: its sys.argv[1:].

        Raises:
            OSError: it cannot be started.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us, not for it
        )

    def finish(self, timeout: float = 10.0) -> None:
        """Let the child do its work now, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


# Signals that others send, such as the OOM killer; a crash may be due to the input instead.
_KILLED = {9: "SIGKILL", 15: "SIGTERM"}


def tool_result(
    run_tool: RunTool,
    argv: Sequence[str],
    stdin: bytes = b"",
    *,
    package: str,
    timeout: float = 60.0,
) -> Result:
    """Run a program to its end in the calling thread.

    Args:
        run_tool: runs it.
        argv: the program and its arguments.
        stdin: its standard input.
        package: the package that contains it, for the error message.
        timeout: seconds after which it is killed.

    Raises:
        BusyError: it did not run to its end. It may have done part of its work; a retry may help.
    """
    try:
        result = run_tool(argv, stdin, timeout=timeout)
    except OSError as error:  # TimeoutError, too
        raise BusyError(failure_reason(argv[0], package, error)) from error
    if -result.returncode in _KILLED:
        raise BusyError(f"{argv[0]} was killed by {_KILLED[-result.returncode]}")
    return result


def failure_reason(program: str, package: str, error: OSError) -> str:
    """Return why a program did not run to its end, and the remedy if it is known."""
    if isinstance(error, FileNotFoundError):
        return f"{program} is not installed; install the package {package}"
    return error.strerror or str(error)
