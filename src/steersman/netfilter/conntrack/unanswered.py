"""Conntrack entries that endpoints have not answered: see them, and delete them.

A connection attempt to a silent endpoint is an entry in state SYN_SENT that has seen no reply. The
kernel sends only unanswered entries (CTA_STATUS_MASK, Linux 5.15), but walks over its whole table
for that: 60 ms of CPU time with 100,000 entries. So the pauses between two listings grow with their
cost, and this is the second choice, behind packets that are logged (failure_log.py).

The age of an attempt needs no memory. An entry begins with nf_conntrack_tcp_timeout_syn_sent
seconds. Since 6.3 retransmitted SYNs do not renew that; before, the age is that of the last SYN,
and a client without an answer for two seconds has sent one before. Old entries say nothing, as they
outlive clients that gave up and endpoints that came back.

Refused connections are not seen: the kernel deletes their entry at once. It would tell in a DESTROY
event, but builds one for each connection that ends: 5 us of CPU time, and 5 % more time to connect.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable
from ipaddress import ip_address

from steersman.failover.watch import Failure, FailureWatch
from steersman.host.netlink import (
    NETLINK_NETFILTER,
    AnswersLostError,
    DumpInterruptedError,
    Netlink,
)
from steersman.host.nlmsg import Request, attributes, be32, iter_attributes
from steersman.host.process import NEEDS_NET_ADMIN
from steersman.host.sysctl import SysctlError, read
from steersman.host.worker import KernelWorker, Pause, measured
from steersman.model.conntrack import Cleanup, pack_socket
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Observation
from steersman.model.names import Family, Protocol
from steersman.model.plan import ServicePlan
from steersman.netfilter.conntrack.flows import parse_entry
from steersman.netfilter.conntrack.stale import delete_entries
from steersman.netfilter.conntrack.wire import (
    AF_NUMBERS,
    CT_GET,
    CTA_STATUS,
    CTA_STATUS_MASK,
    CTA_TIMEOUT,
    LAYOUTS,
    SEEN_REPLY,
    Layout,
    entry_keys,
)

_DST_NAT = 1 << 5  # IPS_DST_NAT
_FIRST_SECONDS = "proc/sys/net/netfilter/nf_conntrack_tcp_timeout_syn_sent"
"""How long an entry lasts from its SYN on, if no answer comes."""
_SHORTEST, _LONGEST = 1.0, 5.0  # seconds between two listings
_SHARE = 0.018  # of a core that listings may take; with all around them less than 0.02
_MOST = 20_000  # entries that are read of one listing: a SYN scan leaves any number
_MOST_OF_ONE = 8  # attempts that are reported of one endpoint
_STEP = 1000  # entries that are looked at in one step; about 2 ms
_LISTINGS = 5  # attempts at a complete list, while the table changes
_LAYOUT_OF: dict[int, Layout] = {AF_NUMBERS[family]: layout for family, layout in LAYOUTS.items()}


class ConntrackWatch(FailureWatch):
    """Silent endpoints in the network namespace of the thread that makes it."""

    def __init__(self, worker: KernelWorker, *, translated: bool = True) -> None:
        """Check that the kernel can list unanswered entries.

        Args:
            worker: that thread.
            translated: whether the kernel marks connections to Services as translated (DNAT).
                IPVS does not: then attempts to connect to other programs are listed, too.

        Raises:
            BusyError: it cannot; the message says why.
        """
        self._worker = worker
        marked = _DST_NAT if translated else 0
        self._listing = _listing(marked, marked | SEEN_REPLY)
        self._pause = _SHORTEST
        try:
            read(_FIRST_SECONDS)
            with Netlink(NETLINK_NETFILTER, timeout=10.0) as netlink:
                # The kernel refuses an empty mask, if it knows masks.
                next(netlink.dump(_listing(0, 0)), None)
        except SysctlError as error:
            raise BusyError(f"conntrack is not in use ({error})") from error
        except OSError as error:
            if error.errno != errno.EINVAL:
                why = NEEDS_NET_ADMIN if error.errno == errno.EPERM else f"fails: {error.strerror}"
                raise BusyError(f"listing conntrack entries {why}") from error
        else:
            raise BusyError("listing unanswered conntrack entries needs Linux 5.15")

    async def receive(self) -> list[Failure]:
        """Wait until some endpoint has not answered for a second."""
        return await self._worker.do_slowly(self._look())

    async def cut(self, backends: Collection[Backend]) -> int:
        """Delete conntrack entries that endpoints have not answered."""
        return await self._worker.do_slowly(delete_unanswered(backends))

    async def aclose(self) -> None:
        """Do nothing: the kernel has nothing of ours."""

    def _look(self) -> Generator[Pause | None, None, list[Failure]]:
        """List until some endpoint is silent; a pause depends on what a listing takes."""
        while True:
            yield Pause(until=time.monotonic() + self._pause)
            found, took = yield from measured(self._list())
            self._pause = min(max(_SHORTEST, took / _SHARE), _LONGEST)
            if found:
                return found

    def _list(self) -> Generator[None, None, list[Failure]]:
        """Return the silent endpoints."""
        first = read(_FIRST_SECONDS)
        # The kernel cuts off fractions: 118 of 120 seconds are left after 1 to 2 s.
        ages = range(first - 2 - round(self._pause), first - 1)
        found: list[Failure] = []
        known: Counter[bytes] = Counter()
        # A socket for each listing: so one that is given up leaves nothing to be read.
        with Netlink(NETLINK_NETFILTER, buffer=1 << 20, timeout=10.0) as netlink:
            try:
                for number, reply in enumerate(netlink.dump(self._listing)):
                    if number >= _MOST:
                        break
                    if number % _STEP == _STEP - 1:
                        yield
                    if failure := _silent(reply.payload, ages, known):
                        found.append(failure)
            except (DumpInterruptedError, AnswersLostError):
                pass  # others will be seen the next time
        return found


def _silent(payload: bytes, ages: range, known: Counter[bytes]) -> Failure | None:
    """Return the endpoint if an entry shows that it is silent.

    Args:
        payload: the entry.
        ages: seconds that may be left of its time.
        known: numbers of entries of each endpoint; counted on.
    """
    layout = _LAYOUT_OF.get(payload[0])
    if layout is None:
        return None
    # Most entries are too old. Their age is behind the two tuples, and costs a tenth of the rest.
    for kind, value in iter_attributes(payload, 2 * layout.reply_at - 4):
        if kind == CTA_TIMEOUT:
            if int.from_bytes(value, "big") not in ages:
                return None
            break
    _, endpoint = entry_keys(payload, layout)
    known[endpoint] += 1
    if known[endpoint] > _MOST_OF_ONE:
        return None
    entry = parse_entry(payload)
    if entry is None or entry.answered or entry.state != "SYN_SENT":
        return None
    backend = Backend(entry.endpoint, entry.endpoint_port, entry.protocol)
    return Failure(backend, Observation.SILENT, entry.client)


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
    wanted = {
        bytes((each.protocol.number,)) + ip_address(each.ip).packed + each.port.to_bytes(2, "big")
        for each in backends
    }

    def is_wanted(payload: bytes) -> bool:
        destination, source = entry_keys(payload, _LAYOUT_OF[payload[0]])
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
    layout = LAYOUTS[family]

    def is_wanted(payload: bytes) -> bool:
        destination, source = entry_keys(payload, layout)
        return destination[1:] == source and destination in wanted

    listing = _listing(0, SEEN_REPLY | _DST_NAT, AF_NUMBERS[family])
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
                    if is_wanted(reply.payload) and not _answered(reply.payload):
                        found.append(reply.payload)
                complete = True
            except DumpInterruptedError:  # some may be missing: list again
                complete = False
            gone, kept = delete_entries(deleting, found)
            deleted, failed = deleted + gone, failed + kept
            if complete:
                break
    return Cleanup(deleted, failed, complete)


def _answered(payload: bytes) -> bool:
    status = attributes(payload, 4).get(CTA_STATUS, b"")
    return bool(int.from_bytes(status, "big") & SEEN_REPLY)
