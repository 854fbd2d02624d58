"""The TCP and UDP sockets of a network namespace, from /proc/net."""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from steersman.model.addresses import canonical_ip
from steersman.model.names import Protocol

_TABLES = {Protocol.TCP: ("tcp", "tcp6"), Protocol.UDP: ("udp", "udp6")}
_LISTENING = {Protocol.TCP: 0x0A, Protocol.UDP: 0x07}
"""State of a socket that waits for clients: TCP_LISTEN and TCP_CLOSE of linux/tcp_states.h."""
_COLUMNS = 10  # the last one that is read: the inode
SELF = Path("/proc/thread-self")


class Socket(NamedTuple):
    """A socket of a network namespace."""

    inode: int
    protocol: Protocol
    local: tuple[str, int]
    remote: tuple[str, int]
    """The port is 0 if it is not connected."""
    state: int

    @property
    def is_listening(self) -> bool:
        """Whether it waits for clients."""
        return self.state == _LISTENING[self.protocol]


class ListeningSocket(NamedTuple):
    """A socket that clients can connect to, or send datagrams to."""

    protocol: Protocol
    address: str
    """Canonical; "0.0.0.0" or "::" for every address."""
    port: int


def sockets(
    protocols: Collection[Protocol] = tuple(Protocol), proc: Path = SELF
) -> Iterator[Socket]:
    """Yield the sockets of TCP and UDP, as far as they are asked for. Blocks.

    Args:
        protocols: the protocols.
        proc: the folder of a process or thread in the network namespace, or where proc is mounted
            for that of this process.
    """
    for protocol in protocols:
        for table in _TABLES.get(protocol, ()):
            try:
                text = (proc / "net" / table).read_text()
            except FileNotFoundError:  # no IPv6, or another system
                continue
            for line in text.splitlines()[1:]:
                words = line.split()
                if len(words) >= _COLUMNS:
                    local, remote = map(_address, words[1:3])
                    yield Socket(int(words[9]), protocol, local, remote, int(words[3], 16))


def listening_sockets(proc: Path = SELF) -> dict[ListeningSocket, int]:
    """Return the listening TCP and UDP sockets and the inode of each.

    Args:
        proc: see `sockets`.
    """
    # IPv4 clients of a socket at [::] are not told here: bindv6only is not in the table.
    return {
        ListeningSocket(each.protocol, *each.local): each.inode
        for each in sockets(proc=proc)
        if each.is_listening
    }


def _address(text: str) -> tuple[str, int]:
    """Decode `0100007F:0050`: 32-bit words in the byte order of the machine, and the port."""
    address, _, port = text.partition(":")
    data = bytes.fromhex(address)
    if sys.byteorder == "little":
        data = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    printed = socket.inet_ntop(family, data)
    return canonical_ip(printed) or printed, int(port, 16)
