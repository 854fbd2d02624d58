"""Checks of connection tracking: a full table, failures, entries that lead to former endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from ipaddress import ip_address

from steersman.compile.conntrack import destinations_at, is_concerned, served_ports
from steersman.compile.conntrack import stale as describe_stale
from steersman.host.sysctl import SysctlError
from steersman.model.addresses import join_host_port
from steersman.model.names import PROTOCOL_BY_NUMBER
from steersman.netfilter.conntrack.stale import find_stale
from steersman.netfilter.conntrack.usage import usage
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.result import CheckResult, Found, error, ok, skipped, unknown, warning

_NEARLY, _FULL = 0.9, 0.99
_COUNTED = 1.0
"""Seconds between two looks at the counters."""
_STATISTICS = "proc/net/stat/nf_conntrack"
_REMEDY = (
    "raise net.netfilter.nf_conntrack_max (--conntrack-min, --conntrack-max-per-core), or find the "
    "client that opens so many connections: `conntrack -L`"
)
_COUNTERS = {
    "drop": "packets dropped because an entry could not be made",
    "early_drop": "entries dropped to make room",
    "insert_failed": "connections lost because two of them wanted one entry",
}


async def table(context: Context) -> Found:
    """Check that the table has room."""
    try:
        found = usage(context.root)
    except SysctlError as failure:
        return unknown(f"conntrack is not in use: {failure}")
    # The kernel drops one packet of each new connection once the table is full.
    words = f"conntrack has {found.entries} of {found.maximum} entries"
    share = found.entries / max(found.maximum, 1)
    if share >= _FULL:
        text = f"the conntrack table is full ({found.entries} of {found.maximum} entries): new "
        return error(f"{text}connections are dropped", remedy=_REMEDY)
    if share >= _NEARLY:
        return warning(f"{words}: it is nearly full", remedy=_REMEDY, suspect=True)
    return ok(words)


def statistics(text: str) -> Mapping[str, int]:
    """Sum the counters of all CPUs.

    Args:
        text: content of /proc/net/stat/nf_conntrack: names, then a line of hexadecimal numbers for
            each CPU.
    """
    head, *rows = text.splitlines()
    names = head.split()
    sums = dict.fromkeys(names, 0)
    for row in rows:
        for name, value in zip(names, row.split(), strict=False):
            sums[name] += int(value, 16)
    return sums


async def counters(context: Context) -> Found:
    """Check that no connection is lost in conntrack, now or since the start."""
    before = statistics(context.read(_STATISTICS))
    await asyncio.sleep(_COUNTED)
    after = statistics(context.read(_STATISTICS))
    results: list[CheckResult] = []
    quiet = []
    for name, words in _COUNTERS.items():
        total = after.get(name, 0)
        # Only growth counts: a table that was full last month is no trouble today.
        grown = total - before.get(name, 0)
        if grown > 0:
            text = f"{grown} {words} within {_COUNTED:g} s"
            evidence = f"{name} in /{_STATISTICS} is {total}"
            results.append(warning(text, evidence, remedy=_REMEDY, suspect=True))
        elif total:
            quiet.append(f"{name}: {total} {words} since the start")
    return results or ok("no connection was lost in conntrack just now", *quiet)


async def stale(context: Context) -> Found:
    """Look for entries that lead clients of the Service to former endpoints."""
    name, plan, snapshot = context.question.service, context.world.plan, context.world.snapshot
    assert name is not None
    service = snapshot.services.get(name)
    if service is None or not is_concerned(service):
        return skipped("connections of TCP are not redirected: they end with their endpoint")
    lines = []
    for family in context.families:
        ports = tuple(served_ports(name, plan, snapshot, family))
        # Addresses of Services on the number of a node port are not that node port.
        own = destinations_at({port.node_port for port in ports}, plan.services.values(), family)
        described = describe_stale(family, ports, tuple(own))
        for to, source in await asyncio.to_thread(find_stale, described):
            protocol = PROTOCOL_BY_NUMBER[to[0]]
            lines.append(f"{protocol} to {_printed(to[1:])} goes to {_printed(source)}")
    if not lines:
        return ok("no entry leads to a former endpoint")
    return error(
        f"conntrack still leads clients of {name} to former endpoints: {lines[0]}",
        *lines,
        remedy="a running steersman deletes such entries after each change; by hand: "
        "`conntrack -D -p udp --orig-dst ADDRESS`",
    )


def _printed(packed: bytes) -> str:
    """Return an address with a port, both in network byte order."""
    return join_host_port(str(ip_address(packed[:-2])), int.from_bytes(packed[-2:], "big"))
