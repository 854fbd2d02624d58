"""See connections to real servers fail: by their packets, else by what IPVS counts.

IPVS keeps its own connections beside those of conntrack, but with `vs/conntrack` both exist, and a
retransmitted SYN looks as in the other modes (netfilter/failure_log.py), but for the mark of a
translated connection. Where the kernel cannot log packets that way (before 5.12), the counters of
the real servers tell as much, only later: the kernel updates them every two seconds.

    real server   since the last look: packets to it   from it   bytes of each
    answers                            some            some      differ: a SYN-ACK has options
    refuses                            some            some      20 more than an IP header
    is silent                          some            none

What waits for an ejected endpoint begins again with little help. Its weight is 0, so the kernel
looks for another endpoint at the client's next SYN (`vs/expire_nodest_conn`; with
`vs/conn_reuse_mode` 0 only since 5.16): with this very SYN if conntrack does not know the
connection any more, otherwise with the one that follows it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Generator
from operator import add

from steersman.failover.watch import Failure, FailureWatch
from steersman.host.netlink import NETLINK_GENERIC, DumpInterruptedError, Netlink
from steersman.host.worker import KernelWorker, Pause, finish
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Observation
from steersman.model.names import Protocol
from steersman.model.stats import increase
from steersman.modes.ipvs.counters import STEP
from steersman.modes.ipvs.objects import ServerKey, Target
from steersman.modes.ipvs.wire import ServerStats, list_destinations, list_services, resolve
from steersman.netfilter.conntrack.unanswered import delete_unanswered
from steersman.netfilter.failure_log import FailureLog

log = logging.getLogger(__name__)

_INTERVAL = 1.0  # seconds between two looks at the counters
_RST = {False: 40, True: 60}
"""Bytes of a reset without options, over IPv4 and over IPv6."""
_ZERO = ServerStats(0, 0, 0, 0, 0)


def watch_servers(worker: KernelWorker) -> FailureWatch:
    """Return the best watch that this kernel offers.

    Args:
        worker: this thread, which reads packets or counters.

    Raises:
        BusyError: none can be had; the message says why.
    """
    try:
        return FailureLog(worker, translated=False)
    except BusyError as error:
        log.warning("%s; reading the counters of real servers instead", error)
        return CounterWatch(worker)


class CounterWatch(FailureWatch):
    """Failures of TCP connections, told from the counters of real servers."""

    def __init__(self, worker: KernelWorker) -> None:
        """Open a socket.

        Args:
            worker: this thread, which reads counters.

        Raises:
            BusyError: the kernel does not answer.
        """
        self._worker = worker
        self._servers: dict[ServerKey, ServerStats] = {}
        """The counters of virtual servers at the last look."""
        self._reals: dict[ServerKey, dict[Target, ServerStats]] = {}
        """The counters of their real servers."""
        self._looked = False
        try:
            self._netlink = Netlink(NETLINK_GENERIC, buffer=1 << 20)
        except OSError as error:
            raise BusyError(f"no netlink socket for ip_vs: {error.strerror}") from error
        try:
            self._family = resolve(self._netlink)
        except OSError as error:
            self._netlink.close()
            raise BusyError(f"the counters of IPVS cannot be read: {error}") from error

    async def receive(self) -> list[Failure]:
        """Look at the counters until they show a failure."""
        return await self._worker.do_slowly(self._looks())

    def _looks(self) -> Generator[Pause | None, None, list[Failure]]:
        if not self._looked:  # what happened before says nothing
            yield from self._look()
            self._looked = True
        while True:
            yield Pause(until=time.monotonic() + _INTERVAL)
            if found := (yield from self._look()):
                return found

    async def cut(self, backends: Collection[Backend]) -> int:
        """Delete conntrack entries that endpoints have not answered."""
        return await self._worker.do(lambda: finish(delete_unanswered(backends)))

    async def aclose(self) -> None:
        """Close the socket."""
        await self._worker.do(self._netlink.close)

    def _look(self) -> Generator[None, None, list[Failure]]:
        """Read the counters; return what failed since the last time."""
        increases: defaultdict[Backend, ServerStats] = defaultdict(lambda: _ZERO)
        servers: dict[ServerKey, ServerStats] = {}
        try:
            for number, listed in enumerate(list_services(self._netlink, self._family)):
                if number % STEP == 0:
                    yield
                key = listed.key
                if key.protocol is not Protocol.TCP:
                    continue
                servers[key] = listed.stats
                # If a virtual server has counted nothing since, none of its real servers has.
                if listed.stats == self._servers.get(key, _ZERO):
                    continue
                known = self._reals.get(key, {})
                now = dict(list_destinations(self._netlink, self._family, key))
                self._reals[key] = now
                for target, stats in now.items():
                    backend = Backend(*target, Protocol.TCP)
                    more = increase(known.get(target, _ZERO), stats)
                    increases[backend] = ServerStats(*map(add, increases[backend], more))
        except DumpInterruptedError:  # servers come and go; the next look is soon
            return []
        self._servers = servers
        self._reals = {key: reals for key, reals in self._reals.items() if key in servers}
        judged = {backend: judge(backend, more) for backend, more in increases.items()}
        return [Failure(backend, found) for backend, found in judged.items() if found is not None]


def judge(backend: Backend, more: ServerStats) -> Observation | None:
    """Return what happened to the connections of a real server; None if some were answered.

    Args:
        backend: the real server.
        more: what it has counted since the last look.
    """
    if not more.packets_out:
        return Observation.SILENT if more.packets_in else None
    resets = more.packets_out * _RST[":" in backend.ip] == more.bytes_out
    return Observation.REFUSED if resets and more.packets_out <= more.connections else None
