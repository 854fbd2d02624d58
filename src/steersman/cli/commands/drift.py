"""`steersman drift`: what other programs changed in our rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import Command, Example, option

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    from steersman.operate.drift import find_drift  # noqa: PLC0415

    return await find_drift(lines=int(str(parsed.values.get("lines", 10))))


COMMAND = Command(
    name="drift",
    summary="compare the kernel with what the running process wrote",
    description=(
        "Let the running process compare the kernel with what it wrote, and show what other\n"
        "programs changed, which programs these were, and when it was repaired. The kernel names\n"
        "the program that changed rules of nf_tables (nft, iptables-nft); others stay unknown.\n"
        "The process itself compares once every sync period, or at once if its mode notices a\n"
        "change, and repairs what differs."
    ),
    flags=(
        option("lines", "Kernel objects to show of what differs now.", kind="uint32", default="10"),
    ),
    examples=(
        Example("steersman drift", "what differs now, and who changed what so far"),
        Example("steersman drift -o wide", "with the first objects of each repair"),
        Example("steersman drift --watch", "see another program at work"),
    ),
    exit_codes=(
        (0, "The kernel is as the process wrote it."),
        (1, "Something differs, or another program changes it again and again."),
        (2, "The question could not be answered."),
    ),
    answer=_answer,
    takes=frozenset(),
    watch=True,
)
