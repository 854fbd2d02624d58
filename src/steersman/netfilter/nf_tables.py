"""Tables and chains of nf_tables over netlink: leftovers of a mode, and tables with an owner.

This works if neither iptables nor nft is installed.

A table with an owner (NFT_TABLE_F_OWNER, Linux 5.12) belongs to a netlink socket. Only that socket
can change or delete it, and it disappears when the socket closes. A network namespace has at most
one table of a name, and creating one takes CAP_NET_ADMIN: so it also serves as a lock.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import TypeAlias

from steersman.host.netlink import (
    NETLINK_NETFILTER,
    AnswersLostError,
    BpfInstruction,
    DumpInterruptedError,
    Netlink,
    NetlinkError,
    Subscription,
)
from steersman.host.nlmsg import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Message,
    Request,
    attr,
    attributes,
    be32,
    string,
    text,
)
from steersman.host.process import NEEDS_NET_ADMIN
from steersman.model.drift import Writer
from steersman.model.names import Family

# -- Tables ----------------------------------------------------------------------------------------

_SUBSYSTEM = 10 << 8  # NFNL_SUBSYS_NFTABLES
_NEWTABLE, _GETTABLE, _DELTABLE, _GETCHAIN = 0, 1, 2, 4
_BATCH_BEGIN, _BATCH_END = 16, 17
_TABLE_NAME, _TABLE_FLAGS, _TABLE_USERDATA = 1, 2, 6  # NFTA_TABLE_*
_CHAIN_TABLE, _CHAIN_NAME = 1, 3  # NFTA_CHAIN_*
_OWNER = 2  # NFT_TABLE_F_OWNER
_HEAD = struct.Struct("=BB2s")  # struct nfgenmsg
_INET = 1  # NFPROTO_INET
_NUMBER = {Family.IPV4: 2, Family.IPV6: 10}
_LISTS = 6
"""Lists that are read at most, if all of them are disturbed."""
_UNSUPPORTED = (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT)
"""Errors of a kernel without nf_tables."""


# Leftovers


def chains_left(ours: Callable[[str, str], bool], families: Iterable[Family]) -> str:
    """Return a sentence about chains of iptables-nft that are left, or "".

    Args:
        ours: whether a chain, given by its table and name, is meant.
        families: where to look.
    """

    def name(found: dict[int, bytes]) -> str:
        table, chain = string(found.get(_CHAIN_TABLE, b"")), string(found.get(_CHAIN_NAME, b""))
        return chain if ours(table, chain) else ""

    return _left("chains", _GETCHAIN, name, families)


def any_chain(chains: Iterable[tuple[str, str]], families: Iterable[Family]) -> bool:
    """Return whether one of some chains of iptables-nft exists, or may exist; lists nothing.

    Args:
        chains: table and name of each.
        families: where to look.
    """
    try:
        with Netlink(NETLINK_NETFILTER, buffer=1 << 16) as netlink:
            for family, (table, chain) in product(families, chains):
                names = text(_CHAIN_TABLE, table) + text(_CHAIN_NAME, chain)
                head = _HEAD.pack(_NUMBER[family], 0, b"\0\0")
                try:
                    netlink.request(Request(_SUBSYSTEM | _GETCHAIN, head + names))
                except NetlinkError as error:
                    if error.errno in _UNSUPPORTED:  # ENOENT: there is no such chain or table
                        continue
                return True
    except OSError:
        return True
    return False


def table_left(wanted: str, families: Iterable[Family]) -> str:
    """Return a sentence about a table of nftables that is left, or ""."""

    def name(found: dict[int, bytes]) -> str:
        return wanted if string(found.get(_TABLE_NAME, b"")) == wanted else ""

    return _left("tables", _GETTABLE, name, families)


def _left(
    objects: str, kind: int, name: Callable[[dict[int, bytes]], str], families: Iterable[Family]
) -> str:
    names: list[str] = []
    try:
        with Netlink(NETLINK_NETFILTER, buffer=1 << 20) as netlink:
            for family in families:
                request = Request(_SUBSYSTEM | kind, _HEAD.pack(_NUMBER[family], 0, b"\0\0"))
                names += _some_list(netlink, request, name)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return ""
        if error.errno in (errno.EPERM, errno.EACCES):
            return f"looking for {objects} {NEEDS_NET_ADMIN}"
        return f"{objects} cannot be listed: {error.strerror}"
    found = sorted(names)
    return f"{objects} are left: {len(found)}, such as {found[0]}" if found else ""


def _some_list(
    netlink: Netlink, request: Request, name: Callable[[dict[int, bytes]], str]
) -> list[str]:
    """Return the names in a list; if rules change all the time, in the longest of several."""
    longest: list[str] = []
    for _ in range(_LISTS):
        found: list[str] = []
        try:
            for reply in netlink.dump(request):
                if named := name(attributes(reply.payload, _HEAD.size)):
                    found.append(named)
            return found
        except DumpInterruptedError:
            longest = max(longest, found, key=len)
    return longest


def legacy_left(families: Iterable[Family], proc: Path = Path("/proc")) -> str:
    """Return a sentence about tables of iptables-legacy, whose rules only it can list, or ""."""
    tables: dict[str, None] = {}
    for family in families:
        name = "ip_tables_names" if family is Family.IPV4 else "ip6_tables_names"
        try:
            tables |= dict.fromkeys((proc / "thread-self/net" / name).read_text().split())
        except FileNotFoundError:  # the module is not loaded
            continue
        except PermissionError:
            return f"looking for tables {NEEDS_NET_ADMIN}"
        except OSError as error:
            return f"tables cannot be listed: {error.strerror}"
    return f"rules may be left in the tables {', '.join(sorted(tables))}" if tables else ""


def list_tables() -> list[tuple[str, str]]:
    """Return family and name of the tables whose chains see routed packets; blocks.

    `nft list tables` does the same, but nft 1.0.6 reads every rule of the machine for it.

    Raises:
        OSError: they cannot be listed.
    """
    names = {_INET: "inet", _NUMBER[Family.IPV4]: "ip", _NUMBER[Family.IPV6]: "ip6"}
    found = []
    with Netlink(NETLINK_NETFILTER, buffer=1 << 20) as netlink:
        for reply in netlink.dump(Request(_SUBSYSTEM | _GETTABLE, _HEAD.pack(0, 0, b"\0\0"))):
            name = string(attributes(reply.payload, _HEAD.size).get(_TABLE_NAME, b""))
            if reply.payload[0] in names:
                found.append((names[reply.payload[0]], name))
    return found


# Tables with an owner


class NoTablesError(Exception):
    """Tables with an owner are not available; the message says why."""


class OwnedTables:
    """Tables of nf_tables that belong to a netlink socket of this process."""

    def __init__(self) -> None:
        """Open the socket.

        Raises:
            NoTablesError: it cannot be opened.
        """
        try:
            self._netlink = Netlink(NETLINK_NETFILTER, buffer=1 << 16, timeout=5.0)
        except OSError as error:
            raise NoTablesError(str(error)) from error

    def make(self, name: str, comment: str) -> bool:
        """Create a table unless it exists; return whether it was created.

        Raises:
            NoTablesError: not permitted, or the kernel has no such tables.
        """
        code = self._change(_new_table(name, comment))
        if code in (errno.EPERM, errno.EEXIST):  # EPERM: it has another owner
            return False
        if code:
            raise NoTablesError(os.strerror(code))
        return True

    def comment(self, name: str) -> str | None:
        """Return the comment of a table; None if it does not exist or has no owner."""
        try:
            (reply,) = self._netlink.request(_request(_GETTABLE, text(_TABLE_NAME, name)))
        except (NetlinkError, ValueError):
            return None
        found = attributes(reply.payload, _HEAD.size)
        if not int.from_bytes(found.get(_TABLE_FLAGS, b""), "big") & _OWNER:
            return None
        return string(found.get(_TABLE_USERDATA, b"")[2:])

    def remove(self, name: str) -> None:
        """Remove a table that we own, or that has no owner."""
        self._change(_request(_DELTABLE, text(_TABLE_NAME, name), flags=NLM_F_ACK))

    def rename(self, name: str, comment: str) -> bool:
        """Give a table that we own another comment; return whether it has it now.

        The kernel cannot change the comment of a table. One transaction removes it and makes it
        again, so there is no moment without it.
        """
        gone = _request(_DELTABLE, text(_TABLE_NAME, name), flags=NLM_F_ACK)
        return not self._change(gone, _new_table(name, comment))

    def close(self) -> None:
        """Close the socket; the kernel then removes our tables."""
        self._netlink.close()

    def _change(self, *requests: Request) -> int:
        """Make a transaction; return the first error of its requests, 0 for none."""
        edge = _HEAD.pack(0, 0, b"\0\x0a")
        batch = [Request(_BATCH_BEGIN, edge), *requests, Request(_BATCH_END, edge)]
        try:
            refused = self._netlink.batch(batch)
        except OSError as error:
            raise NoTablesError(str(error)) from error
        if 0 in refused:
            raise NoTablesError(os.strerror(refused[0].errno or errno.EIO))
        return next((error.errno or errno.EIO for error in refused.values()), 0)


def _new_table(name: str, comment: str) -> Request:
    data = comment.encode() + b"\0"
    userdata = attr(_TABLE_USERDATA, bytes((0, len(data))) + data)
    flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
    owner = be32(_TABLE_FLAGS, _OWNER)
    return _request(_NEWTABLE, text(_TABLE_NAME, name), owner, userdata, flags=flags)


def _request(kind: int, *parts: bytes, flags: int = 0) -> Request:
    head = _HEAD.pack(_INET, 0, b"\0\0")
    return Request(_SUBSYSTEM | kind, head + b"".join(parts), flags)


# -- Generations -----------------------------------------------------------------------------------
#
# Cheap signs that another program changed the rules, without reading and parsing all of them.
#
# iptables-nft and nft: the kernel numbers the generations of its nf_tables rules. Each transaction
# of any program starts a new one, and iptables-nft-restore makes at most one for each COMMIT of its
# input. If a run of ours advances the number further, another program wrote during it. One case is
# invisible: another program's transaction during a run of ours that had nothing to change in one
# table. So every twentieth token asks for a comparison anyway.
#
# The kernel also announces each generation to NFNLGRP_NFTABLES, with the process that made it
# (NFTA_GEN_PROC_NAME, NFTA_GEN_PROC_PID: Linux 4.14). That names the program to blame.
#
# iptables-legacy has no such number. There, compare digests of all rules.

Token: TypeAlias = tuple[int, int]

NEWGEN = (10 << 8) | 15  # NFNL_SUBSYS_NFTABLES, NFT_MSG_NEWGEN
_GETGEN = (10 << 8) | 16
_GROUP = 7  # NFNLGRP_NFTABLES
_GEN_ID, _GEN_PID, _GEN_NAME = 1, 2, 3  # NFTA_GEN_*
_NFGENMSG = 4  # bytes of struct nfgenmsg, before the attributes
_TRUSTED = 20
"""Tokens after which everything is compared although no foreign transaction was seen."""
_REMEMBERED = 256  # transactions
_VOLATILE = re.compile(r"^#.*\n|\[\d+:\d+\]", re.MULTILINE)
"""Comments, which contain the time, and the counters of policies."""


def generation(netlink: Netlink) -> int:
    """Return the generation of the nf_tables rules in a socket's network namespace.

    Args:
        netlink: a socket of NETLINK_NETFILTER.

    Raises:
        OSError: the kernel has no nf_tables, or refuses.
    """
    (reply,) = netlink.request(Request(_GETGEN, bytes(4)))
    return int.from_bytes(attributes(reply.payload, _NFGENMSG)[_GEN_ID], "big")


def read_generation() -> int:
    """Return the generation in this thread's network namespace; see `generation`."""
    with Netlink(NETLINK_NETFILTER, buffer=1 << 16) as netlink:
        return generation(netlink)


