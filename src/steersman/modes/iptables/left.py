"""What of rules can be told without iptables and nft: whether something of ours may be left."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path

from steersman.host.netlink import NETLINK_NETFILTER, Netlink, Request
from steersman.host.nlmsg import attributes, string
from steersman.host.process import NEEDS_NET_ADMIN
from steersman.model.names import Family

_GETTABLE, _GETCHAIN = (10 << 8) | 1, (10 << 8) | 4  # NFNL_SUBSYS_NFTABLES
_TABLE_NAME = 1
_CHAIN_TABLE, _CHAIN_NAME = 1, 3
_NUMBER = {Family.IPV4: 2, Family.IPV6: 10}
_UNKNOWN = (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT)
"""What a kernel without nf_tables answers."""


def chains_left(ours: Callable[[str, str], bool], families: Iterable[Family]) -> str:
    """Say which chains that iptables-nft has made are left; "" if there are none.

    Args:
        ours: whether a chain, given by its table and name, is asked for.
        families: to look at.
    """

    def name(found: dict[int, bytes]) -> str:
        table, chain = string(found.get(_CHAIN_TABLE, b"")), string(found.get(_CHAIN_NAME, b""))
        return chain if ours(table, chain) else ""

    return _listed("chains", _GETCHAIN, name, families)


def table_left(wanted: str, families: Iterable[Family]) -> str:
    """Say that a table of nftables is left; "" if there is none."""

    def name(found: dict[int, bytes]) -> str:
        return wanted if string(found.get(_TABLE_NAME, b"")) == wanted else ""

    return _listed("tables", _GETTABLE, name, families)


def _listed(
    what: str, kind: int, name: Callable[[dict[int, bytes]], str], families: Iterable[Family]
) -> str:
    names: list[str] = []
    try:
        with Netlink(NETLINK_NETFILTER, buffer=1 << 20) as netlink:
            for family in families:
                head = bytes((_NUMBER[family], 0, 0, 0))
                for reply in netlink.dump(Request(kind, head)):
                    names.append(name(attributes(reply.payload, len(head))))
    except OSError as error:
        if error.errno in _UNKNOWN:
            return ""
        if error.errno in (errno.EPERM, errno.EACCES):
            return f"looking for {what} {NEEDS_NET_ADMIN}"
        return f"{what} cannot be listed: {error.strerror}"
    found = sorted(filter(None, names))
    return f"{what} are left: {len(found)}, such as {found[0]}" if found else ""


def legacy_left(families: Iterable[Family], proc: Path = Path("/proc")) -> str:
    """Say which tables iptables-legacy has, whose rules only it can list; "" if there are none."""
    tables: dict[str, None] = {}
    for family in families:
        name = "ip_tables_names" if family is Family.IPV4 else "ip6_tables_names"
        try:
            tables |= dict.fromkeys((proc / "net" / name).read_text().split())
        except FileNotFoundError:  # the module is not loaded
            continue
        except PermissionError:
            return f"looking for tables {NEEDS_NET_ADMIN}"
        except OSError as error:
            return f"tables cannot be listed: {error.strerror}"
    return f"rules may be left in the tables {', '.join(sorted(tables))}" if tables else ""
