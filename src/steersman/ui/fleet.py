"""The nodes that pages show, and the ways to reach them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.model.world import World
from steersman.operate.fleet_view import Disagreement, SeenNode


class Fleet(ABC):
    """The nodes and their last states."""

    version: int = 0
    """Grows with each change of a state."""
    problem: str = ""
    """Why the nodes cannot be found; "" if they can."""
    disagreements: tuple[Disagreement, ...] = ()
    """Nodes that serve something else than most nodes, and which Services these are."""

    @property
    @abstractmethod
    def nodes(self) -> Mapping[str, NodeState]:
        """The last state of each node that has been reached, by name."""

    @property
    def seen(self) -> Sequence[SeenNode]:
        """All nodes, also those that cannot be reached."""
        return tuple(
            SeenNode(name, "", state, state.now, state.now) for name, state in self.nodes.items()
        )

    @property
    def default_node(self) -> str:
        """The node that pages ask if none is chosen: one that is reached and well, if possible.

        "" if no node has answered yet.
        """
        ranked = [
            (bool(each.problem), not each.state.healthy, each.name)
            for each in self.seen
            if each.state is not None
        ]
        return min(ranked)[2] if ranked else ""

    @abstractmethod
    async def changed(self, since: int) -> int:
        """Wait until the version is larger than `since`; return it."""

    @abstractmethod
    async def get(self, node: str, path: str) -> bytes:
        """Return a page of a node.

        Raises:
            QuestionError: there is no such node, it cannot be reached, or refuses.
        """

    @abstractmethod
    def post(self, node: str, path: str, document: object) -> AsyncIterator[Any]:
        """Send a request to a node; yield the lines of its answer, decoded; raises as `get`."""

    @abstractmethod
    async def world(self, node: str, service: ObjectName | None = None) -> World:
        """Return the World of a node, or the part of it about one Service; raises as `get`."""

    async def part(self, node: str, services: Sequence[ObjectName]) -> World:  # noqa: ARG002
        """Return a part of a World that has these Services; raises as `get`."""
        return await self.world(node)
