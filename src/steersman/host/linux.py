"""Interfaces and addresses of a Linux machine, over rtnetlink; facts.py adds the rest.

Two kinds of addresses are left out:

* Link-local IPv6 addresses. Every pod that starts or stops brings one on its veth, and no mode
  makes a rule of it.
* Addresses on the interfaces where modes put Service addresses, whatever mode is in use now.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

from steersman.host.netlink import (
    NETLINK_ROUTE,
    AnswersLostError,
    DumpInterruptedError,
    Netlink,
    Subscription,
)
from steersman.host.nlmsg import Message, Request
from steersman.host.rtnetlink import (
    LIST_ADDRESSES,
    LIST_LINKS,
    NOT_LINK_LOCAL,
    RTM_DELADDR,
    RTM_NEWADDR,
    RTNLGRP_IPV4_IFADDR,
    RTNLGRP_IPV6_IFADDR,
    Address,
    parse_address,
    parse_link,
)
from steersman.model.addresses import canonical_ip
from steersman.model.inputs import HostFacts

_ATTEMPTS = 8  # listings until an inconsistent one is accepted
# Of the ipvs mode (behaviour 10), and of direct portals of the userspace mode.
_SERVICE_INTERFACES = frozenset({"kube-ipvs0", "kube-portals"})
_SETTLE = 0.02  # seconds; adding one address makes several notifications


async def read_network() -> HostFacts:
    """Return the facts, without a hostname.

    Raises:
        OSError: rtnetlink does not answer.
    """
    interfaces = await asyncio.to_thread(_interfaces)
    return HostFacts(hostname="", interfaces=interfaces, ipv6=has_ipv6())


async def address_changes() -> AsyncGenerator[None]:
    """Yield when subscribed to notifications, and again after each change of a relevant address.

    Reading the facts after the first yield therefore misses no change.

    Raises:
        OSError: no socket can be opened.
    """
    groups = (RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR)
    with Subscription(NETLINK_ROUTE, groups, wanted=NOT_LINK_LOCAL) as news:
        yield
        while True:
            with suppress(AnswersLostError):  # anything may have changed
                while not any(map(_is_relevant, await news.receive())):
                    pass
            await asyncio.sleep(_SETTLE)
            yield


def has_ipv6(proc: Path = Path("/proc")) -> bool:
    """Whether the kernel has IPv6 and it is not disabled (behaviour 1.5)."""
    try:
        disabled = (proc / "sys/net/ipv6/conf/all/disable_ipv6").read_text().strip() == "1"
    except OSError:
        disabled = False
    return (proc / "net/if_inet6").exists() and not disabled


def _is_relevant(message: Message) -> bool:
    """Whether a notification is about an address that belongs to the facts."""
    if message.kind not in (RTM_NEWADDR, RTM_DELADDR):
        return False
    address = parse_address(message)
    if not _text(address):
        return False
    try:
        return socket.if_indextoname(address.link) not in _SERVICE_INTERFACES
    except OSError:  # the interface is gone
        return True


def _interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses, with prefix lengths, by interface; both in order. Blocks."""
    # The thread that uses the socket closes it: its caller may be cancelled meanwhile.
    with Netlink(NETLINK_ROUTE, buffer=1 << 20) as netlink:
        for _ in range(_ATTEMPTS + 1):  # as long as addresses are changing right now
            links, consistent = _list(netlink, LIST_LINKS)
            addresses, consistent_too = _list(netlink, LIST_ADDRESSES)
            if consistent and consistent_too:
                break
    names = {link.number: link.name for link in map(parse_link, links)}
    found: dict[str, list[str]] = {}
    for address in map(parse_address, addresses):
        name, text = names.get(address.link), _text(address)
        if text and name is not None and name not in _SERVICE_INTERFACES:
            found.setdefault(name, []).append(text)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def _list(netlink: Netlink, request: Request) -> tuple[list[Message], bool]:
    """Return what a dump lists, and whether nothing changed while it was read."""
    replies: list[Message] = []
    try:
        replies.extend(netlink.dump(request))  # keeps the replies before an exception
    except DumpInterruptedError:
        return replies, False
    return replies, True


def _text(address: Address) -> str:
    """Return `ip/length`; "" if the address is link-local or not one of IP."""
    is_ip = address.family in (socket.AF_INET, socket.AF_INET6) and address.packed
    if not is_ip or address.is_link_local:
        return ""
    ip = canonical_ip(socket.inet_ntop(address.family, address.packed))
    return f"{ip}/{address.length}"
