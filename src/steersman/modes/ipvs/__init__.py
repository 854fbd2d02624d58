"""The ipvs mode: the kernel's own load balancer, ipsets and a few iptables rules (README.md)."""

from __future__ import annotations

import os

from steersman.modes.specs import ModeOptions


def may_have_left(options: ModeOptions) -> bool:
    """Return whether the kernel has ip_vs, without which nothing can be read or removed.

    See `registry.may_have_left`.
    """
    del options
    return os.path.exists("/proc/thread-self/net/ip_vs")
