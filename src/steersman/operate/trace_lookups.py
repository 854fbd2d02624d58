"""Look up what a network namespace does with a packet: routes, rules, neighbours, filters.

All look-ups read. They run where the packet was seen last, after it was lost.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from steersman.compile.trace import TraceResult
from steersman.host.exec import SubprocessExec
from steersman.host.link_state import SILENT, link_state
from steersman.host.netlink import NETLINK_ROUTE, DumpInterruptedError, Netlink
from steersman.host.netns import HERE, call_inside, find_inode, linked_holders
from steersman.host.rtnetlink import (
    MAIN_TABLE,
    Rule,
    get_route,
    list_rules,
    parse_route,
    parse_rule,
)
from steersman.host.sysctl import SysctlError
from steersman.model.addresses import in_cidr, is_loopback
from steersman.model.tracing import STEERSMAN, Sighting, WatchedFlow
from steersman.netfilter.conntrack.usage import usage
from steersman.netfilter.trace.owners import owner_of
from steersman.operate.trace_compare import Observation, mark_of
from steersman.operate.trace_loss import NETFILTER, TC_SIDES, Hop, Surroundings, last_place

_WORDS = {
    errno.EINVAL: "a blackhole route",
    errno.EACCES: "a route of type prohibit",
    errno.EXDEV: "its source is reached by another device (rp_filter)",
}
_REFUSES = re.compile(r"\d+: from all(?: to (\S+))? (?:blackhole|prohibit|unreachable)")
_LOOKED_UP = 16
"""Endpoints whose routes are looked up if it is not known which one was chosen."""
_HANDLE = re.compile(r" # handle (\d+)$")
_DROPS = re.compile(r"(^|\s)(drop|reject)\b|-j (DROP|REJECT)\b")


def look_around(
    flow: WatchedFlow, predicted: TraceResult, seen: Observation, client: Path
) -> Observation:
    """Look up what becomes of a packet where it was seen last. It blocks.

    Other namespaces than the client's, the endpoint's and this node's count as elsewhere.

    Args:
        flow: the packet, as its client sends it.
        predicted: what the plan does with it.
        seen: what the kernel did.
        client: the client's namespace.
    """
    node, tracked = HERE.stat().st_ino, seen.connection
    chosen = seen.endpoint.rpartition(":")[0].strip("[]")
    endpoint = chosen or flow.destination
    holders = linked_holders(endpoint)
    known = {node, seen.client, *(path.stat().st_ino for path in holders)}
    seen = seen._replace(sightings=[each for each in seen.sightings if each.netns in known])
    arrived = any(step.direction == "original" for step in seen.steps)  # at hooks of this node
    last = last_place(seen.sightings) or Sighting(
        kind="received" if arrived else "sent",
        netns=node if arrived else seen.client,
        device="",
        source=flow.source,
        source_port=flow.source_port,
        destination=flow.destination,
        port=flow.port,
    )
    # Its addresses as routing sees them there, after translation: all that they may be.
    to, back, name = [last.destination], last.source, f"the namespace of {endpoint}"
    if last.netns == node:
        name = "this node"
        was_sent = (arrived or bool(seen.sightings)) and not last.reply
        if was_sent and last.destination == flow.destination:  # received, then translated
            to = [chosen] if chosen else [each.ip for each in predicted.endpoints] or to
        elif last.reply and tracked and last.destination == tracked.seen_source:
            to = [tracked.source]
    elif last.netns == seen.client:
        name = "the client's namespace"
    received = [
        each.device
        for each in seen.sightings
        if (each.kind, each.netns, each.reply) == ("received", last.netns, last.reply)
    ]
    device = received[-1] if received else ""  # "" if the namespace itself sends it
    mark = last.mark or mark_of(seen.steps)
    path = client if last.netns == seen.client != node else find_inode(last.netns)
    here = path == HERE

    def ask() -> Surroundings:
        hops = [look_up(address, back, device, mark) for address in to[:_LOOKED_UP]]
        forward = next((hop for hop in hops if hop.trouble), hops[0])
        backward = Hop()
        if back:
            backward = look_up(back, forward.address if forward.local else "")
        next_hop = backward if forward.local else forward
        drops: list[str] = []
        if last.reason == NETFILTER:
            listing = _printed("nft", "-a", "list", "ruleset")
            drops = [*dropping_rules(listing, ("netdev", "bridge") if here else ())]
            # A trace reports other rules of this node, but not in every mode those for answers.
            if last.reply and not drops:
                drops = [each for each in dropping_rules(listing) if not _is_ours(each)]
        return Surroundings(
            name,
            "" if here else f"nsenter --net={path} ",
            forward,
            backward,
            _neighbour(next_hop.device, next_hop.gateway or next_hop.address),
            _rp_filter(last.device) if ":" not in forward.address else "",
            tuple(drops),
            _programs(last),
            _full(),
            # Every namespace has 127.0.0.1.
            () if is_loopback(endpoint) else tuple(map(str, holders)),
        )

    around = call_inside(None if here else path, ask) if path is not None else None
    return seen._replace(around=around, node=node)


def _programs(last: Sighting) -> tuple[str, ...]:
    """Return the filters, programs or queues of the device if one of them dropped the packet."""
    printed = ""
    if side := TC_SIDES.get(last.reason):
        printed = _printed("tc", "filter", "show", "dev", last.device, side)
    elif last.reason == "QDISC_DROP":
        printed = _printed("tc", "-s", "qdisc", "show", "dev", last.device)
    return tuple(printed.splitlines())


def _printed(*argv: str) -> str:
    """Return what a program prints in the namespace of this thread; "" if it fails."""
    with suppress(OSError):
        result = SubprocessExec().run_tool(argv, timeout=10.0)
        return "" if result.returncode else result.stdout.decode(errors="replace")
    return ""


def dropping_rules(listing: str, families: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the rules and policies that drop, of what `nft -a list ruleset` prints.

    Args:
        listing: the text.
        families: only of these families of tables; () for all.
    """
    family = table = chain = ""
    base = False
    for line in listing.splitlines():
        words = line.split()
        if line.startswith("table "):
            family, table = words[1], words[2]
        elif line.startswith("\tchain "):
            chain, base = words[1], False
        elif families and family not in families:
            continue
        elif words and words[0] == "type" and "hook" in words:
            base = True
            if "policy drop" in line:
                yield f"the policy of chain {chain} of table {family} {table}"
        elif chain and _DROPS.search(line):
            rule = _HANDLE.sub("", line.strip())
            handle = _HANDLE.search(line)
            owner = owner_of(table, chain, rule, base=base)
            number = f" (handle {handle[1]})" if handle else ""
            yield f"a rule of {owner} in chain {chain} of table {family} {table}{number}: {rule}"


