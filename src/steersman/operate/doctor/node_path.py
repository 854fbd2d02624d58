"""Checks of the way from this node to the endpoints: routes, interfaces, MTU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial

from msgspec.structs import replace

from steersman.host.echo import EchoRefusedError, answers_echo, known_mtu
from steersman.host.link_state import Link
from steersman.model.names import Family, Protocol
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import hop, interfaces, requirements, ways
from steersman.operate.doctor.pod_views import pods
from steersman.operate.doctor.result import (
    Cause,
    CheckResult,
    Found,
    Verdict,
    error,
    first_of,
    notice,
    ok,
    result_of,
    skipped,
    unknown,
    warning,
)
from steersman.operate.doctor.traffic_dial import Target, takes_data
from steersman.operate.places import NODE, Place
from steersman.operate.trace_loss import Hop

_OVERHEAD = {"vxlan": 50, "geneve": 50, "ipip": 20, "sit": 20, "gre": 24, "wireguard": 60}
"""Bytes that an encapsulation adds to a packet, over IPv4."""
_HEADERS = {Family.IPV4: 28, Family.IPV6: 48}
"""Bytes of the IP and ICMP headers of an echo request."""
_SMALL = 56
_PLACES = 2
"""Pods from which paths are probed, beside this node."""
_PROBED = 4
"""Endpoints whose path is probed; those of one device share a path more often than not."""


async def routes(context: Context) -> Found:
    """Check that every endpoint, and the Service's addresses, have a route."""
    links, found = await context.once(interfaces), await context.once(ways)
    results: list[CheckResult] = [*_chosen_by_rules(found)]
    for address, way in found.items():
        if way.trouble:
            text = f"this node has no route to the endpoint {address}: {way.trouble}"
            remedy = "check the CNI plugin's routes: `ip route`, and its pod on this node"
            if way.rule:
                text += f", by the policy rule {way.rule!r}"
                remedy = "delete that rule: `ip rule`"
            shown = f"ip route get {address}: {way.trouble}"
            results.append(error(text, shown, remedy=remedy))
        elif way.device in links and not links[way.device].up:
            text = f"the interface {way.device} to the endpoint {address} is down"
            results.append(error(text, remedy=f"`ip link set {way.device} up`"))
    # Without any route to its address, the node's own connections fail before a rule sees them,
    # unless the mode changes the address at the socket.
    needs = await context.once(requirements)
    for address in context.service_addresses if needs.delivery != "translated" else ():
        way = await hop(context, address)
        if way.trouble:
            text = (
                f"this node has no route to {address}, the Service's own address, so its own "
                f"connections fail before the rules see them: {way.trouble}"
            )
            remedy = (
                "add a default route; which one does not matter, the rules change the destination"
            )
            shown = f"ip route get {address}: {way.trouble}"
            results.append(error(text, shown, remedy=remedy))
    if not found:
        return results or skipped("there is no endpoint")
    return results or ok(f"every endpoint has a route ({len(found)})")


def _chosen_by_rules(found: Mapping[str, Hop]) -> Iterator[CheckResult]:
    """Note policy rules of other programs by which packets to endpoints leave."""
    ruled: dict[Hop, list[str]] = {}
    for address, way in found.items():
        if way.rule and not way.trouble:
            ruled.setdefault(replace(way, address=""), []).append(address)
    for way, addresses in ruled.items():
        yield notice(
            f"packets to the endpoint {first_of(addresses, 1)} leave by {way}, as the policy rule "
            f"{way.rule!r} says",
            f"shown by: ip route get {addresses[0]}; ip rule",
            remedy="see who made that rule, and whether it should leave out the cluster's networks",
            cause=Cause.PATH + 1,
        )


async def overlays(context: Context) -> Found:
    """Check that encapsulated packets fit into the interface below."""
    links, found = await context.once(interfaces), await context.once(ways)
    results: list[CheckResult] = []
    for name in dict.fromkeys(way.device for way in found.values()):
        link = links.get(name)
        # Anything else sends packets as they are.
        if link is None or link.driver not in _OVERHEAD:
            continue
        what, below = f"{name} ({link.driver})", links.get(link.below)
        if below is None:
            results.append(unknown(f"{what} does not say what it sends through"))
            continue
        room = below.mtu - _OVERHEAD[link.driver]
        if link.mtu <= room:
            results.append(ok(f"packets of {what} fit into {below.name}"))
            continue
        text = (
            f"the MTU {link.mtu} of {what} is too large for {below.name}: large packets are "
            f"fragmented or lost; at most {room} fit"
        )
        shown = f"{name}: mtu {link.mtu}; {below.name}: mtu {below.mtu}"
        remedy = f"set the MTU of the CNI plugin to {room}"
        results.append(warning(text, shown, remedy=remedy, suspect=True))
    return results or skipped("no endpoint is reached through an overlay")


async def path_mtu(context: Context) -> Found:
    """Send large echo requests that must not be fragmented, if small ones are answered."""
    links, found = await context.once(interfaces), await context.once(ways)
    usable = [each for each, way in found.items() if not way.local and not way.trouble][:_PROBED]
    if not usable:
        return skipped("no endpoint is beyond this node's own addresses")
    places = [NODE, *(await context.once(pods))[:_PLACES]]
    ports = {
        end.ip: Target(end.ip, end.port)
        for plan in context.plans
        for end in plan.reachable
        if plan.key.name.protocol is Protocol.TCP and context.question.dial
    }
    probes = [
        _probe_size(place, address, found[address], links, ports.get(address))
        for place in places
        for address in usable
        if address not in place.addresses.values()
    ]
    results = [each for each in await asyncio.gather(*probes) if each]
    return results or unknown("no endpoint answers an echo request (ping)")


async def _probe_size(
    place: Place, address: str, way: Hop, links: Mapping[str, Link], target: Target | None
) -> CheckResult | None:
    """Send echo requests as large as a place may send; None if small ones are not answered.

    Args:
        place: where they are sent.
        address: of an endpoint.
        way: of this node to the endpoint.
        links: of this node.
        target: the endpoint's port, to see whether a connection stalls; None if that is not tried.
    """
    family = Family.IPV6 if ":" in address else Family.IPV4
    ask = partial(answers_echo, address, netns=place.netns)
    learn = partial(asyncio.to_thread, known_mtu, address, place.netns)
    try:
        size, largest = await learn(), 0
        if not await ask(_SMALL):  # it may be silent: that tells nothing of large ones
            return None
        while largest != size:
            if await ask(size - _HEADERS[family]):
                return ok(f"packets of {size} bytes from {place.name} reach {address}")
            # If a router said what fits, the kernel has learned it, and all is well.
            largest, size = size, await learn()
        why = "they vanish"
    except EchoRefusedError as refused:
        why = str(refused)
    except OSError:
        return None  # no route: other checks say so
    on_the_way = [each for each in links.values() if way.device in (each.name, each.master)]
    small = [each for each in on_the_way if each.mtu < size]
    why += "".join(f"; the MTU of {each.name} is {each.mtu}" for each in small[:1])
    stalls = target is not None and not await takes_data(target, place.netns)
    text = f"packets of {size} bytes from {place.name} do not reach the endpoint {address}: {why}"
    how = f"ping -M do -s {size - _HEADERS[family]} {address}"
    return result_of(
        Verdict.ERROR if stalls else Verdict.WARNING,
        f"{text}; small ones do" + ", and connections stall" * stalls,
        f"{how}: no answer; ping -s {_SMALL} {address}: answered",
        remedy="lower the MTU of the CNI plugin, or let ICMP `fragmentation needed` pass",
        suspect=True,
    )
