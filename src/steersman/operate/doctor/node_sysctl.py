"""Checks of the kernel's network settings: forwarding, rp_filter, ports, bridges, loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

from steersman.host.link_state import Link
from steersman.model.addresses import is_loopback
from steersman.model.names import Family
from steersman.model.plan import SourceClass
from steersman.netfilter.firewall.read import BRIDGE_SETTING
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import hop, interfaces, paths, requirements, ways
from steersman.operate.doctor.result import (
    CheckResult,
    Found,
    Verdict,
    error,
    ok,
    result_of,
    skipped,
    warning,
)
from steersman.operate.trace_loss import Hop

_IPV4 = "proc/sys/net/ipv4"
_STRICT = 1
_COUNTED = 1.0
"""Seconds between two looks at a counter."""


def remedy(setting: str, value: int) -> str:
    """Return how to set a sysctl, now and after the next start."""
    name = setting.removeprefix("proc/sys/").replace("/", ".")
    return f"`sysctl -w {name}={value}`, and a file in /etc/sysctl.d so that it stays"


def of_interfaces(context: Context, folder: str, setting: str) -> dict[str, int]:
    """Return a setting of each interface but the loopback device, by name."""
    found = {}
    for each in sorted(context.path(folder).iterdir()):
        if each.name not in ("all", "default", "lo"):
            with suppress(OSError):  # it has gone meanwhile, as those of pods do
                found[each.name] = int((each / setting).read_text())
    return found


async def forwarding(context: Context) -> Found:
    """Check that the kernel forwards packets, on every interface."""
    results: list[CheckResult] = []
    to_endpoint = await context.once(ways)
    found = await context.once(paths)
    for family in context.families:
        name = "ip_forward" if family is Family.IPV4 else "conf/all/forwarding"
        settings = f"proc/sys/net/ipv{int(family)}"
        setting = f"{settings}/{name}"
        # Packets of this node itself, and those to itself, are not forwarded.
        needed = any(
            path.plan.key.family is family
            and path.source is not SourceClass.NODE
            and not to_endpoint[path.endpoint.ip].local
            for path in found
        )
        if context.read(setting) == "0":
            text = f"this node does not forward {family.kubernetes} packets: /{setting} is 0"
            say = error if needed else warning
            results.append(say(text, remedy=remedy(setting, 1)))
            continue
        # An interface that came or was set later may differ from `all`.
        values = of_interfaces(context, f"{settings}/conf", "forwarding")
        if off := [name for name, value in values.items() if not value]:
            used = any(way.device in off for way in to_endpoint.values())
            say = error if used and needed else warning
            names = f"packets that come in by {', '.join(off[:5])}"
            paths_off = [f"{settings}/conf/{each}/forwarding" for each in off]
            results.append(
                say(
                    f"{names} are not forwarded ({family.kubernetes})",
                    *(f"/{each} is 0" for each in paths_off),
                    remedy=remedy(paths_off[0], 1),
                )
            )
        else:
            results.append(ok(f"{family.kubernetes} packets are forwarded"))
    return results


async def reverse_path(context: Context) -> Found:
    """Check that the reverse path filter (rp_filter) drops no packet of clients or endpoints."""
    folder = f"{_IPV4}/conf"
    everywhere = int(context.read(f"{folder}/all/rp_filter"))
    # The kernel takes the larger one of `all` and the interface's own value.
    values = of_interfaces(context, folder, "rp_filter")
    strict = [name for name, value in values.items() if max(value, everywhere) == _STRICT]
    if not strict:
        return ok("no interface filters strictly by the reverse path")
    flow = context.question.flow
    how = remedy(f"{folder}/{strict[0]}/rp_filter", 2)
    if flow and flow.interface in strict and not isinstance(flow.source, SourceClass):
        back = await hop(context, flow.source)
        if back.device != flow.interface:
            return error(
                f"packets of {flow.source} that come in by {flow.interface} are dropped: "
                f"rp_filter is strict there, and the way back is by {back.device or 'nowhere'}",
                f"/{folder}/{flow.interface}/rp_filter is 1",
                remedy=how,
            )
    # A count since the start proves little; one that grows now is about this trouble.
    before = _dropped(context)
    await asyncio.sleep(_COUNTED)
    dropped, total = _dropped(context) - before, _dropped(context)
    where = f"rp_filter is strict on {', '.join(strict[:5])}"
    if dropped:
        return warning(
            f"the reverse path filter dropped {dropped} packets within {_COUNTED:g} s: {where}",
            f"IPReversePathFilter in /proc/net/netstat is {total}",
            remedy=how,
            suspect=True,
        )
    if total:
        words = f"the reverse path filter dropped {total} packets since the start, none just now"
        return ok(f"{words}; {where}")
    return ok(f"{where}, and dropped nothing so far")


def _dropped(context: Context) -> int:
    """Return the packets that the reverse path filter dropped since the start."""
    lines = context.read("proc/net/netstat").splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=False):
        counters = dict(zip(names.split(), values.split(), strict=False))
        if "IPReversePathFilter" in counters:
            return int(counters["IPReversePathFilter"])
    return 0


async def loopback(context: Context) -> Found:
    """Check that packets to node ports on 127.0.0.0/8 are routed."""
    settings = context.world.plan.settings
    if not settings.ipv4.localhost_node_ports or not context.node_ports:
        return skipped("no node port is served on 127.0.0.0/8")
    if settings.traits.relays_localhost:
        return ok("a relay serves node ports on 127.0.0.0/8: nothing has to be routed")
    setting = f"{_IPV4}/conf/all/route_localnet"
    if context.read(setting) != "0":
        return ok("packets from 127.0.0.0/8 are routed")
    flow = context.question.flow
    say = error if flow and is_loopback(flow.destination) else warning
    text = f"node ports do not answer on 127.0.0.0/8: /{setting} is 0"
    return say(text, remedy=remedy(setting, 1))


async def ephemeral_ports(context: Context) -> Found:
    """Check that the kernel gives no node port to a program as its local port."""
    if not context.node_ports:
        return skipped("no node port is served")
    folder = _IPV4
    first, last = map(int, context.read(f"{folder}/ip_local_port_range").split())
    found = {port for port in context.node_ports if first <= port <= last}
    for part in context.read(f"{folder}/ip_local_reserved_ports").strip().split(","):
        low, _, high = part.partition("-")
        if low:
            found.difference_update(range(int(low), int(high or low) + 1))
    if not found:
        return ok("no node port is an ephemeral port")
    ports = ", ".join(map(str, sorted(found)[:5])) + ("…" if len(found) > 5 else "")
    return result_of(
        Verdict.NOTICE,
        f"programs may be given node ports as their local ports: {ports}",
        f"/{folder}/ip_local_port_range is {first} {last}",
        remedy="add the range of node ports to net.ipv4.ip_local_reserved_ports",
    )


def bridges_of_pods(links: Mapping[str, Link], ways: Iterable[Hop]) -> set[str]:
    """Return the bridges behind which endpoints are."""
    found = {links[way.device] for way in ways if way.device in links}
    return {link.name for link in found if link.driver == "bridge"}


async def bridge_netfilter(context: Context) -> Found:
    """Check that answers between two pods on one bridge are translated back."""
    if not (await context.once(requirements)).bridge_netfilter:
        return skipped("this mode needs no netfilter on bridges")
    links = await context.once(interfaces)
    bridges = bridges_of_pods(links, (await context.once(ways)).values())
    if not bridges:
        return skipped("no endpoint is behind a bridge of this node")
    results: list[CheckResult] = []
    for family in context.families:
        setting = BRIDGE_SETTING[family]
        try:
            value = context.read(setting)
        except FileNotFoundError:  # the sysctl comes with the module
            value = ""
        if value == "1":
            results.append(ok(f"netfilter sees {family.kubernetes} packets on bridges"))
            continue
        why = f"/{setting} is 0" if value else "the module br_netfilter is not loaded"
        first = "" if value else "`modprobe br_netfilter`; "
        names = ", ".join(sorted(bridges))
        results.append(
            warning(
                f"a pod does not get answers of an endpoint on its own bridge ({names}): {why}",
                remedy=first + remedy(setting, 1),
                suspect=True,
            )
        )
    return results


async def hairpin(context: Context) -> Found:
    """Check that a bridge sends frames back by the port that they came from."""
    links = await context.once(interfaces)
    # A promiscuous bridge sends frames back by itself (kubelet's promiscuous-bridge).
    bridges = bridges_of_pods(links, (await context.once(ways)).values())
    wrong = sorted(
        link.name
        for link in links.values()
        if link.master in bridges and link.hairpin is False and not links[link.master].promiscuous
    )
    if not bridges:
        return skipped("no endpoint is behind a bridge of this node")
    if not wrong:
        return ok(f"every port of {', '.join(sorted(bridges))} has hairpin mode")
    return warning(
        f"a pod that is led to itself gets no answer: {len(wrong)} ports of "
        f"{', '.join(sorted(bridges))} have no hairpin mode",
        *(f"{name}: hairpin off" for name in wrong),
        remedy=f"`bridge link set dev {wrong[0]} hairpin on` (the CNI plugin's hairpinMode), or "
        "kubelet's --hairpin-mode=promiscuous-bridge",
        suspect=True,
    )
