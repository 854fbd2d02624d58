from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from steersman.host.process import to_thread_to_end


async def test_a_cancelled_call_waits_for_its_thread() -> None:
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    done: list[bool] = []

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(60)
        done.append(True)

    task = asyncio.create_task(to_thread_to_end(work))
    await begun.wait()
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done(), "the thread still uses what its owner would close"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]


async def test_results_and_errors_are_those_of_the_call() -> None:
    assert await to_thread_to_end(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await to_thread_to_end(divmod, 7, 0)


IN_CHILD = """
import os, signal, sys, threading
from steersman.host.process import in_child
here = os.getpid()
{before}
def work():
    import wave
    if os.getpid() != here:
        {there}
    return b"here" if os.getpid() == here else b"in a child" * 10000
result = in_child("wave", work)
print(result[:10].decode(), len(result), "wave" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do the work in the process")
@pytest.mark.parametrize(
    ("before", "there", "said"),
    [
        ("", "pass", "in a child 100000 False"),
        ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "pass", "here 4 True"),
        ("import wave", "pass", "here 4 True"),
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "pass",
         "here 4 True"),
        ("def refuse(): raise BlockingIOError\nos.fork = refuse", "pass", "here 4 True"),
        ("", "os.kill(os.getpid(), 9)", "here 4 True"),
        ("", "raise ValueError", "here 4 True"),
        ("", "sys.exit()", "here 4 True"),
    ],
)  # fmt: skip
def test_work_in_a_child_or_else_here(before: str, there: str, said: str) -> None:
    code = IN_CHILD.format(before=before, there=there)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (said, "")
