"""`steersman problems`: everything that is wrong on this node or in a cluster, worst first."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from steersman.cli.command import CLUSTER, Argument, Command, Example, option
from steersman.cli.fleet import HOW, NODE_FLAGS, ask_fleet, asks_this_node, follow_fleet
from steersman.operate.answer import Answer, QuestionError

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.problems import Filter
    from steersman.ui.fleet import Fleet

_ASKED = ("severity", "namespace", "on-node")


def _asked(parsed: Parsed) -> Filter:
    """Return the filter that a command line gives."""
    from steersman.operate.problems import read_filter  # noqa: PLC0415 - only for this answer, as the others

    values = {name: str(parsed.values.get(name) or "") for name in _ASKED}
    words = " ".join(filter(None, parsed.arguments))
    return read_filter({**values, "node": values["on-node"], "q": words})


def view_of(parsed: Parsed, fleet: Fleet) -> Answer:
    """Return the problems of nodes that a command line asks for, as they are now."""
    from steersman.operate.problems import find_problems  # noqa: PLC0415 - as the others

    return find_problems(
        fleet.seen,
        fleet.disagreements,
        asked=_asked(parsed),
        now=time.time(),
        trouble=fleet.problem,
        page_size=1_000_000,
    )


async def _answer(parsed: Parsed) -> Answer:
    """Answer about this node by all that its process knows; else by the states of nodes."""
    from steersman.operate.explain_flow import FlowExplainer  # noqa: PLC0415 - as the others
    from steersman.operate.explain_problems import explain_problems  # noqa: PLC0415
    from steersman.operate.load import world_of_process  # noqa: PLC0415
    from steersman.operate.names import Names  # noqa: PLC0415

    if asks_this_node(parsed):
        try:
            world = await world_of_process()
        except QuestionError:  # that it cannot be asked is a problem of the node, too
            pass
        else:
            explainer = FlowExplainer(world, Names(world))
            return explain_problems(explainer, _asked(parsed), time.time())
    return await ask_fleet(view_of)(parsed)


def _follow(parsed: Parsed, every: float) -> AsyncIterator[Answer] | None:
    """Answer about several nodes from their streams, which stay open."""
    return None if asks_this_node(parsed) else follow_fleet(view_of)(parsed, every)


COMMAND = Command(
    name="problems",
    summary="list everything that is wrong on this node or in a cluster, worst first",
    description=f"""\
List everything that is wrong, worst first: nodes that cannot be reached, conditions that are not
True, rules that other programs change, Findings about objects, and Services that clients cannot
use: they have no endpoint, or none on a node. The same problem of many nodes is listed once. Each
comes with evidence and a remedy. Words select problems that contain them.

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
        Example("steersman problems", "this node"),
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
    answer=_answer,
    follow=_follow,
    watch=True,
    takes=CLUSTER,
)
