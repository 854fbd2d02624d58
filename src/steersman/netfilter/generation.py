"""Cheap signs that another program changed the rules, without reading and parsing all of them.

iptables-nft and nft: the kernel numbers the generations of its nf_tables rules. Each transaction of
any program starts a new one, and iptables-nft-restore makes at most one for each COMMIT of its
input. If a run of ours advances the number further, another program wrote during it. One case is
invisible: another program's transaction during a run of ours that had nothing to change in one
table. So every twentieth token asks for a comparison anyway.

iptables-legacy has no such number. There, compare digests of all rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeAlias

from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.host.nlmsg import Request, attributes

Token: TypeAlias = tuple[int, int]

_GETGEN = (10 << 8) | 16  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETGEN
_GEN_ID = 1  # NFTA_GEN_ID
_TRUSTED = 20
"""Tokens after which everything is compared although no foreign transaction was seen."""
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
    return int.from_bytes(attributes(reply.payload, 4)[_GEN_ID], "big")


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
        self.check()
        self._tokens += 1
        return self._seen, self._tokens // _TRUSTED

    def check(self, ours: int = 0) -> None:
        """Note a foreign change if more than `ours` transactions happened since the last check."""
        now = self._read()
        self._seen += (now - self._generation) & 0xFFFFFFFF > ours
        self._generation = now


def digest_rules(texts: Iterable[str]) -> bytes:
    """Return a digest of the output of iptables-save, without times and counters."""
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(_VOLATILE.sub("", text).encode())
    return digest.digest()
