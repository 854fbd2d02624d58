"""What a Linux machine is like: hostname, interfaces and addresses, IPv6. Read, never changed.

Interfaces and addresses come from rtnetlink, and so does the news that they changed. Link-local
IPv6 addresses are left out: every pod that starts or stops brings one on its veth, and no mode
makes a rule of it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from steersman.host.hostname import hostname
from steersman.host.netlink import (
    NETLINK_ROUTE,
    AnswersLostError,
    DumpInterruptedError,
    Netlink,
    Request,
    Subscription,
)
from steersman.host.nlmsg import Message
from steersman.host.rtnetlink import (
    LIST_ADDRESSES,
    LIST_LINKS,
    NOT_LINK_LOCAL,
    RTM_DELADDR,
    RTM_NEWADDR,
    RTNLGRP_IPV4_IFADDR,
    RTNLGRP_IPV6_IFADDR,
    parse_address,
    parse_link,
)
from steersman.model.addresses import canonical_ip
from steersman.model.inputs import HostFacts

_ATTEMPTS = 8
_NOT_OURS = frozenset({"kube-ipvs0", "kube-portals"})
"""Interfaces that hold addresses of Services (behaviour 10; direct portals of the userspace mode),
whatever mode is in use now."""
_SETTLE = 0.02  # seconds; adding one address makes several notifications


async def read_facts() -> HostFacts:
    """Read everything afresh.

    Raises:
        OSError: rtnetlink does not answer, which no Linux does on purpose.
    """
    with Netlink(NETLINK_ROUTE, buffer=1 << 20) as netlink:
        interfaces = await asyncio.to_thread(_read_interfaces, netlink)
    return HostFacts(hostname=hostname(), interfaces=interfaces, ipv6=has_ipv6())


async def watch_addresses() -> AsyncIterator[HostFacts]:
    """Yield the facts now, and again each time that they have become different.

    Raises:
        OSError: rtnetlink does not answer, or no socket can be opened.
    """
    groups = (RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR)
    with Subscription(NETLINK_ROUTE, groups, wanted=NOT_LINK_LOCAL) as news:
        facts = await read_facts()  # after joining: no change can fall between
        yield facts
        while True:
            await _change(news)
            latest = await read_facts()
            if latest != facts:
                facts = latest
                yield facts


async def _change(news: Subscription) -> None:
    """Wait until a fact may have changed, and a little longer for the rest of the same change."""
    with suppress(AnswersLostError):  # some notifications were lost: read everything
        while not any(map(_is_fact, await news.receive())):
            pass
    await asyncio.sleep(_SETTLE)


def _is_fact(message: Message) -> bool:
    """Whether a notification is about an address that counts."""
    if message.kind not in (RTM_NEWADDR, RTM_DELADDR):
        return False
    index, address = _address(message)
    if not address:
        return False
    try:
        return socket.if_indextoname(index) not in _NOT_OURS
    except OSError:  # the interface is gone
        return True


def has_ipv6(proc: Path = Path("/proc")) -> bool:
    """Whether the kernel has IPv6 and it is not disabled (behaviour 1.5)."""
    try:
        disabled = (proc / "sys/net/ipv6/conf/all/disable_ipv6").read_text().strip() == "1"
    except OSError:
        disabled = False
    return (proc / "net/if_inet6").exists() and not disabled


def _read_interfaces(netlink: Netlink) -> dict[str, tuple[str, ...]]:
    for _ in range(_ATTEMPTS):
        try:
            return _interfaces(netlink)
        except DumpInterruptedError:  # the addresses are changing right now
            continue
    return _interfaces(netlink, consistent=False)


def _interfaces(netlink: Netlink, consistent: bool = True) -> dict[str, tuple[str, ...]]:
    links = map(parse_link, _list(netlink, LIST_LINKS, consistent))
    names = {link.number: link.name for link in links}
    found: dict[str, list[str]] = {}
    for reply in _list(netlink, LIST_ADDRESSES, consistent):
        index, address = _address(reply)
        if address and index in names and names[index] not in _NOT_OURS:
            found.setdefault(names[index], []).append(address)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def _list(netlink: Netlink, request: Request, consistent: bool) -> list[Message]:
    replies: list[Message] = []
    try:
        replies.extend(netlink.dump(request))
    except DumpInterruptedError:
        if consistent:
            raise
    return replies


def _address(reply: Message) -> tuple[int, str]:
    """Index of the link, and `address/length` ("" if it is link-local, or not an IP address)."""
    found = parse_address(reply)
    if found.family not in (socket.AF_INET, socket.AF_INET6) or not found.packed:
        return found.link, ""
    if found.is_link_local:
        return found.link, ""
    address = canonical_ip(socket.inet_ntop(found.family, found.packed))
    return found.link, f"{address}/{found.length}"
