"""Whether others changed the rules: told without reading and parsing all of them.

iptables-nft: the kernel numbers the generations of its nf_tables rules, each transaction of anybody
makes a new one, and iptables-nft-restore makes at most one for each COMMIT of its input. A run of
ours that moves the number by more was not alone. What this cannot see is somebody else's
transaction in the middle of a run of ours of which one table had nothing to change: so every
twentieth answer asks for a comparison all the same.

iptables-legacy has nothing of the kind: there a digest of all rules says whether they are the same.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable
from typing import TypeAlias

from steersman.host.netlink import NETLINK_NETFILTER, Netlink, Request
from steersman.host.nlmsg import attributes

Token: TypeAlias = tuple[int, int]

_NFT_MSG_GETGEN = (10 << 8) | 16  # NFNL_SUBSYS_NFTABLES, linux/netfilter/nf_tables.h
_NFTA_GEN_ID = 1
_TRUSTED = 20
"""Answers after which everything is to be compared although no stranger was seen."""
_PASSING = re.compile(r"^#.*\n|\[\d+:\d+\]", re.MULTILINE)
"""Comments, which tell the time, and the counters of policies."""


def read_generation() -> int:
    """Return the number of the kernel's nf_tables rules in this network namespace.

    Raises:
        OSError: the kernel has no nf_tables, or does not tell.
    """
    with Netlink(NETLINK_NETFILTER, buffer=1 << 16) as netlink:
        (reply,) = netlink.request(Request(_NFT_MSG_GETGEN, bytes(4)))
    return int(struct.unpack(">I", attributes(reply.payload, 4)[_NFTA_GEN_ID])[0])


class Strangers:
    """Counts transactions of others."""

    def __init__(self, generation: Callable[[], int] = read_generation) -> None:
        """Start counting.

        Raises:
            OSError: the generation cannot be read.
        """
        self._read = generation
        self._generation = generation()
        self._seen = 0
        self._answers = 0

    def token(self) -> Token:
        """Return a value that differs if everything is to be compared.

        Raises:
            OSError: the generation cannot be read.
        """
        self.look()
        self._answers += 1
        return self._seen, self._answers // _TRUSTED

    def look(self, ours: int = 0) -> None:
        """Count a stranger if there were more transactions than `ours` since the last look."""
        now = self._read()
        self._seen += (now - self._generation) & 0xFFFFFFFF > ours
        self._generation = now


def digest(texts: Iterable[str]) -> bytes:
    """Return a digest of what iptables-save printed, without the time and counters."""
    whole = hashlib.blake2b(digest_size=16)
    for text in texts:
        whole.update(_PASSING.sub("", text).encode())
    return whole.digest()
