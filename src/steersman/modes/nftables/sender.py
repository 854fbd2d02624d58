"""Transactions over netlink: send them, tell ours from foreign ones, explain rejections."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Sequence

from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.model.errors import TRANSIENT_ERRNOS, ApplyError, BusyError
from steersman.model.names import Family
from steersman.modes.nftables import wire
from steersman.modes.nftables.layout import Kind, kind_of
from steersman.modes.nftables.text import describe
from steersman.modes.nftables.transaction import Operation
from steersman.netfilter.nft import wire as nft
from steersman.netfilter.nft.generations import ForeignChanges, generation

BUFFER = 1 << 28
"""Bytes of the largest transaction; 50,000 Services take 20 MB."""
IN_USE_KINDS = (Kind.CHAIN, Kind.AFFINITY, Kind.MEMBERS)
"""Kinds of objects that can still be in use when they are deleted."""


def open_netlink() -> Netlink:
    """Open the socket for transactions, in the calling thread's network namespace."""
    return Netlink(NETLINK_NETFILTER, buffer=BUFFER)


class InUseError(BusyError):
    """A chain or set that was to be deleted is still in use."""


class Sender:
    """Sends transactions, and counts those of other programs. Blocks; one call at a time."""

    def __init__(self, netlink: Netlink) -> None:
        self.netlink = netlink
        weakref.finalize(self, netlink.close)  # commands may not close the mode
        self.foreign = ForeignChanges(lambda: generation(netlink))
        """Counts transactions of other programs; told of each of ours."""
        probe = nft.about(
            nft.Table(nft.NFPROTO[Family.IPV4], "steersman-no-such-table"), nft.DESTROYTABLE
        )
        self.destroys = not netlink.batch(nft.batch([probe]))
        """True if the kernel can destroy elements: delete those that may not exist."""

    def send(self, operations: Sequence[Operation]) -> None:
        """Send one transaction.

        Raises:
            ApplyError: the kernel rejects it.
            InUseError: a chain or set that it deletes is still in use.
            BusyError: the kernel had no time or memory.
        """
        try:
            errors = self.netlink.batch(nft.batch([operation.request for operation in operations]))
        except OSError as failure:
            if failure.errno != errno.EMSGSIZE:  # in a user namespace wmem_max is the limit
                raise
            message = "nftables: the transaction is too large to be sent at once"
            raise ApplyError(message) from failure
        if not errors:
            self.foreign.check(ours=1)
            return
        index, error = min(errors.items())
        keys: tuple[bytes, ...] = ()
        if 0 < index <= len(operations):  # message 0 begins the batch, the last one ends it
            rejected = operations[index - 1]
            at = wire.element_at(rejected.request, error.offset) if error.offset else -1
            keys = rejected.keys[at : at + 1] if at >= 0 else rejected.keys
        if error.errno == errno.EBUSY and keys and kind_of(keys[0]) in IN_USE_KINDS:
            raise InUseError(str(error))
        if error.errno in TRANSIENT_ERRNOS:
            raise BusyError(f"nftables: {error}")
        what = describe(keys) if keys else "its fixed rules"
        reason = str(error).partition(": ")[2] or str(error)
        raise ApplyError(f"nf_tables rejects {what}: {reason}")
