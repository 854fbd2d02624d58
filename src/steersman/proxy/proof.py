"""Proof that the process at the other end of a Unix socket may share our listening sockets.

Its user must be ours, and if this process has CAP_NET_ADMIN, the other one must have it, too. To
find out, each side sends a fresh socket, the other one sets SO_DEBUG on it (harmless, and reserved
for CAP_NET_ADMIN in the host's user namespace: socket(7)), and the owner looks whether it is set.
So the kernel itself checks the capability, at that moment: nobody gains anything from a process id
that is used again, or from being root in a user namespace of its own.
"""

from __future__ import annotations

import os
import socket
import struct

_PEER = struct.Struct("iII")  # struct ucred: process, user, group
_CHALLENGE, _DONE = b"set SO_DEBUG", b"done"


def trusts(sock: socket.socket) -> bool:
    """Whether the other end proves itself; it must call this at the same time.

    Raises:
        OSError: it does not answer in time, or is gone.
    """
    if not _same_user(sock):
        return False
    with _fresh() as probe, _fresh() as ours:
        socket.send_fds(sock, [_CHALLENGE], [ours.fileno()])
        message, descriptors, *_ = socket.recv_fds(sock, len(_CHALLENGE) + 1, 1)
        for descriptor in descriptors:
            with socket.socket(fileno=descriptor) as theirs:
                _mark(theirs)
        if message != _CHALLENGE:
            return False
        sock.send(_DONE)
        if sock.recv(len(_DONE) + 1) != _DONE:
            return False
        return not _mark(probe) or bool(ours.getsockopt(socket.SOL_SOCKET, socket.SO_DEBUG))


def _fresh() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def _mark(sock: socket.socket) -> bool:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_DEBUG, 1)
    except OSError:
        return False
    return True


def _same_user(sock: socket.socket) -> bool:
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(data)[1]) == os.geteuid()
