"""`steersman problems`: everything that is wrong in a cluster, worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import Argument, Command, Example, option
from steersman.cli.fleet import HOW, NODE_FLAGS, ask_fleet, follow_fleet
from steersman.operate.answer import Answer

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.ui.fleet import Fleet

_ASKED = ("severity", "namespace", "on-node")


def view_of(parsed: Parsed, fleet: Fleet) -> Answer:
    """Return the problems that a command line asks for, as they are now."""
    import time  # noqa: PLC0415 - only for this answer, as the others

    from steersman.operate.problems import find_problems, read_filter  # noqa: PLC0415

    values = {name: str(parsed.values.get(name) or "") for name in _ASKED}
    asked = read_filter(
        {**values, "node": values["on-node"], "q": " ".join(filter(None, parsed.arguments))}
    )
    return find_problems(
        fleet.seen,
        fleet.disagreements,
        asked=asked,
        now=time.time(),
        trouble=fleet.problem,
        page_size=1_000_000,
    )


COMMAND = Command(
    name="problems",
    summary="list everything that is wrong in a cluster, worst first",
    description=f"""\
List everything that is wrong, worst first: nodes that cannot be reached, conditions that are not
True, rules that other programs change, and Findings about objects. The same problem of many nodes
is listed once. Each comes with evidence and a remedy. Words select problems that contain them.

{HOW}""",
    flags=(
        *NODE_FLAGS,
        option(
            "severity",
            "Only problems of this severity.",
            choices=("error", "warning", "unknown"),
        ),
        option("namespace", "Only problems of this namespace.", short="n", completes="namespace"),
        option("on-node", "Only problems of this node."),
    ),
    arguments=(Argument("WORD", "Only problems that contain the word.", repeated=True),),
    examples=(
        Example("steersman problems --kubeconfig ~/.kube/config --token-file token", "a cluster"),
        Example(
            "steersman problems --severity error -o json", "the errors of this node, for scripts"
        ),
        Example("steersman problems shop/cart", "the problems of one Service"),
    ),
    exit_codes=(
        (0, "There is no error; there may be warnings."),
        (1, "There is an error, or a node cannot be asked."),
        (2, "The command line is wrong."),
    ),
    answer=ask_fleet(view_of),
    follow=follow_fleet(view_of),
    watch=True,
    process_only=True,
)
