"""Transactions over netlink: sent, accounted for, refusals put into words."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Sequence

from steersman.host.netlink import Netlink, NetlinkError
from steersman.host.nlmsg import text
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.modes.nftables import wire
from steersman.modes.nftables.layout import Kind
from steersman.modes.nftables.text import describe
from steersman.modes.nftables.transaction import Step
from steersman.netfilter.generation import generation

_BUSY = (errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
OBJECTS = (Kind.CHAIN, Kind.AFFINITY, Kind.MEMBERS)
"""What can still be in use when it is deleted."""


class HeldError(BusyError):
    """A chain or set is still in use."""


class Sender:
    """The socket, and which transactions were not ours. Blocks; one call at a time."""

    def __init__(self, netlink: Netlink) -> None:
        """Take the socket; it is closed with this."""
        self.netlink = netlink
        weakref.finalize(self, netlink.close)  # modes are dropped, not closed
        self._generation = generation(netlink)
        self._strangers = 0
        self.destroys = self._can_destroy()
        """Whether the kernel can delete what may not be there."""

    def _can_destroy(self) -> bool:
        """Ask the kernel by an empty transaction."""
        probe = wire.request(wire.DESTROYTABLE, Family.IPV4, text(1, "steersman-no-such-table"))
        return not self.netlink.batch(wire.batch([probe]))

    def strangers(self) -> int:
        """How often the ruleset was changed by others, as far as it was looked."""
        now = generation(self.netlink)
        self._strangers += now != self._generation
        self._generation = now
        return self._strangers

    def made_transaction(self) -> None:
        """Take note of the generation that a transaction of our own made."""
        now = generation(self.netlink)
        self._strangers += (now - self._generation) & 0xFFFFFFFF != 1
        self._generation = now

    def send(self, steps: Sequence[Step]) -> None:
        """Send one transaction.

        Raises:
            ApplyError: the kernel refuses it.
            HeldError: a chain or set that it deletes is still in use.
            BusyError: the kernel had no time or memory.
        """
        try:
            refused = self.netlink.batch(wire.batch([step.request for step in steps]))
        except OSError as failure:
            if failure.errno != errno.EMSGSIZE:  # in a user namespace wmem_max is the limit
                raise
            message = "nftables: the transaction is too large to be sent at once"
            raise ApplyError(message) from failure
        if not refused:
            self.made_transaction()
            return
        index, error = min(refused.items())
        keys = _blamed(steps[index - 1], error) if 0 < index <= len(steps) else ()
        if error.errno == errno.EBUSY and keys and keys[0][0] in OBJECTS:
            raise HeldError(str(error))
        if error.errno in _BUSY:
            raise BusyError(f"nftables: {error}")
        what = describe(keys) if keys else "its fixed rules"
        raise ApplyError(f"nf_tables refuses {what}: {_reason(error)}")


def _blamed(step: Step, error: NetlinkError) -> tuple[bytes, ...]:
    """The object that the kernel blames, or all those of the message where it does not say."""
    number = wire.element_at(step.request, error.offset) if error.offset else -1
    return step.keys[number : number + 1] if number >= 0 else step.keys


def _reason(error: NetlinkError) -> str:
    return str(error).partition(": ")[2] or str(error)
