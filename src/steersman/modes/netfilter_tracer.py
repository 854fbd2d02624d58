"""The Tracer of all modes whose packets go through netfilter.

A mode with more to say (virtual servers, sockets of a proxy) derives from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from steersman.host.exec import Exec
from steersman.host.netlink import AnswersLostError
from steersman.model.errors import BusyError
from steersman.model.tracing import TraceStep, TrackedConnection, WatchedFlow
from steersman.modes.tracer import Tracer
from steersman.netfilter.conntrack.flows import find_connection
from steersman.netfilter.trace.events import TraceEvent
from steersman.netfilter.trace.legacy_log import TraceLog, has_legacy_tables
from steersman.netfilter.trace.mark import NftTrace
from steersman.netfilter.trace.reader import read_rule_book
from steersman.netfilter.trace.steps import first_headers, to_steps


class NetfilterTracer(Tracer):
    """Follows a packet through the rules of nf_tables and iptables, whoever made them."""

    translates_to_endpoint = True
    """Whether the mode's rules change the destination to that of an endpoint."""

    def __init__(
        self,
        execute: Exec,
        owns: Callable[[str, str], bool],
        *,
        replies: bool = True,
        to_anywhere: bool = False,
    ) -> None:
        """Create a tracer.

        Args:
            execute: runs the programs that print rules.
            owns: whether a chain is the mode's, by family and table (`ip nat`), and chain.
            replies: also follow the first answer.
            to_anywhere: recognise the packet by its client alone, as the mode has changed its
                destination before netfilter sees it.
        """
        self._execute = execute
        self._owns = owns
        self._replies = replies
        self._to_anywhere = to_anywhere
        self._nft: NftTrace | None = None
        self._log: TraceLog | None = None
        self._events: list[TraceEvent] = []
        self.flow: WatchedFlow | None = None
        """The flow, with the client's port as soon as it is known."""

    async def start(self, flow: WatchedFlow) -> None:
        """Follow the first packet of a flow from now on."""
        self.mark(flow)

    def mark(self, flow: WatchedFlow) -> None:
        """Mark the first packet of a flow from now on, in the network namespace of this thread.

        Raises:
            BusyError: the kernel has no nf_tables that can do it.
        """
        self.flow = flow
        # Before packets are marked, so that no event is missed.
        self._log = TraceLog(flow.family) if has_legacy_tables(flow.family) else None
        try:
            self._nft = NftTrace(flow, replies=self._replies, to_anywhere=self._to_anywhere)
        except BusyError:
            if self._log is not None:
                self._log.close()
            raise

    async def first_packet(self) -> WatchedFlow:
        """Wait for the first packet."""
        assert self._nft is not None
        assert self.flow is not None
        headers = None
        while not (headers := first_headers(self._events, self._nft.table)):
            with suppress(AnswersLostError):
                self._events += await self._nft.receive()
        self.flow = WatchedFlow(
            self.flow.protocol,
            self.flow.destination,
            self.flow.port,
            headers.source,
            headers.source_port,
        )
        return self.flow

    async def steps(self) -> tuple[TraceStep, ...]:
        """Return the steps so far."""
        assert self._nft is not None
        assert self.flow is not None
        with suppress(AnswersLostError):  # 1 MB holds some thousand events
            self._events += self._nft.waiting()
        with suppress(AnswersLostError):
            self._events += self._log.waiting() if self._log is not None else []
        return to_steps(
            self._events,
            await read_rule_book(self._execute, self._events),
            self.flow,
            table=self._nft.table,
            owns=self._owns,
            to_endpoint=self.translates_to_endpoint and not self._to_anywhere,
        )

    async def connection(self, flow: WatchedFlow) -> TrackedConnection | None:
        """Return conntrack's entry of a flow."""
        try:
            return await asyncio.to_thread(find_connection, flow)
        except OSError as error:
            raise BusyError(f"conntrack cannot be listed: {error.strerror}") from error

    async def aclose(self) -> None:
        """Remove our table, and set the logger back."""
        if self._nft is not None:
            self._nft.close()
        if self._log is not None:
            await asyncio.to_thread(self._log.close)
