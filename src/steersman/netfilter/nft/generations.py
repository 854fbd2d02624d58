"""Cheap signs that another program changed the rules, without reading and parsing all of them.

iptables-nft and nft: the kernel numbers the generations of its nf_tables rules. Each transaction
of any program starts a new one, and iptables-nft-restore makes at most one for each COMMIT of its
input. If a run of ours advances the number further, another program wrote during it. One case is
invisible: another program's transaction during a run of ours that had nothing to change in one
table. So every twentieth token asks for a comparison anyway.

The kernel also announces each generation to NFNLGRP_NFTABLES, with the process that made it
(NFTA_GEN_PROC_NAME, NFTA_GEN_PROC_PID: Linux 4.14). That names the program to blame.

iptables-legacy has no such number. There, compare digests of all rules.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from steersman.host.netlink import (
    NETLINK_NETFILTER,
    AnswersLostError,
    BpfInstruction,
    Netlink,
    Subscription,
)
from steersman.host.nlmsg import (
    Message,
    attributes,
    string,
)
from steersman.host.worker import Changes
from steersman.model.drift import Writer
from steersman.netfilter.nft.wire import ALL, GETGEN, HEAD, SUBSYSTEM, request, table_of
from steersman.netfilter.nft.wire import NEWGEN as _NEWGEN

Token: TypeAlias = tuple[int, int]

NEWGEN = SUBSYSTEM | _NEWGEN
"""The kind of message that announces a generation."""
_GROUP = 7  # NFNLGRP_NFTABLES
_GEN_ID, _GEN_PID, _GEN_NAME = 1, 2, 3  # NFTA_GEN_*
_TRUSTED = 20
"""Tokens after which everything is compared although no foreign transaction was seen."""
_REMEMBERED = 256  # transactions


def generation(netlink: Netlink) -> int:
    """Return the generation of the nf_tables rules in a socket's network namespace.

    Args:
        netlink: a socket of NETLINK_NETFILTER.

    Raises:
        OSError: the kernel has no nf_tables, or refuses.
    """
    (reply,) = netlink.request(request(GETGEN, ALL))
    return int.from_bytes(attributes(reply.payload, HEAD.size)[_GEN_ID], "big")


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


def writer_of(message: Message, now: float, proc: Path = Path("/proc")) -> Writer:
    """Return the process that made a generation, of its announcement (NEWGEN).

    Its parent tells more than iptables-restore does, but it can be asked for only as long as both
    run, and only if this process sees them under the same numbers.
    """
    found = attributes(message.payload, HEAD.size)
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
    """The programs that changed rules lately."""

    def __init__(
        self,
        subscribe: Callable[[], Subscription] = subscribe_generations,
        wall: Callable[[], float] = time.time,
        table: str = "",
    ) -> None:
        """Start without a socket; see `follow`.

        Args:
            subscribe: opens the socket.
            wall: seconds since 1970.
            table: note only transactions that change a table of this name, which the socket has to
                announce, too; "" for all.
        """
        self._subscribe = subscribe
        self._wall = wall
        self._table = table
        self._news: Subscription | None = None
        self._concerned = False
        """The transaction that is being announced has changed the table."""
        self._heard = False
        self._entries: deque[tuple[int, Writer]] = deque(maxlen=_REMEMBERED)
        """The port of the socket that made a transaction, and the process."""

    def follow(self) -> Changes:
        """Note every transaction as it is announced, until `close`; its judge never says yes.

        Raises:
            OSError: the socket cannot be opened.
        """
        if self._news is None:
            self._news = self._subscribe()
            self._concerned = False
        return Changes(self._news.fileno(), self._is_reason_to_compare)

    def close(self) -> None:
        """Close the socket."""
        if self._news is not None:
            self._news.close()
            self._news = None

    def _is_reason_to_compare(self) -> bool:
        self._drain()
        return False

    def hear(self) -> bool:
        """Return whether there were transactions since the last call, or announcements lost."""
        self._drain()
        heard, self._heard = self._heard, False
        return heard

    def forget(self, pid: int) -> None:
        """Forget the transactions of a program that we ran, by its process ID here."""
        self._drain()
        kept = [each for each in self._entries if each[0] != pid]
        self._entries.clear()
        self._entries.extend(kept)

    def take(self) -> tuple[Writer, ...]:
        """Return the programs that wrote since the last call, each once, the oldest first."""
        self._drain()
        # A restore makes several transactions: its last one counts.
        writers = {(writer.program, writer.pid): writer for _, writer in self._entries}
        self._entries.clear()
        return tuple(writers.values())

    def _drain(self) -> None:
        if self._news is None:
            return
        try:
            messages = self._news.waiting()
        except AnswersLostError:  # some writers stay unknown
            self._heard = True
            return
        # A transaction is announced by its changes, then by the process that made it.
        for message in messages:
            if message.kind != NEWGEN:
                self._concerned = self._concerned or table_of(message.payload) == self._table
            elif self._concerned or not self._table:
                self._concerned = False
                self._heard = True
                self._entries.append((message.port, writer_of(message, self._wall())))
