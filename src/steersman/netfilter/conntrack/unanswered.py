"""Delete the conntrack entries of connections that no endpoint has answered.

A connection attempt to a silent endpoint is an entry in state SYN_SENT that has seen no reply. The
kernel sends only unanswered entries (CTA_STATUS_MASK, Linux 5.15), but walks over its whole table
for that: 60 ms of CPU time with 100,000 entries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable

from steersman.host.netlink import (
    NETLINK_NETFILTER,
    DumpInterruptedError,
    Netlink,
)
from steersman.host.nlmsg import Request, be32
from steersman.model.conntrack import Cleanup, pack_socket
from steersman.model.failover import Backend
from steersman.model.names import Family, Protocol
from steersman.model.plan import ServicePlan
from steersman.netfilter.conntrack.stale import delete_entries
from steersman.netfilter.conntrack.wire import (
    AF_NUMBERS,
    CT_GET,
    CTA_STATUS,
    CTA_STATUS_MASK,
    DST_NAT,
    SEEN_REPLY,
    entry_keys,
    status_of,
)

_STEP = 1000  # entries that are looked at in one step; about 2 ms
_LISTINGS = 5  # attempts at a complete list, while the table changes


def _listing(status: int, mask: int, family: int = 0) -> Request:
    """Return a request for the entries whose status has some bits, of both families or of one."""
    header = bytes((family, 0, 0, 0))
    return Request(CT_GET, header + be32(CTA_STATUS, status) + be32(CTA_STATUS_MASK, mask))


def delete_unanswered(backends: Collection[Backend]) -> Generator[None, None, int]:
    """Delete the entries of connections to some endpoints that have not answered, in steps.

    The next packet of such a client, a retransmission, is then translated again, to another
    endpoint. Returns the number of deleted entries.

    Raises:
        OSError: the entries cannot be listed.
    """
    wanted = {bytes((each.protocol.number,)) + pack_socket(each.ip, each.port) for each in backends}

    def is_wanted(payload: bytes) -> bool:
        destination, source = entry_keys(payload)
        return destination[:1] + source in wanted

    cleanup = yield from _delete_silent(_listing(0, SEEN_REPLY), is_wanted if wanted else None)
    return cleanup.deleted


def delete_untranslated(
    family: Family, plans: Iterable[ServicePlan]
) -> Generator[None, None, Cleanup]:
    """Delete unanswered connections to Services that were not translated, in steps.

    They began while rules were missing. Conntrack keeps such an entry for two minutes, and renews
    it before Linux 6.3: as long as it is there, no rule of a nat chain sees the client's packets.
    Without it the next SYN is translated. Entries of UDP are left to `delete_stale`, and node ports
    to the kernel: it answers, so their connections end.

    Args:
        family: the family whose entries are listed.
        plans: the Services.

    Raises:
        OSError: the entries cannot be listed.
    """
    wanted = {
        bytes((plan.key.name.protocol.number,)) + pack_socket(frontend.address, frontend.port)
        for plan in plans
        if plan.key.family is family and plan.key.name.protocol is not Protocol.UDP
        for frontend in plan.frontends
        if frontend.address
    }

    def is_wanted(payload: bytes) -> bool:
        destination, source = entry_keys(payload)
        return destination[1:] == source and destination in wanted

    listing = _listing(0, SEEN_REPLY | DST_NAT, AF_NUMBERS[family])
    return _delete_silent(listing, is_wanted if wanted else None)


def _delete_silent(
    request: Request, is_wanted: Callable[[bytes], bool] | None
) -> Generator[None, None, Cleanup]:
    """Delete those of the listed entries that have seen no reply and are wanted; None: no entry."""
    if is_wanted is None:
        return Cleanup(0, 0, complete=True)
    deleted = failed = 0
    complete = False
    with Netlink(NETLINK_NETFILTER) as listing, Netlink(NETLINK_NETFILTER) as deleting:
        for _ in range(_LISTINGS):
            found: list[bytes] = []
            try:
                for number, reply in enumerate(listing.dump(request)):
                    if number % _STEP == 0:
                        yield
                    # Kernels before 5.15 send answered entries, too.
                    if is_wanted(reply.payload) and not status_of(reply.payload) & SEEN_REPLY:
                        found.append(reply.payload)
                complete = True
            except DumpInterruptedError:  # some may be missing: list again
                complete = False
            gone, kept = delete_entries(deleting, found)
            deleted, failed = deleted + gone, failed + kept
            if complete:
                break
    return Cleanup(deleted, failed, complete)
