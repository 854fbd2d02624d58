"""Flows of UDP that conntrack leads past a portal: nowhere, or to where a listener was. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from steersman.model.conntrack import Stale, pack_socket
from steersman.model.names import Family, Protocol
from steersman.modes.userspace.names import Portal
from steersman.proxy.listeners import FrontendKey


def past_portals(
    family: Family, portals: Mapping[FrontendKey, Portal | None], ports: Mapping[FrontendKey, int]
) -> Stale:
    """What tells such entries, whose clients would never see the portals while they send.

    Args:
        family: the family.
        portals: those in force, by destination; None for none.
        ports: the port of each portal's listener.
    """
    udp = bytes((Protocol.UDP.number,))
    ways = {
        udp + pack_socket(key.address, key.port): frozenset({pack_socket(portal.host, ports[key])})
        for key, portal in portals.items()
        if portal is not None and portal.host and key.protocol is Protocol.UDP
    }
    return Stale(family, ways, {})
