"""Abstract Unix sockets between processes of this program: who is at the other end.

The name of such a socket lives in the network namespace, so containers that share nothing else find
each other. Anyone may bind or connect; the kernel says who did (SO_PEERCRED).
"""

from __future__ import annotations

import os
import socket
import struct

CONTROL = "steersman-control"
"""Name of the socket on which the process answers commands (run/serve/control.py)."""
_PEER = struct.Struct("iII")  # struct ucred: process, user, group


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process at the other end of an abstract socket."""
    pid, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


def is_trusted(user: int) -> bool:
    """Whether a user is root or our own; in another user namespace, root is neither."""
    return user in (0, os.geteuid())
