"""`steersman switch`: change the mode of the running process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from steersman.cli.command import Argument, Command, Example, option

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.model.switch import SwitchStep
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    """Switch; as text, each step is shown as soon as it is done."""
    from msgspec.structs import replace  # noqa: PLC0415 - not for --help, as the others

    from steersman.cli.output import print_blocks  # noqa: PLC0415
    from steersman.config import UsageError  # noqa: PLC0415
    from steersman.model.switch import SwitchRequest  # noqa: PLC0415
    from steersman.operate.switch import step_line, switch  # noqa: PLC0415

    values = parsed.values
    modes = {*parsed.arguments, *filter(None, [str(values.get("to", ""))])}
    if len(modes) != 1:
        raise UsageError("give one mode: steersman switch MODE")
    (to,) = modes

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
        print_blocks([step_line(step)], sys.stdout)
        sys.stdout.flush()

    done = await switch(request, show)
    return replace(done, steps=())  # they have been shown


COMMAND = Command(
    name="switch",
    group="Change",
    summary="change the mode of the running process, without losing a connection",
    description="""Change the mode of the running process without a restart.

It first checks that the new mode can serve here: that its requirements are met, that its
rules can be rendered, and that no Service would be served worse. Then it writes the new
mode's rules beside those of the old one, sends new connections to the new mode, and removes
the old rules. Meanwhile it keeps connecting to Services that answered before; if that fails,
or if the kernel refuses the rules, it goes back to the old mode by itself. Established
connections continue. Those that the old mode itself carries (ipvs, ebpf and userspace do)
have the time of --drain to end.

The configuration is not changed: after a restart the process runs in the configured mode
again. To keep the new mode, set it there, too.

Only root and the user of the process may switch. Interrupting this command does not
interrupt a switch that has begun.""",
    arguments=(Argument("MODE", "The new mode.", completes="mode"),),
    flags=(
        option("to", "The same as MODE.", completes="mode"),
        option("dry-run", "Only check whether the mode can serve.", kind="bool"),
        option(
            "force",
            "Switch although Services would be served worse: new Findings of severity error.",
            kind="bool",
        ),
        option("watch-for", "How long new connections are watched.", kind="duration", default="5s"),
        option(
            "drain",
            "How long connections that the old mode carries may take to end.",
            kind="duration",
            default="1h",
        ),
    ),
    examples=(
        Example("steersman switch nftables --dry-run", "whether nftables mode can serve here"),
        Example("steersman switch nftables", "switch, and watch new connections for 5 s"),
        Example("steersman switch ebpf --watch-for 1m -o json", "for scripts"),
    ),
    exit_codes=(
        (0, "The new mode serves, or could (--dry-run)."),
        (1, "It does not: the old mode continues, or serves again."),
        (2, "No process answers, or another switch is under way."),
    ),
    answer=_answer,
    takes=frozenset(),
)
