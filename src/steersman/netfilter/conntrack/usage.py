"""How full the table is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from steersman.host.sysctl import read


class Usage(NamedTuple):
    """How full the conntrack table is."""

    entries: int
    maximum: int


def usage(root: Path = Path("/")) -> Usage:
    """Return how full the conntrack table is.

    Raises:
        SysctlError: conntrack is not in use.
    """
    directory = "proc/sys/net/netfilter/nf_conntrack_"
    return Usage(read(f"{directory}count", root), read(f"{directory}max", root))
