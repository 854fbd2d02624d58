"""Plans a change in a process of its own, so that a large World blocks no page.

The process gets the World as bytes and the question on its standard input, reads nothing else, and
writes its answer as JSON. It is bounded in time and memory, and killed when the page is left.

    stdin    length of the question (4 bytes, big-endian), the question (msgpack), the World
    stdout   {"answer": PlanAnswer} or {"error": SENTENCE}
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys

import msgspec

from steersman.host.exec import Exec, SubprocessExec
from steersman.model.world import Origin
from steersman.operate.answer import QuestionError
from steersman.operate.client import understood
from steersman.operate.plan_answer import PlanAnswer
from steersman.operate.plan_text import PlanQuestion, plan_text
from steersman.operate.world_reader import decode_world

SECONDS = 60.0
"""The longest that a plan may take."""
_MEMORY = 4 << 30
"""Bytes of address space; plans of 10,000 Services take less than a quarter."""
_LENGTH = struct.Struct(">I")


class _Outcome(msgspec.Struct, omit_defaults=True):
    answer: PlanAnswer | None = None
    error: str = ""


async def plan_in_process(
    world: bytes, question: PlanQuestion, execute: Exec | None = None, seconds: float = SECONDS
) -> PlanAnswer:
    """Return what a change would do; see `plan_text`.

    Args:
        world: the answer of a node to `/world`.
        question: the change.
        execute: runs programs.
        seconds: the longest that it may take.

    Raises:
        QuestionError: it cannot be planned; the message says why.
    """
    asked = msgspec.msgpack.encode(question)
    stdin = _LENGTH.pack(len(asked)) + asked + world
    # -P: nothing is imported from the directory that this server was started in.
    argv = [sys.executable, "-P", "-m", "steersman.ui.plan_process"]
    try:
        result = await (execute or SubprocessExec()).run(argv, stdin, timeout=seconds)
    except TimeoutError as error:
        raise QuestionError(f"the plan was not ready within {seconds:g} s: ask for less") from error
    except OSError as error:
        raise QuestionError(f"the plan cannot be computed now: {error}") from error
    if result.returncode:
        why = result.message[-300:] or f"status {result.returncode}"
        raise QuestionError(f"the plan could not be computed: {why}")
    outcome = msgspec.json.decode(result.stdout, type=_Outcome)
    if outcome.answer is None:
        raise QuestionError(outcome.error)
    return outcome.answer


def answer_of(data: bytes) -> bytes:
    """Return the answer to the bytes of a question and a World."""
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    question = msgspec.msgpack.decode(data[_LENGTH.size : start], type=PlanQuestion)
    try:
        with understood("the node"):
            world = decode_world(data[start:], Origin("process", ""))
        origin = Origin("process", f"the process on {world.config.node_name}")
        world = msgspec.structs.replace(world, origin=origin)
        outcome = _Outcome(answer=asyncio.run(plan_text(world, question)))
    except QuestionError as error:
        outcome = _Outcome(error=str(error))
    return msgspec.json.encode(outcome)


def main() -> None:
    """Answer one question."""
    import resource  # noqa: PLC0415 - not on Windows, where pages are not served

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.nice(5)
    sys.stdout.buffer.write(answer_of(sys.stdin.buffer.read()))


if __name__ == "__main__":
    main()