def _is_ours(described: str) -> bool:
    """Return whether dropping_rules describes a rule of ours."""
    owners = STEERSMAN, "kube-proxy"  # our table of nftables has its name
    return described.startswith(tuple(f"a rule of {owner} " for owner in owners))


def _index(device: str) -> int:
    with suppress(OSError):
        return socket.if_nametoindex(device) if device else 0
    return 0


def look_up(to: str, source: str = "", device: str = "", mark: int = 0) -> Hop:
    """Look up the way to an address, in the namespace of this thread; it blocks.

    A device and a mark select it as for a packet that was received.
    """
    packed, index = ip_address(to).packed, _index(device)
    with Netlink(NETLINK_ROUTE, buffer=1 << 18) as netlink:
        from_ = ip_address(source).packed if source else b""
        # The kernel refuses to look up what cannot be: a packet that was received from one of its
        # own addresses (it is masqueraded by now), and one that it sends itself from another.
        if _is_own(netlink, from_):
            index = 0
        elif not index:
            from_ = b""
        try:
            reply = netlink.request(get_route(packed, source=from_, device=index, mark=mark))[0]
        except OSError as error:
            code = error.errno or errno.EIO
            trouble = _WORDS.get(code, os.strerror(code))
            if code == errno.ENETUNREACH:
                version = "-6" if ":" in to else "-4"
                only = ("table", "all", "type", "throw", "match", to)
                for line in _printed("ip", version, "route", "show", *only).splitlines()[:1]:
                    trouble += f"; a route sends it on to the next table: {line.strip()}"
            if index and ":" not in to:
                trouble = _not_forwarded(device) or trouble
            selected_by = (f"fwmark {mark:#x}", "fwmark") * bool(mark)
            selected_by += (f"iif {device} ",) * bool(index) + (f"from {source}",) * bool(source)
            return Hop(to, rule=_refusing_rule(netlink, to, selected_by), trouble=trouble)
        route = parse_route(reply)
        rule = ""
        if route.table not in (0, MAIN_TABLE, MAIN_TABLE + 1, MAIN_TABLE - 1):
            rules = _rules(netlink, to)
            rule = next((each.text for each in rules if each.table == route.table), "")
    name = ""
    with suppress(OSError):
        name = socket.if_indextoname(route.device) if route.device else ""
    return Hop(to, name, route.gateway, route.mtu, route.local, rule)


