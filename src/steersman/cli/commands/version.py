"""`steersman version`: print the version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import Command, Example

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(_: Parsed) -> Answer:
    from steersman.operate.version import installed  # noqa: PLC0415

    return installed()


COMMAND = Command(
    name="version",
    summary="print the version",
    description="Print the version of steersman; with -o wide or json, also of Python, the kernel "
    "and libraries.",
    group="Tools",
    examples=(
        Example("steersman version", "one line"),
        Example("steersman version -o json", "everything that a report of a bug needs"),
    ),
    exit_codes=((0, "Always."), (2, "The command line is wrong.")),
    answer=_answer,
    takes=frozenset(),
)
