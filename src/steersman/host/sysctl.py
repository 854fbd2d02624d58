"""Kernel settings under /proc/sys: what is wanted as tables, and the writing of what differs.

Why each is set is in docs/behaviour.md, 1.6; nothing here is written unless it has another value.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

_CONNTRACK = "proc/sys/net/netfilter/nf_conntrack_"
_HASHSIZE = "sys/module/nf_conntrack/parameters/hashsize"
_MOST_ENTRIES = 1 << 20
_ENTRIES_PER_BUCKET = 4


class Setting(NamedTuple):
    """One value wanted in one file."""

    path: str
    """Below the root of the file system."""
    value: int
    at_least: bool = False
    """A larger value is left alone."""
    read_only_is_fatal: bool = True
    """Otherwise a read-only file system (some container runtimes' /sys) is only a warning."""


class SysctlError(OSError):
    """A setting cannot be read or written; `strerror` is a sentence."""

    def __str__(self) -> str:
        return self.strerror or ""


class ConntrackConfig(msgspec.Struct, frozen=True):
    """The `conntrack` block of the configuration; None and 0 leave the kernel's value alone."""

    max_per_core: int | None = None
    min: int | None = None
    tcp_established_timeout: float | None = None
    """Timeouts are in seconds; parts of a second are cut off."""
    tcp_close_wait_timeout: float | None = None
    tcp_be_liberal: bool = False
    udp_timeout: float | None = None
    udp_stream_timeout: float | None = None


def conntrack_max(max_per_core: int | None, minimum: int | None, cpus: int) -> int:
    """Return the size wanted for the conntrack table; 0 to leave it alone (behaviour 1.6).

    2**20 is the most that is asked for by way of cores, and then `minimum` no longer counts.
    """
    scaled = (max_per_core or 0) * cpus
    if scaled <= 0:
        return 0
    return _MOST_ENTRIES if scaled > _MOST_ENTRIES else max(scaled, minimum or 0)


def conntrack_settings(config: ConntrackConfig, cpus: int) -> tuple[Setting, ...]:
    """Return what the conntrack block asks for, in upstream's order."""
    size = conntrack_max(config.max_per_core, config.min, cpus)
    buckets = size // _ENTRIES_PER_BUCKET
    return (
        *((Setting(f"{_CONNTRACK}max", size),) if size else ()),
        *((Setting(_HASHSIZE, buckets, True, False),) if size else ()),
        *_seconds("tcp_timeout_established", config.tcp_established_timeout),
        *_seconds("tcp_timeout_close_wait", config.tcp_close_wait_timeout),
        *((Setting(f"{_CONNTRACK}tcp_be_liberal", 1),) if config.tcp_be_liberal else ()),
        *_seconds("udp_timeout", config.udp_timeout),
        *_seconds("udp_timeout_stream", config.udp_stream_timeout),
    )


def _seconds(name: str, seconds: float | None) -> tuple[Setting, ...]:
    return (Setting(_CONNTRACK + name, int(seconds)),) if seconds and seconds > 0 else ()


def iptables_settings(localhost_node_ports: bool) -> tuple[Setting, ...]:
    """Return what the iptables mode needs: node ports on 127.0.0.0/8 are routed at all."""
    path = "proc/sys/net/ipv4/conf/all/route_localnet"
    return (Setting(path, 1),) if localhost_node_ports else ()


def ipvs_settings(kernel: tuple[int, int], strict_arp: bool) -> tuple[Setting, ...]:
    """Return what the ipvs mode needs on a kernel of this version (major, minor).

    `conn_reuse_mode` does harm from 4.1 on, until 5.9 mended it; before 4.1 it is not there.
    """
    vs, everywhere = "proc/sys/net/ipv4/vs/", "proc/sys/net/ipv4/conf/all/"
    reuse = (4, 1) <= kernel < (5, 9)
    return (
        Setting(f"{vs}conntrack", 1),
        *((Setting(f"{vs}conn_reuse_mode", 0),) if reuse else ()),
        Setting(f"{vs}expire_nodest_conn", 1),
        Setting(f"{vs}expire_quiescent_template", 1),
        Setting("proc/sys/net/ipv4/ip_forward", 1),
        *((Setting(f"{everywhere}arp_ignore", 1),) if strict_arp else ()),
        *((Setting(f"{everywhere}arp_announce", 2),) if strict_arp else ()),
    )


def read(path: str, root: Path = Path("/")) -> int:
    """Read a setting.

    Raises:
        SysctlError: it is not there (a module may be missing), or not a number.
    """
    try:
        return int((root / path).read_text().split()[0])
    except (OSError, ValueError, IndexError) as error:
        code = getattr(error, "errno", None) or errno.EINVAL
        why = getattr(error, "strerror", None) or error
        hint = "; this needs root" if isinstance(error, PermissionError) else ""
        raise SysctlError(code, f"/{path} cannot be read: {why}{hint}") from error


def differing(settings: Iterable[Setting], root: Path = Path("/")) -> tuple[Setting, ...]:
    """Return those settings whose value is another one now."""
    return tuple(s for s in settings if not _satisfied(s, read(s.path, root)))


def _satisfied(setting: Setting, value: int) -> bool:
    return value == setting.value or (setting.at_least and value > setting.value)


def apply(settings: Iterable[Setting], root: Path = Path("/")) -> tuple[str, ...]:
    """Write what differs, in order, and return warnings.

    Raises:
        SysctlError: a setting cannot be read or written; the ones after it are not touched.
    """
    warnings = []
    for setting in settings:
        if _satisfied(setting, read(setting.path, root)):
            continue
        try:
            (root / setting.path).write_text(str(setting.value))
        except OSError as error:
            text = f"/{setting.path} cannot be set to {setting.value}: {error.strerror}"
            if error.errno == errno.EROFS:
                place = "/proc/sys" if setting.path.startswith("proc/") else "/sys"
                text += f"; set it on the host, or mount {place} writable"
            if setting.read_only_is_fatal or error.errno != errno.EROFS:
                raise SysctlError(error.errno, text) from error
            warnings.append(text)
    return tuple(warnings)
