from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from steersman.host import exec as exec_module
from steersman.host.exec import Result, SubprocessExec, tool_result
from steersman.host.worker import KernelWorker
from steersman.model.errors import BusyError
from tests.support.processes.steersman import NOBODY
from tests.support.waiting import until

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load it takes more than half a second to see that a killed program has ended."""
    monkeypatch.setattr(exec_module, "_REAPED", 60.0)


Run: TypeAlias = Callable[..., Awaitable[Result]]


@pytest.fixture(params=["run", "run_tool"])
def run(request: pytest.FixtureRequest) -> Run:
    """How a program is run: on the event loop, or in a thread that waits for it."""

    async def run(argv: Sequence[str], stdin: bytes = b"", **more: Any) -> Result:
        execute = SubprocessExec()
        if request.param == "run":
            return await execute.run(argv, stdin, **more)
        return execute.run_tool(argv, stdin, **more)

    return run


async def test_much_input_reaches_a_program_that_is_slow_to_read(run: Run) -> None:
    """A script is longer than a pipe holds, and a tool may wait for a lock before it reads."""
    result = await run(["sh", "-c", "sleep 0.3; wc -c"], b"x" * 1_000_000)
    assert result.stdout.strip() == b"1000000"


async def test_what_a_program_reads_and_says(run: Run) -> None:
    result = await run(["sh", "-c", "cat; echo oh  no >&2; exit 3"], b"input")
    assert result.returncode == 3
    assert result.stdout == b"input"
    assert result.message == "oh no"


async def test_without_input_a_program_does_not_wait(run: Run) -> None:
    assert (await run(["cat"])).stdout == b""


async def test_a_missing_program(run: Run) -> None:
    with pytest.raises(FileNotFoundError):
        await run(["no-such-program-anywhere"])


async def test_a_program_that_does_not_end_is_killed(run: Run) -> None:
    with pytest.raises(TimeoutError, match=r"sleep did not end within 0\.05 s"):
        await run(["sleep", "60"], timeout=0.05)


async def test_cancelling_kills_the_program() -> None:
    task = asyncio.create_task(SubprocessExec().run(["sleep", "60"]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_messages_are_in_english_and_sbin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    result = await SubprocessExec().run(["sh", "-c", "echo $LC_ALL $PATH"])
    words = result.stdout.decode().split()
    assert words[0] == "C"
    assert "/usr/sbin" in words[1].split(":")


async def test_what_a_program_has_started_ends_with_it(run: Run, tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/pid; wait"
    pid = await timed_out(run, script, tmp_path / "pid")
    await until(lambda: state(pid) in ("Z", ""))


async def timed_out(run: Run, script: str, file: Path) -> int:
    """Run a script until its time is over; return the process id that it has written."""
    for seconds in (0.5, 5.0, 50.0):  # under load a shell may take long to begin
        with pytest.raises(TimeoutError):
            await run(["sh", "-c", script], timeout=seconds)
        if pid := written(file):
            return int(pid)
    raise AssertionError("it has not begun")


def written(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def state(pid: int) -> str:
    """R, S, D, Z and so on; "" for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # reaped before, or after it was opened
        return ""


async def started(path: Path) -> None:
    await until(path.exists)


async def test_a_writer_finishes_what_it_was_given_before_its_caller_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_module, "_GRACE", 20.0)
    first = f"dd bs=1 count=1 of={tmp_path}/first 2> {tmp_path}/said && touch {tmp_path}/on"
    gate = f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"
    script = f"{first}; {gate}; cat > {tmp_path}/read; mv {tmp_path}/read {tmp_path}/whole"
    task = asyncio.create_task(SubprocessExec().run(["sh", "-c", script], b"x" * 1_000_000))
    await started(tmp_path / "on")
    task.cancel()
    (tmp_path / "go").touch()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "whole").stat().st_size == 999_999


async def test_a_writer_that_does_not_finish_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_module, "_GRACE", 0.01)
    first = f"cat > {tmp_path}/read; echo $$ > {tmp_path}/new"
    script = f"{first}; mv {tmp_path}/new {tmp_path}/pid; exec sleep 60"
    task = asyncio.create_task(SubprocessExec().run(["sh", "-c", script], b"x"))
    await started(tmp_path / "pid")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert state(int((tmp_path / "pid").read_text())) in ("Z", "")


