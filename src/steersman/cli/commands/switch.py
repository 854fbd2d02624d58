"""`steersman switch`: change the mode of the running process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from steersman.cli.command import Command, Example, option
from steersman.modes.specs import DEFAULT_MODE
from steersman.operate.answer import Answer, Block, QuestionError

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.model.switch import SwitchStep

_MODE = DEFAULT_MODE  # for examples


async def _answer(parsed: Parsed) -> Answer:
    """Switch; as text, each step is shown as soon as it is done."""
    from steersman.cli.output import plain_lines, print_blocks, terminal  # noqa: PLC0415
    from steersman.model.switch import SwitchRequest  # noqa: PLC0415
    from steersman.operate.switch import Switched, step_line, switch  # noqa: PLC0415

    class Told(Switched, frozen=True, kw_only=True):
        """A switch whose steps have been shown."""

        def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002
            yield from self.end()

    values = parsed.values
    to = str(values.get("to", ""))
    if not to:
        raise QuestionError("give the mode: steersman switch --to MODE")

    def seconds(name: str, otherwise: float) -> float:
        return float(getattr(values.get(name), "seconds", otherwise))

    request = SwitchRequest(
        to,
        dry_run=bool(values.get("dry-run")),
        force=bool(values.get("force")),
        watch_seconds=seconds("watch-for", 5.0),
        drain_seconds=seconds("drain", 3600.0),
    )
    if str(values.get("output", "text")) not in ("text", "wide"):
        return await switch(request)

    def show(step: SwitchStep) -> None:
        if sys.stdout.isatty():
            print_blocks([step_line(step)], terminal(sys.stdout))
        else:
            print(*plain_lines([step_line(step)]), flush=True)

    done = await switch(request, show)
    return Told(source=done.source, result=done.result, steps=done.steps)


COMMAND = Command(
    name="switch",
    group="Change",
    summary="change the mode of the running process, without losing a connection",
    description="""Change the mode of the running process without a restart.

First it checks that the new mode can serve here: what it needs is there, its rules can be
made, and no Service would be served worse. Then the new mode's rules are written beside
those of the old one, new connections go to the new mode, and the old rules are removed.
Destinations of Services that answered before are dialled all the time; if they fail, or
the kernel refuses the rules, the old mode serves again by itself. Established connections
go on: those that the old mode itself carries (in the modes that have a table of
connections, or end them in the process) get --drain to end.

The configuration is not changed: after a restart the configured mode is back. Set the
mode there, too, to keep it.

Only root, and the user of the process, may switch. A switch that has begun goes on if this
command is interrupted.""",
    flags=(
        option("to", "The mode.", completes="mode"),
        option("dry-run", "Only check whether the mode can serve.", kind="bool"),
        option(
            "force",
            "Switch although Services would be served worse: new Findings of severity error.",
            kind="bool",
        ),
        option(
            "watch-for", "Time that new connections are watched.", kind="duration", default="5s"
        ),
        option(
            "drain",
            "Time that connections get to end that the old mode carries.",
            kind="duration",
            default="1h",
        ),
    ),
    examples=(
        Example(f"steersman switch --to {_MODE} --dry-run", f"whether {_MODE} mode can serve"),
        Example(f"steersman switch --to {_MODE}", "switch, and watch new connections for 5 s"),
        Example(f"steersman switch --to {_MODE} --watch-for 1m -o json", "for scripts"),
    ),
    exit_codes=(
        (0, "The mode serves, or could (--dry-run)."),
        (1, "It does not: the old mode goes on, or serves again."),
        (2, "No process answers, or another switch is under way."),
    ),
    answer=_answer,
    process_only=True,
)
