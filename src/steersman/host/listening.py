"""The listening sockets of this network namespace, from /proc/net."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import NamedTuple

from steersman.model.addresses import canonical_ip
from steersman.model.names import Protocol

_TABLES = (("tcp", Protocol.TCP, "0A"), ("udp", Protocol.UDP, "07"))
"""Table, protocol, and the state of a socket that waits for clients (TCP_LISTEN, TCP_CLOSE)."""
_COLUMNS = 10  # the last one that is read: the inode


class ListeningSocket(NamedTuple):
    """A socket that clients can connect to, or send datagrams to."""

    protocol: Protocol
    address: str
    """Canonical; "0.0.0.0" or "::" for every address."""
    port: int


def listening_sockets(proc: Path = Path("/proc")) -> dict[ListeningSocket, int]:
    """Return the listening TCP and UDP sockets and the inode of each.

    Args:
        proc: where proc is mounted; `/proc/PID` for the network namespace of another process.
    """
    found: dict[ListeningSocket, int] = {}
    for name, protocol, state in _TABLES:
        for table in (name, f"{name}6"):
            try:
                text = (proc / "net" / table).read_text()
            except FileNotFoundError:  # no IPv6, or another system
                continue
            # IPv4 clients of a socket at [::] are not told here: bindv6only is not in the table.
            for line in text.splitlines()[1:]:
                words = line.split()
                if len(words) >= _COLUMNS and words[3] == state:
                    address, _, port = words[1].partition(":")
                    key = ListeningSocket(protocol, _address(address), int(port, 16))
                    found[key] = int(words[9])
    return found


def _address(text: str) -> str:
    """Decode an address: 32-bit words in hexadecimal, each in the byte order of the machine."""
    data = bytes.fromhex(text)
    if sys.byteorder == "little":
        data = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    address = socket.inet_ntop(family, data)
    return canonical_ip(address) or address
