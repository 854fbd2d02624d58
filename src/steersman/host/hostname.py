"""The name of this machine."""

from __future__ import annotations

import socket


def hostname() -> str:
    """Name of this machine as a node name: trimmed and in lower case (behaviour 1.1)."""
    return socket.gethostname().strip().lower()
