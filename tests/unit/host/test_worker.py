"""The thread that touches the kernel: order, cancellation in every state, errors, its end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import suppress

import pytest

from steersman.host.worker import Changes, KernelWorker, apart
from tests.support.waiting import until


@pytest.fixture
async def worker() -> AsyncIterator[KernelWorker]:
    made = KernelWorker()
    yield made
    await made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for end in ends:
        os.close(end)


class Blocking:
    """A call that lasts until it is released."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.release = threading.Event()
        self.ended = False

    def __call__(self) -> str:
        return self.block()

    def block(self) -> str:
        self.begun.set()
        assert self.release.wait(60)
        self.ended = True
        return "done"

    async def has_begun(self) -> None:
        await until(self.begun.is_set)


async def few_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_run_in_one_thread_in_their_order(worker: KernelWorker) -> None:
    order: list[int] = []

    def call(number: int) -> int:
        order.append(number)
        return threading.get_ident()

    threads = await asyncio.gather(*(worker.do(call, number) for number in range(20)))
    assert order == list(range(20))
    assert set(threads) != {threading.get_ident()}
    assert len(set(threads)) == 1


async def test_arguments_results_and_errors_are_those_of_the_call(worker: KernelWorker) -> None:
    assert await worker.do(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await worker.do(divmod, 7, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await worker.do(next, iter(()))
    assert await worker.do(int, "7") == 7, "the thread goes on"


async def test_the_loop_runs_while_a_call_blocks(worker: KernelWorker) -> None:
    call = Blocking()
    task = asyncio.create_task(worker.do(call))
    await call.has_begun()
    await few_turns()
    assert not task.done()
    call.release.set()
    assert await task == "done"


async def test_a_cancelled_caller_waits_for_a_call_that_has_begun(worker: KernelWorker) -> None:
    call = Blocking()
    task = asyncio.create_task(worker.do(call))
    await call.has_begun()
    for _ in range(3):  # each further cancellation must not end the wait
        task.cancel()
        await few_turns()
        assert not task.done(), "the call still uses what its owner would close"
    call.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.ended


async def test_an_error_after_the_cancellation_is_the_end_too(worker: KernelWorker) -> None:
    call = Blocking()

    def fails() -> None:
        call()
        raise OSError("late")

    task = asyncio.create_task(worker.do(fails))
    await call.has_begun()
    task.cancel()
    call.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_call_that_has_not_begun_is_dropped(worker: KernelWorker) -> None:
    first, second = Blocking(), Blocking()
    running = asyncio.create_task(worker.do(first))
    await first.has_begun()
    waiting = asyncio.create_task(worker.do(second))
    await few_turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting  # at once: the first call still runs
    assert not first.ended
    first.release.set()
    await running
    await worker.do(int)
    assert not second.begun.is_set()


async def test_a_timeout_is_told_from_a_cancellation(worker: KernelWorker) -> None:
    call = Blocking()
    threading.Timer(0.05, call.release.set).start()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await worker.do(call)
    assert call.ended == call.begun.is_set(), "it may be dropped on a busy machine"


async def test_steps_give_way_to_calls(worker: KernelWorker) -> None:
    seen: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def steps() -> Generator[None, None, str]:
        for number in range(3):
            seen.append(f"step {number}")
            if number == 0:
                begun.set()
                assert go_on.wait(60)
            yield
        return "counted"

    scrape = asyncio.create_task(worker.do_slowly(steps()))
    await until(begun.is_set)
    calls = [asyncio.create_task(worker.do(seen.append, f"call {n}")) for n in range(2)]
    await few_turns()
    go_on.set()
    assert await scrape == "counted"
    await asyncio.gather(*calls)
    assert seen == ["step 0", "call 0", "call 1", "step 1", "step 2"]


async def test_long_passes_take_turns(worker: KernelWorker) -> None:
    seen: list[str] = []
    gate = Blocking()

    def steps(name: str) -> Generator[None, None, None]:
        for _ in range(2):
            seen.append(name)
            yield

    held = asyncio.create_task(worker.do(gate))
    await gate.has_begun()
    passes = [asyncio.create_task(worker.do_slowly(steps(name))) for name in "ab"]
    await few_turns()
    gate.release.set()
    await asyncio.gather(held, *passes)
    assert seen == ["a", "b", "a", "b"]


async def test_errors_of_steps_reach_the_caller(worker: KernelWorker) -> None:
    def steps() -> Generator[None, None, None]:
        yield
        raise OSError("no counters")

    with pytest.raises(OSError, match="no counters"):
        await worker.do_slowly(steps())


async def test_cancelled_steps_are_closed_in_the_thread(worker: KernelWorker) -> None:
    closed_by: list[int] = []
    begun = threading.Event()

    def steps() -> Generator[None, None, None]:
        try:
            while True:
                begun.set()
                yield
        finally:
            closed_by.append(threading.get_ident())

    task = asyncio.create_task(worker.do_slowly(steps()))
    await until(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed_by == [await worker.do(threading.get_ident)]


async def test_notifications_are_judged_in_the_thread(
    worker: KernelWorker, pipe: tuple[int, int]
) -> None:
    seen: list[tuple[bytes, int]] = []

    def judge() -> bool:
        try:
            news = os.read(pipe[0], 1)
        except BlockingIOError:
            return False
        seen.append((news, threading.get_ident()))
        return news == b"!"

    task = asyncio.create_task(worker.wait_for(Changes(pipe[0], judge)))
    await worker.do(int)
    os.write(pipe[1], b"..!.")
    await asyncio.wait_for(task, 60)
    thread = await worker.do(threading.get_ident)
    assert seen == [(b".", thread), (b".", thread), (b"!", thread)]
    again = asyncio.create_task(worker.wait_for(Changes(pipe[0], judge)))
    await until(lambda: len(seen) >= 4)  # a thread reads what was left
    assert not again.done()
    os.write(pipe[1], b"!")
    await asyncio.wait_for(again, 60)


async def test_errors_of_a_judge_end_the_wait(worker: KernelWorker, pipe: tuple[int, int]) -> None:
    def judge() -> bool:
        raise OSError("lost")

    os.write(pipe[1], b"!")
    with pytest.raises(OSError, match="lost"):
        await worker.wait_for(Changes(pipe[0], judge))


async def test_a_cancelled_wait_leaves_the_descriptor_alone(
    worker: KernelWorker, pipe: tuple[int, int]
) -> None:
    judged = 0

    def judge() -> bool:
        nonlocal judged
        judged += 1
        return False

    task = asyncio.create_task(worker.wait_for(Changes(pipe[0], judge)))
    await few_turns()
    await worker.do(int)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    os.write(pipe[1], b"!")
    await worker.do(int)
    await worker.do(int)
    assert judged == 1, "only at the beginning"
    # The same number may be watched again.
    await asyncio.wait_for(worker.wait_for(Changes(pipe[0], lambda: True)), 60)


async def test_notifications_wait_for_a_call_and_calls_for_none(
    worker: KernelWorker, pipe: tuple[int, int]
) -> None:
    """A flood of notifications that concern nobody does not hold up calls."""
    os.write(pipe[1], b"!")  # stays readable: the judge does not read it
    task = asyncio.create_task(worker.wait_for(Changes(pipe[0], lambda: False)))
    for number in range(50):
        assert await worker.do(int, number) == number
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_may_use_the_event_loop(worker: KernelWorker) -> None:
    here = threading.get_ident()

    async def listen() -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    assert await worker.do(lambda: worker.on_loop(listen())) == here


async def test_close_ends_the_thread_and_what_waits(pipe: tuple[int, int]) -> None:
    worker = KernelWorker()
    await worker.close()  # nothing was ever done
    call = Blocking()
    running = asyncio.create_task(worker.do(call))
    watching = asyncio.create_task(worker.wait_for(Changes(pipe[0], lambda: False)))
    await call.has_begun()
    before = threading.active_count()
    closing = asyncio.create_task(worker.close())
    await few_turns()
    assert not closing.done()
    call.release.set()
    await closing
    assert await running == "done"
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert threading.active_count() == before - 1
    assert await worker.do(int, "7") == 7
    await worker.close()


async def test_calls_go_on_while_a_step_waits_apart(worker: KernelWorker) -> None:
    call = Blocking()
    waiting = asyncio.create_task(worker.do_slowly(apart(call.block)))
    await call.has_begun()
    assert await worker.do(int, "7") == 7
    assert not waiting.done()
    call.release.set()
    assert await waiting == "done"
    with pytest.raises(ValueError, match="invalid literal"):
        await worker.do_slowly(apart(int, "seven"))


async def test_what_waits_apart_has_ended_once_its_caller_has(worker: KernelWorker) -> None:
    call = Blocking()
    waiting = asyncio.create_task(worker.do_slowly(apart(call.block)))
    await call.has_begun()
    waiting.cancel()
    await few_turns()
    assert not waiting.done()
    call.release.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert call.ended


async def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    worker = KernelWorker()
    with pytest.raises(OSError, match="no thread can be started: can't start new thread"):
        await worker.do(int)
    with pytest.raises(OSError, match="no thread can be started: can't start new thread"):
        next(apart(int))
    await worker.close()


@pytest.mark.parametrize("seed", range(20))
async def test_any_interleaving_ends_every_job_once(worker: KernelWorker, seed: int) -> None:
    """Cancel at any moment: a call is dropped whole or done whole, and never two at a time."""
    import random  # noqa: PLC0415

    dice = random.Random(seed)
    inside, begun, ended = 0, set[int](), set[int]()

    def call(number: int) -> None:
        nonlocal inside
        assert inside == 0
        inside += 1
        begun.add(number)
        threading.Event().wait(dice.uniform(0, 0.0005))
        ended.add(number)
        inside -= 1

    def steps(number: int) -> Generator[None, None, None]:
        try:
            begun.add(number)
            for _ in range(dice.randrange(4)):
                assert inside == 0
                yield
        finally:
            ended.add(number)

    tasks = []
    for number in range(60):
        job = worker.do(call, number) if dice.random() < 0.7 else worker.do_slowly(steps(number))
        tasks.append(asyncio.create_task(job))
        if dice.random() < 0.5:
            dice.choice(tasks).cancel()
        if dice.random() < 0.3:
            await asyncio.sleep(dice.uniform(0, 0.001))
    for number, task in enumerate(tasks):
        with suppress(asyncio.CancelledError):
            await task
            assert number in ended
        assert (number in begun) == (number in ended), "it goes on after its task has ended"
    await worker.do(int)
    assert begun == ended
