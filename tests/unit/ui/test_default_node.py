"""The node that pages ask if none is chosen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from steersman.model.node_state import NodeState
from steersman.operate.node_trouble import SeenNode
from tests.support.pages import ScriptedFleet


class Seen(ScriptedFleet):
    """A fleet with nodes that cannot be reached."""

    def __init__(self, *seen: SeenNode) -> None:
        super().__init__()
        self._seen = seen

    @property
    def seen(self) -> Sequence[SeenNode]:
        return self._seen


def node(name: str, *, healthy: bool = True, problem: str = "", known: bool = True) -> SeenNode:
    state = NodeState(name, "nftables", healthy=healthy) if known else None
    return SeenNode(name, "", state, problem=problem)


@pytest.mark.parametrize(
    ("seen", "chosen"),
    [
        ([], ""),
        ([node("a", known=False)], ""),
        ([node("b"), node("a")], "a"),
        ([node("a", problem="gone"), node("b")], "b"),
        ([node("a", healthy=False), node("b")], "b"),
        ([node("a", problem="gone"), node("b", healthy=False)], "b"),
        ([node("a", problem="gone")], "a"),
    ],
)
def test_one_that_is_reached_and_well_if_possible(seen: list[SeenNode], chosen: str) -> None:
    assert Seen(*seen).default_node == chosen
