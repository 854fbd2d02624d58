"""`steersman nodes`: how the nodes of a cluster are, worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import CLUSTER, Command, Example
from steersman.cli.fleet import HOW, NODE_FLAGS, ask_fleet, follow_fleet
from steersman.config.flags_upstream import Flag, Group
from steersman.operate.answer import Answer

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.ui.fleet import Fleet


def view_of(parsed: Parsed, fleet: Fleet) -> Answer:
    """Return the nodes that a command line asks for, as they are now."""
    import time  # noqa: PLC0415 - only for this answer, as the others

    from steersman.operate.fleet_view import fleet_view, query_of  # noqa: PLC0415

    values = {name: str(parsed.values.get(name) or "") for name in ("health", "sort")}
    return fleet_view(
        fleet.seen,
        time.time(),
        query_of(values),
        problem=fleet.problem,
        page_size=1_000_000,
    )


_SORTS = ("health", "name", "sync", "lag", "findings", "cpu", "memory")
_HEALTHS = (
    *("unreachable", "failing", "waiting", "disagrees", "drifted", "late", "findings", "ok"),
)

COMMAND = Command(
    name="nodes",
    summary="show the state of the nodes of a cluster, worst first",
    description=f"""\
Show a row for each node, worst first: whether it can be asked, its mode and version, its last sync,
how long changes take, Findings, CPU and memory, and what its problems are.

{HOW}""",
    flags=(
        *NODE_FLAGS,
        Flag("health", "string", "", Group.OWN, "Only nodes of this health.", choices=_HEALTHS),
        Flag("sort", "string", "health", Group.OWN, "Order of the nodes.", choices=_SORTS),
    ),
    examples=(
        Example("steersman nodes --kubeconfig ~/.kube/config --token-file token", "a cluster"),
        Example("steersman nodes --node a=http://10.0.0.1:10259 --token-file token", "one node"),
        Example("steersman nodes", "this node"),
    ),
    exit_codes=(
        (0, "Every node is healthy."),
        (1, "A node is not healthy, or cannot be asked."),
        (2, "The command line is wrong."),
    ),
    answer=ask_fleet(view_of),
    follow=follow_fleet(view_of),
    watch=True,
    takes=CLUSTER,
)
