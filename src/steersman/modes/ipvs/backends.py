"""Access to the kernel: virtual servers over netlink, ipsets by the ipset command.

All operations are idempotent: an object that exists is changed to the wanted value, and deleting an
object that does not exist succeeds.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

from steersman.host.exec import RunTool, tool_result
from steersman.host.netlink import Netlink
from steersman.host.nlmsg import Request, u8
from steersman.host.tolerant import TolerantRequest, send
from steersman.model.connections import ConnectionSearch
from steersman.model.errors import ApplyError, BusyError
from steersman.model.hashes import blake2b
from steersman.modes.ipvs.changes import ServerChange, target_changes
from steersman.modes.ipvs.listings import RealServer, parse_connection, parse_servers, parse_sets
from steersman.modes.ipvs.objects import MemberKey, Server, ServerKey, SetKey, Target
from steersman.modes.ipvs.wire import (
    Command,
    destination,
    digest_services,
    get_timeouts,
    list_services,
    service,
)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Turn an error of the kernel into a BusyError that says what cannot be done."""
    try:
        yield
    except OSError as error:
        raise BusyError(f"{what}: {error}") from error


_GONE = (errno.ESRCH, errno.ENOENT)


# Virtual servers

_TABLE = Path("/proc/thread-self/net/ip_vs")
_CONNECTIONS = Path("/proc/thread-self/net/ip_vs_conn")
_LINES_AT_ONCE = 256  # some milliseconds


class VirtualServers:
    """The kernel's virtual servers, over generic netlink.

    A real server that goes gets weight 0 and keeps its connections. The kernel itself is the queue:
    `read` lists real servers of weight 0 without connections, and `end_drained` deletes them.
    """

    def __init__(self, netlink: Netlink, family: int) -> None:
        """Create an accessor.

        Args:
            netlink: a socket of generic netlink, in the network namespace of the calling thread.
            family: the number of the IPVS family.
        """
        self._netlink = netlink
        self._family = family
        self._drained: dict[ServerKey, list[RealServer]] = {}

    def table(self) -> str:
        """Return /proc/net/ip_vs: virtual and real servers with their connections."""
        return _TABLE.read_text()

    def connections(self) -> int:
        """Return the number of established TCP and SCTP connections."""
        reals = parse_servers(self.table()).values()
        return sum(real.active for group in reals for real in group)

    def find_connections(self, search: ConnectionSearch) -> Generator[None, None, None]:
        """Add the connections that a search wants, in steps."""
        limits = get_timeouts(self._netlink, self._family)
        with _CONNECTIONS.open() as lines:
            for number, line in enumerate(lines, 1):
                each = parse_connection(line, limits)
                if each is not None and search.wants(each.destination):
                    search.add(each.found)
                if number % _LINES_AT_ONCE == 0:
                    yield

    def digest(self) -> bytes:
        """Return a digest of all virtual servers, without real servers and counters."""
        return digest_services(self._netlink, self._family)

    def read(self) -> dict[ServerKey, Server]:
        """List all virtual servers, foreign ones included, without real servers of weight 0."""
        # Generic netlink lists the real servers of one virtual server per request, the file all.
        reals = parse_servers(self.table())
        self._drained = {k: [r for r in group if r.is_drained] for k, group in reals.items()}
        found = {}
        for listed in list_services(self._netlink, self._family):
            active = sorted((r.target, r.weight) for r in reals.get(listed.key, ()) if r.weight)
            weights = tuple(weight for _, weight in active)
            found[listed.key] = Server(
                listed.scheduler,
                listed.flags,
                listed.timeout,
                assigned=False,
                targets=tuple(target for target, _ in active),
                weights=weights if set(weights) - {1} else (),
            )
        return found

    def end_drained(self, keys: Iterable[ServerKey]) -> None:
        """Delete real servers that had weight 0 and no connections at the last `read`."""
        drained = [(key, real.target) for key in keys for real in self._drained.pop(key, ())]
        send(self._netlink, [self._removal(*which) for which in drained])

    def write(self, changes: Iterable[ServerChange]) -> None:
        """Make and change virtual servers.

        Raises:
            ApplyError: the kernel rejected one.
            BusyError: see `send`.
        """
        send(self._netlink, chain.from_iterable(map(self._requests, changes)))

    def delete(self, keys: Iterable[ServerKey]) -> None:
        """Delete virtual servers."""
        command = Command.DEL_SERVICE
        pairs = [(key, service(self._family, command, key)) for key in keys]
        send(self._netlink, [TolerantRequest(_name(key), each, _GONE) for key, each in pairs])

    def _requests(self, change: ServerChange) -> Iterator[TolerantRequest]:
        """Yield the requests for a virtual server and its real ones."""
        key, old, new = change
        family, name = self._family, _name(key, f" with the scheduler {new.scheduler}")
        edit = partial(service, family, Command.SET_SERVICE, key, new)
        if old is None:
            make = service(family, Command.NEW_SERVICE, key, new)
            yield TolerantRequest(name, make, change=edit)
        elif old.settings != new.settings:
            yield TolerantRequest(name, edit())
        for verb, target, weight in target_changes(change):
            edit = partial(destination, family, Command.SET_DEST, key, target, weight)
            if verb == "add":  # one that still drains gets its weight back
                make = destination(family, Command.NEW_DEST, key, target, weight)
                yield TolerantRequest(_name(key, " to ", target), make, change=edit)
            elif verb == "delete":
                yield self._removal(key, target)
            else:
                gone = () if weight else (errno.ENOENT,)
                yield TolerantRequest(_name(key, " to ", target), edit(), gone)

    def _removal(self, key: ServerKey, target: Target) -> TolerantRequest:
        request = destination(self._family, Command.DEL_DEST, key, target)
        return TolerantRequest(_name(key, " without ", target), request, _GONE)


