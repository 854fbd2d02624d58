"""Rules of netfilter that a packet meets between the mode's programs: a firewall, a NetworkPolicy.

Ingress and connect() have changed the destination before netfilter sees the packet, so it is
recognised by its client alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from steersman.host.exec import Exec
from steersman.host.netlink import AnswersLostError
from steersman.model.errors import BusyError
from steersman.model.tracing import TraceStep, WatchedFlow
from steersman.netfilter.nftrace import REPLY_PREFIX, NftTrace
from steersman.netfilter.rule_reader import read_rule_book
from steersman.netfilter.trace_event import TraceEvent
from steersman.netfilter.trace_log import TraceLog, legacy_families
from steersman.netfilter.trace_steps import to_steps

_BEFORE_RULES = ("connect", "sendmsg", "ingress")


class RuleTrace:
    """The rules of netfilter that the first packet of a client's port meets."""

    def __init__(self, execute: Exec, flow: WatchedFlow) -> None:
        """Mark that packet from now on, in the network namespace of this thread.

        Raises:
            BusyError: the kernel has no nf_tables that can do it.
        """
        self._execute = execute
        self._flow = flow
        families = [family for family in legacy_families() if family is flow.family]
        self._log = TraceLog(families) if families else None  # before packets are marked
        try:
            self._nft = NftTrace(flow, replies=False, to_anywhere=True)
        except BusyError:
            if self._log:
                self._log.close()
            raise
        self._events: list[TraceEvent] = []

    async def steps(self) -> tuple[TraceStep, ...]:
        """Return the steps so far."""
        with suppress(AnswersLostError):  # 1 MB holds some thousand events
            self._events += self._nft.waiting()
        if self._log:
            self._events += self._log.waiting()
        if not self._events:
            return ()
        book = await read_rule_book(self._execute, self._events)
        return to_steps(
            *(self._events, book, self._flow),
            table=self._nft.table,
            reply_prefix=REPLY_PREFIX,
            owns=lambda _table, _chain: False,
            to_endpoint=False,
        )

    def close(self) -> None:
        """Remove our table, and set the logger back."""
        self._nft.close()
        if self._log:
            self._log.close()


def with_rules(steps: Sequence[TraceStep], rules: Sequence[TraceStep]) -> tuple[TraceStep, ...]:
    """Put the steps of rules where the packet met them: after ingress, before egress."""
    if not rules:
        return tuple(steps)
    before = [
        place
        for place, step in enumerate(steps)
        if step.direction == "original" and step.hook in _BEFORE_RULES
    ]
    place = before[-1] + 1 if before else 0
    rest = steps[place:]
    if any(step.ends for step in rules):  # the kernel's own report of the drop says less
        rest = [step for step in rest if step.direction == "reply" or not step.ends]
    return (*steps[:place], *rules, *rest)
