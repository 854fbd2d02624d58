"""The live view of `steersman top`: asks the process, takes keys, draws."""

from __future__ import annotations

import asyncio
import sys
import time

from steersman.cli.screen import Screen, full_screen
from steersman.host.exec import SubprocessExec
from steersman.operate.answer import QuestionError
from steersman.operate.top import ask
from steersman.operate.top_model import TopModel, keys_of


async def show_top(model: TopModel, seconds: float) -> None:
    """Show the view until it is closed.

    Args:
        model: what to show first.
        seconds: between two refreshes.

    Raises:
        NotRunningError, QuestionError: no process answers at the start.
    """
    ask_now = asyncio.Event()

    async def follow(screen: Screen) -> None:
        while True:
            question = model.question
            try:
                sample = await ask(question)
                if question == model.question:
                    model.show(sample)
            except (QuestionError, OSError) as error:  # it may be restarting
                model.message = str(error)
            screen.wake()
            ask_now.clear()
            if question == model.question:
                try:
                    async with asyncio.timeout(seconds):
                        await ask_now.wait()
                except TimeoutError:
                    pass

    model.show(await ask(model.question))  # without a process there is nothing to show
    with full_screen() as screen:
        tasks = {asyncio.create_task(follow(screen))}
        try:
            screen.draw(model.frame(*screen.size, time.time()))
            async for data in screen.keys():
                for key in keys_of(data):
                    command = model.key(key)
                    if command is None:
                        continue
                    if command.kind == "quit":
                        return
                    if command.kind == "ask":
                        ask_now.set()
                        continue
                    task = asyncio.create_task(run_doctor(model, screen, command.service))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                screen.draw(model.frame(*screen.size, time.time()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def run_doctor(model: TopModel, screen: Screen, service: str) -> None:
    """Run doctor on a Service, and show what it says."""
    model.message = f"doctor looks at {service}..."
    screen.wake()
    # As a process of its own: it may take seconds of CPU, and the view must stay responsive.
    words = [sys.executable, "-m", "steersman", "doctor", service]
    try:
        done = await SubprocessExec().run(words)
        text = (done.stdout + done.stderr).decode(errors="replace")
    except OSError as error:  # TimeoutError is one
        text = str(error.strerror or error)
    model.message = ""
    model.show_text(f"doctor {service}", text.splitlines())
    screen.wake()