def _name(key: ServerKey, more: str = "", target: Target | None = None) -> Callable[[], str]:
    """Return a function that names a virtual server, and a real one; few names are needed."""
    return lambda: (
        f"virtual server {key.protocol} {key.address} port {key.port}{more}"
        + (f"{target[0]}:{target[1]}" if target else "")
    )


# Sets

_IPSET_LIST = (6 << 8) | 7  # NFNL_SUBSYS_IPSET, IPSET_CMD_LIST: linux/netfilter/ipset/ip_set.h
_IPSET_PROTOCOL = 6


class Ipsets:
    """The kernel's ipsets, by the ipset command."""

    def __init__(self, run_tool: RunTool) -> None:
        """Create an accessor; run_tool: runs ipset."""
        self._run_tool = run_tool

    def read(self) -> dict[SetKey | MemberKey, str]:
        """List our sets and their entries.

        Raises:
            BusyError: they cannot be listed.
        """
        result = tool_result(self._run_tool, ["ipset", "save"], package="ipset")
        if result.returncode:
            raise BusyError(f"ipset save: {result.message}")
        return dict(parse_sets(result.stdout.decode(errors="replace")))

    def restore(self, lines: Sequence[str]) -> None:
        """Run `ipset restore`, unless there are no lines.

        Raises:
            ApplyError: a line was rejected.
            BusyError: ipset cannot be run.
        """
        if not lines:
            return
        text = "\n".join([*lines, ""])
        argv = ["ipset", "-exist", "restore"]
        result = tool_result(self._run_tool, argv, text.encode(), package="ipset")
        if result.returncode:
            raise ApplyError(f"ipset restore: {result.message}")


def digest_sets(netlink: Netlink) -> bytes:
    """Return a digest of all ipsets, from a socket of NETLINK_NETFILTER."""
    digest = blake2b(digest_size=16)
    for reply in netlink.dump(Request(_IPSET_LIST, bytes(4) + u8(1, _IPSET_PROTOCOL))):
        digest.update(reply.payload)
    return digest.digest()
