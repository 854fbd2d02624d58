"""Hold packets of a network namespace on their way out (NFQUEUE), and let them go later.

A packet that waits here has passed the rules of nat, and its conntrack entry is not in the table
yet: the kernel enters it when the packet leaves.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.host.nlmsg import Request, attr, attributes
from tests.support.lab.namespace import sh

_PACKET, _VERDICT, _CONFIG = 0x300, 0x301, 0x302
_CFG_COMMAND, _CFG_PARAMETERS, _HEADER, _VERDICT_HEADER = 1, 2, 1, 2
_BIND, _COPY_META, _ACCEPT = 1, 1, 1
_QUEUE = 7


class HeldPackets:
    """The packets that wait."""

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink

    def wait(self) -> int:
        """Wait until a packet is held; return its number."""
        while True:
            assert select.select([self._netlink], [], [], 60)[0], "no packet is held"
            for message in self._netlink.waiting():
                if message.kind == _PACKET:
                    header = attributes(message.payload, 4)[_HEADER]
                    return int(struct.unpack_from("!I", header)[0])

    def release(self, number: int) -> None:
        """Let a packet go on."""
        verdict = attr(_VERDICT_HEADER, struct.pack("!II", _ACCEPT, number))
        self._netlink.request(Request(_VERDICT, _about_queue() + verdict, 0))


def _about_queue() -> bytes:
    return struct.pack("!BBH", 0, 0, _QUEUE)


@contextmanager
def held_packets(match: str) -> Iterator[HeldPackets]:
    """Hold the packets that match (in iptables' words) in the caller's namespace."""
    rule = f"iptables-nft -t mangle {{}} POSTROUTING {match} -j NFQUEUE --queue-num {_QUEUE}"
    with Netlink(NETLINK_NETFILTER) as netlink:
        for setting in (
            attr(_CFG_COMMAND, struct.pack("!BBH", _BIND, 0, 0)),
            attr(_CFG_PARAMETERS, struct.pack("!IB", 0, _COPY_META)),
        ):
            netlink.request(Request(_CONFIG, _about_queue() + setting, 0))
        sh(rule.format("-A"))
        yield HeldPackets(netlink)
        sh(rule.format("-D"))