@pytest.mark.parametrize("stdin", [b"", b"x"], ids=["reader", "writer"])
async def test_a_tool_that_hangs_is_killed_if_its_caller_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdin: bytes
) -> None:
    monkeypatch.setattr(exec_module, "_GRACE", 0.01)
    worker, said = KernelWorker(), list[str]()

    def call() -> None:
        script = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 600"
        for argv in (["sh", "-c", script], ["touch", f"{tmp_path}/more"]):
            try:
                SubprocessExec().run_tool(argv, stdin, timeout=600.0)
            except InterruptedError as error:
                said.append(str(error.strerror))

    task = asyncio.create_task(worker.do(call))
    await started(tmp_path / "pid")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said == ["sh was ended with its caller", "touch is not run: its caller is cancelled"]
    assert state(int((tmp_path / "pid").read_text())) == ""
    assert not (tmp_path / "more").exists()
    assert await worker.do(SubprocessExec().run_tool, ["true"])  # for the next caller
    await worker.close()


async def test_a_tool_that_writes_may_finish_if_its_caller_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_module, "_GRACE", 60.0)
    worker = KernelWorker()
    gate = f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"
    script = f"touch {tmp_path}/on; {gate}; cat > {tmp_path}/read"
    run = SubprocessExec().run_tool
    task = asyncio.create_task(worker.do(run, ["sh", "-c", script], b"x" * 1_000_000))
    await started(tmp_path / "on")
    task.cancel()
    await asyncio.wait((task,), timeout=0)
    (tmp_path / "go").touch()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "read").stat().st_size == 1_000_000
    await worker.close()


async def test_a_program_that_cannot_be_executed_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    with pytest.raises(PermissionError) as refused:
        await run([str(tmp_path / "tool")])
    assert refused.value.strerror == f"{tmp_path}/tool cannot be executed: Permission denied"


async def test_without_descriptors_a_program_is_not_started_and_later_it_is(run: Run) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="cat cannot be started: Too many open files"):
            await run(["cat"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (await run(["cat"])).returncode == 0


TRY = """
import asyncio
from steersman.host.exec import SubprocessExec
try:
    asyncio.run(SubprocessExec().run(["cat"]))
except OSError as error:
    print(error)
"""


@pytest.mark.kernel  # the limit does not count for root, and only root becomes somebody else
def test_without_processes_a_program_is_not_started() -> None:
    argv = [*NOBODY, "prlimit", "--nproc=1:1", sys.executable, "-c", TRY]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "no thread can be started: can't start new thread\n"


@pytest.mark.kernel
@pytest.mark.skipif(not FREEZER.is_dir(), reason="there is no freezer of cgroup v1 here")
async def test_a_program_that_the_kernel_does_not_let_go_is_left_behind(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A frozen process (cgroup v1) does not end, as one that waits for a dead disk."""
    monkeypatch.setattr(exec_module, "_REAPED", 0.01)
    cgroup = FREEZER / f"sm-exec-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "freezer.state").write_text("FROZEN")
        script = f"echo $$ > {tmp_path}/pid; echo $$ > {cgroup}/cgroup.procs; exec sleep 60"
        pid = await timed_out(run, script, tmp_path / "pid")
        assert f"sh (pid {pid}) was killed but has not ended" in caplog.text
        assert state(pid) not in ("Z", "")
        (cgroup / "freezer.state").write_text("THAWED")
        await until(lambda: not state(pid))  # it is reaped, too
    finally:
        (cgroup / "freezer.state").write_text("THAWED")
        cgroup.rmdir()


class Ends:
    """Runs programs that end in one way."""

    def __init__(self, how: Result | OSError) -> None:
        self._how = how

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        del argv, stdin, timeout
        if isinstance(self._how, OSError):
            raise self._how
        return self._how

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        del argv, stdin, timeout
        if isinstance(self._how, OSError):
            raise self._how
        return self._how


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            FileNotFoundError(2, "No such file"),
            "nft is not installed; install the package nftables",
        ),
        (PermissionError(13, "nft cannot be executed: no"), "nft cannot be executed: no"),
        (OSError(errno.EMFILE, "nft cannot be started: x"), "nft cannot be started: x"),
        (TimeoutError("nft did not end within 5 s"), "nft did not end within 5 s"),
        (Result(-9, b"", b""), "nft was killed by SIGKILL"),
        (Result(-15, b"", b""), "nft was killed by SIGTERM"),
    ],
)
def test_a_program_that_does_not_run_to_its_end(how: Result | OSError, said: str) -> None:
    with pytest.raises(BusyError) as busy:
        tool_result(Ends(how).run_tool, ["nft", "-f", "-"], package="nftables")
    assert str(busy.value) == said


@pytest.mark.parametrize("status", [0, 1, -11])
def test_how_a_program_ends_by_itself_is_not_judged(status: int) -> None:
    result = Result(status, b"out", b"err")
    assert tool_result(Ends(result).run_tool, ["nft"], package="nftables") == result
