"""Find and delete stale entries; compile/conntrack.py says which.

Entries are checked while they stream in, in the thread of the mode and between its other calls: so
200,000 entries neither fill memory nor hold up a write.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from functools import cache

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
from steersman.host.worker import KernelWorker, finish, measured
from steersman.model.conntrack import Cleanup, Confirm, Stale
from steersman.netfilter.conntrack.usage import usage
from steersman.netfilter.conntrack.wire import (
    CT_DELETE,
    CTA_ID,
    CTA_TUPLE_ORIG,
    CTA_ZONE,
    entry_keys,
    list_request,
    listed_keys,
)

_AT_ONCE = 256  # entries deleted by one datagram
_CHUNK = 4096  # stale entries in memory at a time
_STEP = 1000  # entries that are looked at in one step; about 2 ms


async def delete_stale(
    worker: KernelWorker, stale: Stale, confirm: Confirm | None = None
) -> Cleanup:
    """Delete the stale entries of a family.

    Args:
        worker: the thread that lists and deletes them.
        stale: tells which entries these are.
        confirm: computes the stale entries again after the listing; None if they cannot change.

    Raises:
        OSError: the entries cannot be listed; some may have been deleted.
    """
    if not stale:
        return Cleanup(0, 0, complete=True)
    search = _Search(stale)
    try:
        while True:
            found, took = await worker.do_slowly(measured(search.chunk()))
            search.seconds += took
            if not found:
                break
            if confirm is not None:
                fresh = await confirm()
                found = [payload for payload in found if fresh.contains(*entry_keys(payload))]
            await worker.do(search.delete, found)
    except OSError:
        try:
            usage()
        except SysctlError:  # this kernel tracks no connections: in ebpf mode it need not
            return Cleanup(0, 0, complete=True)
        raise
    finally:
        search.close()  # the thread has ended what it did; a call of it could be cancelled, too
    return Cleanup(search.deleted, search.failed, search.complete, search.seconds)


def delete_now(stale: Stale) -> None:
    """Delete the stale entries of a family, as far as the kernel lets them go. It blocks.

    Raises:
        OSError: the entries cannot be listed; some may have been deleted.
    """
    with closing(_Search(stale)) as search:
        while found := finish(search.chunk()):
            search.delete(found)


def find_stale(stale: Stale, most: int = 20) -> list[tuple[bytes, bytes]]:
    """Return destination and source of the first stale entries, packed; delete none. It blocks.

    Raises:
        OSError: the entries cannot be listed.
    """
    if not stale:
        return []
    with closing(_Search(stale)) as search:
        return [entry_keys(payload) for payload in finish(search.chunk())[:most]]


class _Search:
    """The stale entries of a family, a chunk at a time. Its methods block.

    A node port is only at addresses of this node: a connection to the same port of another host
    is foreign.
    """

    def __init__(self, stale: Stale) -> None:
        self.deleted = self.failed = 0
        self.complete = True
        self.seconds = 0.0
        """CPU time of the thread."""
        self._sockets = ExitStack()
        self._found = self._find(stale)

    def chunk(self) -> Generator[None, None, list[bytes]]:
        """Return the payloads of the next stale entries, in steps; [] at the end."""
        chunk: list[bytes] = []
        for found in self._found:
            chunk += found
            if len(chunk) >= _CHUNK:
                break
            yield
        return chunk

    def delete(self, payloads: list[bytes]) -> None:
        """Delete entries, and count them."""
        began = time.thread_time()
        with Netlink(NETLINK_NETFILTER) as netlink:
            deleted, failed = delete_entries(netlink, payloads)
        self.deleted, self.failed = self.deleted + deleted, self.failed + failed
        self.seconds += time.thread_time() - began

    def close(self) -> None:
        """Close the sockets."""
        self._sockets.close()

    def _find(self, stale: Stale) -> Iterator[list[bytes]]:
        """Yield the stale ones of each `_STEP` entries."""
        listing, routes = (
            self._sockets.enter_context(Netlink(protocol))
            for protocol in (NETLINK_NETFILTER, NETLINK_ROUTE)
        )
        found: list[bytes] = []

        @cache
        def is_local(address: bytes) -> bool:
            try:
                return all(map(is_local_route, routes.request(get_route(address))))
            except NetlinkError:  # no route
                return False

        for key in listed_keys(stale.family, [*stale.by_address, *stale.by_node_port]):
            try:
                for number, reply in enumerate(listing.dump(list_request(stale.family, key))):
                    if number % _STEP == _STEP - 1:
                        yield found
                        found = []
                    destination, source = entry_keys(reply.payload)
                    if stale.contains(destination, source) and (
                        destination in stale.by_address or is_local(destination[1:-2])
                    ):
                        found.append(reply.payload)
            except DumpInterruptedError:  # the entries seen are enough for now (behaviour 12)
                self.complete = False
        yield found


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
