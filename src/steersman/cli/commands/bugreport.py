"""`steersman bugreport`: one archive with everything that a report of a bug needs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from steersman.cli.command import Argument, Command, Example, option
from steersman.operate.answer import Answer, QuestionError

if TYPE_CHECKING:
    from steersman.config import Parsed


async def _answer(parsed: Parsed) -> Answer:
    from steersman.operate.bugreport import STDOUT, write_report  # noqa: PLC0415

    file = parsed.arguments[0] if parsed.arguments else ""
    text = str(parsed.values.get("output", "text")) == "text"
    if file == STDOUT and (sys.stdout.isatty() or not text):
        raise QuestionError("the archive would go to standard output: redirect it, without -o")
    report = await write_report(
        file,
        journal=bool(parsed.values.get("journal")),
        out=sys.stdout.buffer,
    )
    if file != STDOUT:
        return report
    for each in report.parts:
        if each.problem:
            print(f"{each.name}: {each.problem}", file=sys.stderr)
    return Answer()  # standard output has the archive, where nothing else belongs


COMMAND = Command(
    name="bugreport",
    summary="write one archive with what a report of a bug needs, without secrets",
    description="""\
Write a .tar.gz with what somebody who was not there needs to know: versions, status, Findings,
drift, the last syncs, the configuration, all rules of nft and iptables, kernel objects of the
mode that are no rules, ipset, addresses, routes, and facts of the node. --journal adds the last
5,000 lines of the unit `steersman`.

Tokens, keys, certificates, passwords and the values of most environment variables are removed.
Services, addresses and rules of this node are in it: look at it before you publish it.

Each part has 20 seconds and 32 MB. index.json lists all parts, and why one is missing.""",
    arguments=(
        Argument("FILE", "Where to write it; - for standard output (default: a new name here)."),
    ),
    flags=(option("journal", "Add the journal of the unit `steersman`.", kind="bool"),),
    examples=(
        Example("steersman bugreport", "write steersman-NODE-TIME.tar.gz"),
        Example("steersman bugreport -o wide /tmp/report.tar.gz", "and list its parts"),
        Example("steersman bugreport - | ssh laptop tee node-a.tar.gz", "without a file here"),
    ),
    exit_codes=(
        (0, "The archive was written; the index names parts that are missing."),
        (2, "It could not be written."),
    ),
    answer=_answer,
    takes=frozenset(),
)