def _rules(netlink: Netlink, to: str) -> list[Rule]:
    """Return the policy rules of an address's family."""
    with suppress(DumpInterruptedError):
        family = socket.AF_INET6 if ":" in to else socket.AF_INET
        return [parse_rule(each) for each in netlink.dump(list_rules(family))]
    return []


def _refusing_rule(netlink: Netlink, to: str, selected_by: Iterable[str]) -> str:
    """Return the policy rule by which packets to an address have no route; "" if none is to blame.

    Args:
        netlink: reaches the kernel.
        to: the address.
        selected_by: words of rules that select the packets.
    """
    rules = [each.text for each in _rules(netlink, to)]
    try:
        netlink.request(get_route(ip_address(to).packed))
    except OSError:  # no packet has a route there
        everywhere = "::/0" if ":" in to else "0.0.0.0/0"
        refusals = [(found, text) for text in rules if (found := _REFUSES.fullmatch(text))]
        return next((text for found, text in refusals if in_cidr(to, found[1] or everywhere)), "")
    return next((text for word in selected_by for text in rules if word in f"{text} "), "")


def _not_forwarded(device: str) -> str:
    """Return the setting by which no packet of IPv4 that a device receives is forwarded; or ""."""
    setting = Path("/proc/sys/net/ipv4/conf", device, "forwarding")
    with suppress(OSError):
        if setting.read_text().strip() == "0":
            return f"packets that come in by {device} are not forwarded, as {setting} is 0"
    return ""


def _is_own(netlink: Netlink, packed: bytes) -> bool:
    """Return whether an address is one of this namespace; that of nobody ("") is not."""
    with suppress(OSError):
        return bool(packed) and parse_route(netlink.request(get_route(packed))[0]).local
    return False


def _neighbour(device: str, address: str) -> str:
    """Return the state of a neighbour that does not answer; "" if it does or is not known."""
    for each in link_state().neighbours if device else ():
        if (each.device, each.address) == (device, address) and each.state in SILENT:
            return each.state
    return ""


def _rp_filter(device: str) -> str:
    """Return the sysctl of rp_filter that counts for a device; "" if it is off."""
    for name in (device, "all"):
        with suppress(OSError):
            value = Path("/proc/sys/net/ipv4/conf", name, "rp_filter").read_text().strip()
            if value != "0":
                return f"net.ipv4.conf.{name}.rp_filter={value}"
    return ""


def _full() -> str:
    """Return how full the connection table is, if it is full."""
    with suppress(SysctlError):
        entries, most = usage()
        return f"{entries} of {most} entries" if entries >= most else ""
    return ""
