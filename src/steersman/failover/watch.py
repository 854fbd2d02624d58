"""The interface by which a mode tells that connections to endpoints fail."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import NamedTuple

from steersman.model.failover import Backend, Observation


class Failure(NamedTuple):
    """What a packet, a socket or a counter says about a connection to an endpoint."""

    backend: Backend
    observation: Observation
    client: str = ""
    """Address of the client, if it is known."""


class FailureWatch:
    """Sees connections fail, in the network namespace of the thread that makes it; this one none.

    That is the thread of a mode; the methods are called on the event loop. Whatever it puts into
    the kernel disappears with its process, also after kill -9.
    """

    counts_answers = False
    """Whether `receive` returns answers, too: at least one from each endpoint that answers clients
    while others of its Service do not."""
    of_this_node = False
    """Whether the connections are opened by this node, for its clients: if a policy drops its
    probes, it drops these, too."""

    async def receive(self) -> list[Failure]:
        """Wait for failures. It may lose some, as clients try again, and may be cancelled.

        Raises:
            OSError: nothing more can be seen.
        """
        await asyncio.Event().wait()
        return []

    async def cut(self, backends: Collection[Backend]) -> int:
        """Let connections that wait for an answer of ejected endpoints begin again.

        Returns:
            The number of connections.

        Raises:
            OSError: they cannot be listed.
        """
        del backends
        return 0

    async def aclose(self) -> None:
        """Stop, and remove everything from the kernel; `receive` has ended."""
