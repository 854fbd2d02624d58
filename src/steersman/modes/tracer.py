"""The interface of a Tracer: follow one packet through the kernel.

    tracer = mode.tracer()           None if the mode cannot trace
    await tracer.start(flow)         from now on the first packet of the flow is followed
    flow = await tracer.first_packet()
    steps = await tracer.steps()
    connection = await tracer.connection(flow)
    await tracer.aclose()

Whatever a Tracer puts into the kernel disappears with its process, also after kill -9, and nothing
of it exists while nobody traces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from steersman.model.tracing import TraceStep, TrackedConnection, WatchedFlow


class Tracer(ABC):
    """Follows the first packet of a flow in the network namespace of the calling thread.

    The first packet is the one that opens the connection (TCP SYN, SCTP INIT) or the first
    datagram. Any method may raise BusyError, with a sentence, if the kernel does not allow it.
    """

    @abstractmethod
    async def start(self, flow: WatchedFlow) -> None:
        """Follow the first packet of a flow from now on; call it once.

        Raises:
            BusyError: this machine cannot do it; the message says why, and a remedy.
        """

    @abstractmethod
    async def first_packet(self) -> WatchedFlow:
        """Wait for the first packet; return its flow with the client's address and port."""

    @abstractmethod
    async def steps(self) -> tuple[TraceStep, ...]:
        """Return what the kernel has done so far with the packet, and with the first answer."""

    async def connection(self, flow: WatchedFlow) -> TrackedConnection | None:
        """Return the connection of a flow with all its addresses; None if the kernel has none."""
        del flow
        return None

    @abstractmethod
    async def aclose(self) -> None:
        """Remove everything from the kernel."""