class ForeignChanges:
    """Counts the transactions of other programs."""

    def __init__(self, read: Callable[[], int] = read_generation) -> None:
        """Start counting.

        Raises:
            OSError: the generation cannot be read.
        """
        self._read = read
        self._generation = read()
        self._seen = 0
        self._tokens = 0

    def token(self) -> Token:
        """Return a value that differs from the last one if everything is to be compared.

        Raises:
            OSError: the generation cannot be read.
        """
        self._tokens += 1
        return self.check(), self._tokens // _TRUSTED

    def check(self, ours: int = 0) -> int:
        """Note a foreign change if more than `ours` transactions happened since the last check.

        Returns:
            How often foreign changes were noted so far.
        """
        now = self._read()
        self._seen += (now - self._generation) & 0xFFFFFFFF > ours
        self._generation = now
        return self._seen


def digest_rules(texts: Iterable[str]) -> bytes:
    """Return a digest of the output of iptables-save, without times and counters."""
    digest = blake2b(digest_size=16)
    for listing in texts:
        digest.update(_VOLATILE.sub("", listing).encode())
    return digest.digest()


# Who wrote


def writer_of(message: Message, now: float, proc: Path = Path("/proc")) -> Writer:
    """Return the process that made a generation, of its announcement (NEWGEN).

    Its parent tells more than iptables-restore does, but it can be asked for only as long as both
    run, and only if this process sees them under the same numbers.
    """
    found = attributes(message.payload, _NFGENMSG)
    pid = int.from_bytes(found.get(_GEN_PID, b""), "big")
    program = string(found.get(_GEN_NAME, b""))
    parent = ""
    try:
        if _name(proc / str(pid)) == program:
            status = (proc / str(pid) / "status").read_text()
            number = status.partition("\nPPid:")[2].split(maxsplit=1)[0]
            parent = f"{_name(proc / number)}, pid {number}"
    except (OSError, IndexError):  # one of them has ended
        pass
    return Writer(program, pid, parent, now)


