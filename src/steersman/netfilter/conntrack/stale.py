"""Find and delete stale entries; compile/conntrack.py says which.

Entries are checked while they stream in, and all of it happens in a thread: so 200,000 entries
neither fill memory nor block the event loop.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import ParamSpec, TypeVar

from steersman.host.netlink import (
    NETLINK_NETFILTER,
    NETLINK_ROUTE,
    DumpInterruptedError,
    Netlink,
    NetlinkError,
)
from steersman.host.nlmsg import NLA_F_NESTED, NLM_F_ACK, Request, attr, attributes
from steersman.host.rtnetlink import get_route, is_local_route
from steersman.host.sysctl import SysctlError
from steersman.host.threads import to_thread_to_end
from steersman.model.conntrack import Cleanup, Confirm, Stale
from steersman.netfilter.conntrack.usage import usage
from steersman.netfilter.conntrack.wire import (
    CT_DELETE,
    CTA_ID,
    CTA_TUPLE_ORIG,
    CTA_ZONE,
    LAYOUTS,
    entry_keys,
    list_request,
    listed_keys,
)

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE = 256  # entries deleted by one datagram
_CHUNK = 4096  # stale entries in memory at a time


async def delete_stale(stale: Stale, confirm: Confirm | None = None) -> Cleanup:
    """Delete the stale entries of a family.

    Args:
        stale: tells which entries these are.
        confirm: computes the stale entries again after the listing; None if they cannot change.

    Raises:
        OSError: the entries cannot be listed; some may have been deleted.
    """
    if not stale:
        return Cleanup(0, 0, complete=True)
    deleted = failed = 0
    seconds = 0.0
    try:
        with (
            Netlink(NETLINK_NETFILTER) as listing,
            Netlink(NETLINK_NETFILTER) as deleting,
            Netlink(NETLINK_ROUTE) as routes,
        ):
            search = _Search(listing, routes, stale)
            while True:
                found, took = await to_thread_to_end(_timed, search.chunk)
                seconds += took
                if not found:
                    break
                if confirm is not None:
                    fresh = await confirm()
                    found = [p for p in found if fresh.contains(*entry_keys(p, search.layout))]
                done, took = await to_thread_to_end(_timed, delete_entries, deleting, found)
                deleted, failed, seconds = deleted + done[0], failed + done[1], seconds + took
    except OSError:
        try:
            usage()
        except SysctlError:  # this kernel tracks no connections: in ebpf mode it need not
            return Cleanup(0, 0, complete=True)
        raise
    return Cleanup(deleted, failed, search.complete, seconds)


def delete_now(stale: Stale) -> None:
    """Delete the stale entries of a family, as far as the kernel lets them go. It blocks.

    Raises:
        OSError: the entries cannot be listed; some may have been deleted.
    """
    with (
        Netlink(NETLINK_NETFILTER) as listing,
        Netlink(NETLINK_NETFILTER) as deleting,
        Netlink(NETLINK_ROUTE) as routes,
    ):
        search = _Search(listing, routes, stale)
        while found := search.chunk():
            delete_entries(deleting, found)


def _timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """Return a result, and the CPU seconds that it took this thread."""
    began = time.thread_time()
    result = call(*args, **kwargs)
    return result, time.thread_time() - began


def find_stale(stale: Stale, most: int = 20) -> list[tuple[bytes, bytes]]:
    """Return destination and source of the first stale entries, packed; delete none. It blocks.

    Raises:
        OSError: the entries cannot be listed.
    """
    if not stale:
        return []
    with Netlink(NETLINK_NETFILTER) as listing, Netlink(NETLINK_ROUTE) as routes:
        search = _Search(listing, routes, stale)
        return [entry_keys(payload, search.layout) for payload in search.chunk()[:most]]


class _Search:
    """The stale entries of a family, a chunk at a time. Its methods block.

    A node port is only at addresses of this node: a connection to the same port of another host
    is foreign.
    """

    def __init__(self, listing: Netlink, routes: Netlink, stale: Stale) -> None:
        self.complete = True
        self.layout = LAYOUTS[stale.family]
        self._found = self._find(listing, routes, stale)

    def chunk(self) -> list[bytes]:
        """Return the payloads of the next stale entries; [] at the end."""
        return list(islice(self._found, _CHUNK))

    def _find(self, listing: Netlink, routes: Netlink, stale: Stale) -> Iterator[bytes]:
        layout, contains = self.layout, stale.contains

        @cache
        def is_local(address: bytes) -> bool:
            try:
                return all(map(is_local_route, routes.request(get_route(address))))
            except NetlinkError:  # no route
                return False

        for key in listed_keys(stale.family, [*stale.by_address, *stale.by_node_port]):
            try:
                for reply in listing.dump(list_request(stale.family, key)):
                    destination, source = entry_keys(reply.payload, layout)
                    if contains(destination, source) and (
                        destination in stale.by_address or is_local(destination[1:-2])
                    ):
                        yield reply.payload
            except DumpInterruptedError:  # the entries seen are enough for now (behaviour 12)
                self.complete = False


def delete_entries(netlink: Netlink, payloads: list[bytes]) -> tuple[int, int]:
    """Delete entries; return how many were deleted, and how many the kernel refused to delete.

    An entry that no longer exists counts as neither.
    """
    deleted = failed = 0
    for first in range(0, len(payloads), _AT_ONCE):
        requests = []
        for payload in payloads[first : first + _AT_ONCE]:
            # With its id exactly the entry that was seen goes, not a newer one of the same tuple.
            values = attributes(payload, 4)
            body = attr(CTA_TUPLE_ORIG | NLA_F_NESTED, values[CTA_TUPLE_ORIG])
            body += b"".join(attr(k, values[k]) for k in (CTA_ZONE, CTA_ID) if k in values)
            requests.append(Request(CT_DELETE, payload[:4] + body, NLM_F_ACK))
        refused = netlink.batch(requests)
        gone = sum(error.errno == errno.ENOENT for error in refused.values())
        deleted += len(requests) - len(refused)
        failed += len(refused) - gone
    return deleted, failed
