"""What may be set about the ipvs mode; imports nothing that only Linux has."""

from __future__ import annotations

import msgspec


class IpvsOptions(msgspec.Struct, frozen=True):
    """What may be set about this mode."""

    scheduler: str = "rr"
    scheduler_flags: tuple[str, ...] = ()
    """As ipvsadm has them, each for its scheduler; () for the usual ones, `none` for none."""
    exclude_cidrs: tuple[str, ...] = ()
    """Canonical CIDRs; virtual servers in them are somebody else's."""
    strict_arp: bool = False
    """Do not answer ARP for addresses of Services on other interfaces."""
    tcp_timeout: int = 0
    """Seconds that idle connections live; 0 leaves the kernel's value, here and below."""
    tcp_fin_timeout: int = 0
    udp_timeout: int = 0
    iptables_variant: str = ""
    load_modules: bool = True
    """Whether `probe` may load ip_vs where it is not there."""
