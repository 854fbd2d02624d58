"""Kernel settings under /proc/sys and /sys: tables of wanted values, and writing those that differ.

docs/behaviour.md, 1.6, explains each setting.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

_CONNTRACK = "proc/sys/net/netfilter/nf_conntrack_"
_HASHSIZE = "sys/module/nf_conntrack/parameters/hashsize"
_MAX_ENTRIES = 1 << 20
_ENTRIES_PER_BUCKET = 4


class Setting(NamedTuple):
    """One value wanted in one file."""

    path: str
    """Relative to the root of the file system."""
    value: int
    at_least: bool = False
    """Whether a larger value is left alone."""
    read_only_is_fatal: bool = True
    """If not, a read-only file system (/sys in some container runtimes) is only a warning."""


class SysctlError(OSError):
    """A setting cannot be read or written; `strerror` is a sentence."""

    def __str__(self) -> str:
        return self.strerror or ""


class ConntrackConfig(msgspec.Struct, frozen=True):
    """The `conntrack` block of the configuration; None and 0 leave the kernel's value alone."""

    max_per_core: int | None = None
    min: int | None = None
    tcp_established_timeout: float | None = None
    """Timeouts are in seconds; fractions are cut off."""
    tcp_close_wait_timeout: float | None = None
    tcp_be_liberal: bool = False
    udp_timeout: float | None = None
    udp_stream_timeout: float | None = None


def conntrack_max(max_per_core: int | None, minimum: int | None, cpus: int) -> int:
    """Return the wanted size of the conntrack table; 0 to leave it alone (behaviour 1.6).

    The size by cores is capped at 2**20; above the cap, `minimum` is ignored, as upstream.
    """
    # The same rules as in upstream's getConntrackMax.
    scaled = (max_per_core or 0) * cpus
    if scaled <= 0:
        return 0
    return _MAX_ENTRIES if scaled > _MAX_ENTRIES else max(scaled, minimum or 0)


def conntrack_settings(config: ConntrackConfig, cpus: int) -> tuple[Setting, ...]:
    """Return the settings of the conntrack block, in upstream's order."""
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
    """Return the setting without which the kernel drops node port traffic on 127.0.0.0/8."""
    path = "proc/sys/net/ipv4/conf/all/route_localnet"
    return (Setting(path, 1),) if localhost_node_ports else ()


def ipvs_settings(kernel: tuple[int, int], strict_arp: bool) -> tuple[Setting, ...]:
    """Return the settings of the ipvs mode for a kernel version (major, minor).

    `conn_reuse_mode` exists since 4.1 and is harmful until 5.9, which fixed it.
    """
    vs, all_ = "proc/sys/net/ipv4/vs/", "proc/sys/net/ipv4/conf/all/"
    # With 1, the first SYN from a client port that is used again is dropped: a second is lost.
    reuse = (4, 1) <= kernel < (5, 9)
    return (
        Setting(f"{vs}conntrack", 1),
        *((Setting(f"{vs}conn_reuse_mode", 0),) if reuse else ()),
        Setting(f"{vs}expire_nodest_conn", 1),
        Setting(f"{vs}expire_quiescent_template", 1),
        Setting("proc/sys/net/ipv4/ip_forward", 1),
        *((Setting(f"{all_}arp_ignore", 1),) if strict_arp else ()),
        *((Setting(f"{all_}arp_announce", 2),) if strict_arp else ()),
    )


def read(path: str, root: Path = Path("/")) -> int:
    """Read a setting.

    Raises:
        SysctlError: it does not exist (a module may be missing), or is not a number.
    """
    try:
        return int((root / path).read_text().split()[0])
    except (OSError, ValueError, IndexError) as error:
        code = getattr(error, "errno", None) or errno.EINVAL
        why = getattr(error, "strerror", None) or error
        hint = "; this needs root" if isinstance(error, PermissionError) else ""
        raise SysctlError(code, f"/{path} cannot be read: {why}{hint}") from error


def apply(settings: Iterable[Setting], root: Path = Path("/")) -> tuple[str, ...]:
    """Write the settings that differ, in order; return warnings.

    Raises:
        SysctlError: a setting cannot be read or written; the later ones are not tried.
    """
    warnings = []
    for setting in settings:
        value = read(setting.path, root)
        if value == setting.value or (setting.at_least and value > setting.value):
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
