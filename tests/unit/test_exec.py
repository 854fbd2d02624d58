from __future__ import annotations

import asyncio

import pytest

from steersman.host.exec import SubprocessExec


async def test_what_a_program_reads_and_says() -> None:
    result = await SubprocessExec().run(["sh", "-c", "cat; echo oh  no >&2; exit 3"], b"input")
    assert result.returncode == 3
    assert result.stdout == b"input"
    assert result.message == "oh no"


async def test_without_input_a_program_does_not_wait() -> None:
    assert (await SubprocessExec().run(["cat"])).stdout == b""


async def test_a_missing_program() -> None:
    with pytest.raises(FileNotFoundError):
        await SubprocessExec().run(["no-such-program-anywhere"])


async def test_a_program_that_does_not_end_is_killed() -> None:
    with pytest.raises(TimeoutError, match=r"sleep did not end within 0\.05 s"):
        await SubprocessExec().run(["sleep", "60"], timeout=0.05)


async def test_cancelling_kills_the_program() -> None:
    task = asyncio.create_task(SubprocessExec().run(["sleep", "60"]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_prefix_goes_before_every_command() -> None:
    result = await SubprocessExec(["echo", "in"]).run(["there"])
    assert result.stdout == b"in there\n"


async def test_messages_are_in_english_and_sbin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    result = await SubprocessExec().run(["sh", "-c", "echo $LC_ALL $PATH"])
    words = result.stdout.decode().split()
    assert words[0] == "C"
    assert "/usr/sbin" in words[1].split(":")
