"""Transactions over netlink: send them, tell ours from foreign ones, explain rejections."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Sequence
from contextlib import suppress

from steersman.host.netlink import Netlink, NetlinkError
from steersman.host.nlmsg import text
from steersman.model.errors import TRANSIENT_ERRNOS, ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.nftables import wire
from steersman.modes.nftables.layout import (
    Form,
    Kind,
    affinity_map_of,
    family_of,
    kind_of,
    name_of,
    split_element,
)
from steersman.modes.nftables.read import affinity_entries
from steersman.modes.nftables.text import describe
from steersman.modes.nftables.transaction import Operation
from steersman.netfilter.generation import ForeignChanges, generation

IN_USE_KINDS = (Kind.CHAIN, Kind.AFFINITY, Kind.MEMBERS)
"""Kinds of objects that can still be in use when they are deleted."""


class InUseError(BusyError):
    """A chain or set that was to be deleted is still in use."""


class Sender:
    """Sends transactions, and counts those of other programs. Blocks; one call at a time."""

    def __init__(self, netlink: Netlink) -> None:
        self.netlink = netlink
        # Not in aclose: a thread may still send a transaction when its task has been cancelled.
        weakref.finalize(self, netlink.close)
        self._foreign = ForeignChanges(lambda: generation(netlink))
        probe = wire.request(wire.DESTROYTABLE, Family.IPV4, text(1, "steersman-no-such-table"))
        self.destroys = not netlink.batch(wire.batch([probe]))
        """True if the kernel can destroy elements: delete those that may not exist."""

    def foreign_generations(self) -> int:
        """Return how often other programs changed the ruleset, as far as it was checked."""
        return self._foreign.check()

    def note_own_transaction(self) -> None:
        """Count the transaction that was just made as ours."""
        self._foreign.check(ours=1)

    def send(self, operations: Sequence[Operation]) -> None:
        """Send one transaction.

        Raises:
            ApplyError: the kernel rejects it.
            InUseError: a chain or set that it deletes is still in use.
            BusyError: the kernel had no time or memory.
        """
        try:
            errors = self.netlink.batch(wire.batch([operation.request for operation in operations]))
        except OSError as failure:
            if failure.errno != errno.EMSGSIZE:  # in a user namespace wmem_max is the limit
                raise
            message = "nftables: the transaction is too large to be sent at once"
            raise ApplyError(message) from failure
        if not errors:
            self.note_own_transaction()
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


# -- affinity entries of removed members ----------------------------------------------------


def removes_members(change: Diff) -> bool:
    """Return whether a Diff may flush affinity entries; there can be very many."""
    return any(kind_of(key) == Kind.MEMBER for key in change.removed)


def flush_affinity(sender: Sender, removed: Ruleset) -> None:
    """Delete the affinity entries of removed members, unless their map was removed too.

    The transaction that removed them is in force, so an error here must not fail it.
    """
    endpoints: dict[bytes, set[bytes]] = {}
    for key in removed:
        if kind_of(key) == Kind.MEMBER:
            members, endpoint = split_element(key)
            if members not in removed:
                endpoints.setdefault(members, set()).add(endpoint)
    verb = wire.DESTROYSETELEM if sender.destroys else wire.DELSETELEM
    for members, gone in endpoints.items():
        family, name = family_of(members), affinity_map_of(name_of(members))
        clients: list[tuple[bytes, bytes]] = []
        with suppress(
            NetlinkError
        ):  # another program changes the ruleset: flush the entries read so far
            for client, endpoint in affinity_entries(sender.netlink, family, name):
                if endpoint in gone:
                    clients.append((client, b""))
        # Without destroy, an entry that expired would fail all others of its transaction.
        together = len(clients) if sender.destroys else 1
        for first in range(0, len(clients), together or 1):
            pairs = clients[first : first + together]
            items = wire.encode(Form.SET, pairs, keys_only=True)
            room = wire.room(items)
            requests = [
                wire.elements(verb, family, name, items[at : at + room])
                for at in range(0, len(items), room)
            ]
            if not sender.netlink.batch(wire.batch(requests)):
                sender.note_own_transaction()
