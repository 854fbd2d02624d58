"""`steersman status`: the state of the running process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import Command, Example, option

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    from steersman.config import UsageError  # noqa: PLC0415 - as the others
    from steersman.operate.status import ask_status, wait_for_status  # noqa: PLC0415

    if parsed.values.get("wait"):
        timeout = parsed.values.get("timeout")
        return await wait_for_status(float(getattr(timeout, "seconds", 300.0)))
    if "timeout" in parsed.values:
        raise UsageError("--timeout is for --wait: give that, too, or leave it out")
    return await ask_status()


COMMAND = Command(
    name="status",
    summary="show the state of the running process, with conditions",
    description="""\
Show the state of the running process of this node: its syncs, its connection to the API server, its
Findings, and conditions like those of Kubernetes objects, each with its status, reason, message and
how long it has had that status.

Running           the process answers on its local socket
Synced            the first sync was written, and the last one did not fail
SourceConnected   the API server, or the manifests, can be read
KernelMatches     the kernel has what the plan says, when it was last compared
NoFindings        no object has an error; warnings are listed, but do not count
Healthy           no change waits for longer than the health check allows""",
    flags=(
        option("wait", "Wait until every condition is True.", kind="bool"),
        option(
            "timeout", "How long --wait waits; 0s waits for ever.", kind="duration", default="5m"
        ),
    ),
    examples=(
        Example("steersman status", "is this node as it should be?"),
        Example("steersman status --wait --timeout 2m", "continue once the node is ready to serve"),
        Example("steersman status -o json", "for scripts: conditions, source, Findings"),
    ),
    exit_codes=(
        (0, "Every condition is True."),
        (1, "A condition is False or Unknown, or no process runs."),
        (2, "The command line is wrong."),
    ),
    answer=_answer,
    takes=frozenset(),
    watch=True,
)