def _name(process: Path) -> str:
    return (process / "comm").read_text(errors="replace").rstrip("\n")


def last_writes(writers: Iterable[Writer]) -> tuple[Writer, ...]:
    """Return each program once, with its last write: a restore makes several transactions."""
    return tuple({(each.program, each.pid): each for each in writers}.values())


def subscribe_generations() -> Subscription:
    """Open a socket for announcements of generations, in the calling thread's network namespace."""
    wanted = (
        BpfInstruction(0x28, 0, 0, 4),  # load the half-word at 4: nlmsg_type, as a big-endian one
        BpfInstruction(0x15, 0, 1, socket.htons(NEWGEN)),
        BpfInstruction(0x06, 0, 0, 0xFFFFFFFF),  # keep
        BpfInstruction(0x06, 0, 0, 0),  # drop
    )
    return Subscription(NETLINK_NETFILTER, (_GROUP,), buffer=1 << 18, wanted=wanted)


class WriterLog:
    """The programs that changed rules lately, apart from our own runs of iptables."""

    def __init__(
        self,
        subscribe: Callable[[], Subscription] = subscribe_generations,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Start without a socket; see `follow`.

        Args:
            subscribe: opens the socket.
            wall: seconds since 1970.
        """
        self._subscribe = subscribe
        self._wall = wall
        self._news: Subscription | None = None
        self._entries: deque[tuple[int, Writer]] = deque(maxlen=_REMEMBERED)
        """The port of the socket that made a transaction, and the process."""

    async def follow(self) -> None:
        """Note every transaction as it is announced, until cancelled.

        Raises:
            OSError: the socket cannot be opened, or failed.
        """
        with self._subscribe() as news:
            self._news = news
            try:
                while True:
                    with suppress(AnswersLostError):  # some writers stay unknown
                        self._note(await news.receive())
            finally:
                self._news = None

    def forget(self, pid: int) -> None:
        """Forget the transactions of a program that we ran, by its process ID here."""
        self._drain()
        kept = [each for each in self._entries if each[0] != pid]
        self._entries.clear()
        self._entries.extend(kept)

    def take(self) -> tuple[Writer, ...]:
        """Return the programs that wrote since the last call, each once, the oldest first."""
        self._drain()
        writers = [writer for _, writer in self._entries]
        self._entries.clear()
        return last_writes(writers)

    def _drain(self) -> None:
        if self._news is not None:
            with suppress(AnswersLostError):
                self._note(self._news.waiting())

    def _note(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.kind == NEWGEN:
                self._entries.append((message.port, writer_of(message, self._wall())))
