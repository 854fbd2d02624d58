"""What a Windows machine is like: interfaces and their addresses as netsh lists them.

Windows' words are translated, so only what no language changes is read: where an interface begins
(its name, in quotes or after a number and a colon), and how addresses look.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping

from steersman.host.exec import Exec, SubprocessExec
from steersman.host.hostname import hostname
from steersman.model.addresses import canonical_ip, family_of
from steersman.model.inputs import HostFacts
from steersman.model.names import Family

SERVICE_INTERFACE = "vEthernet (HNS Internal NIC)"
SERVICE_INTERFACE_VARIABLE = "INTERFACE_TO_ADD_SERVICE_IP"
"""Environment variable that names another interface, as upstream's did."""
SINGLE = {Family.IPV4: "/32", Family.IPV6: "/128"}
"""Prefix of an address that is alone in its network: so Service addresses are added."""
_PLACES = {Family.IPV4: "ipv4", Family.IPV6: "ipv6"}
_SECTIONS = {
    Family.IPV4: re.compile(r'\S.*"(?P<name>[^"]+)"\s*'),
    Family.IPV6: re.compile(r"\S.*? \d+: (?P<name>.*\S)\s*"),
}
_PREFIX = re.compile(r"[0-9.]+/(\d+)")
_LOOK_AGAIN = 10.0  # seconds; netsh tells no news


def service_interface(environment: Mapping[str, str]) -> str:
    """The interface that Service addresses are added to."""
    return environment.get(SERVICE_INTERFACE_VARIABLE) or SERVICE_INTERFACE


async def read_facts(execute: Exec | None = None) -> HostFacts:
    """Read everything afresh; addresses of Services, alone in their networks, are left out.

    Raises:
        OSError: netsh cannot be run.
    """
    found: dict[str, tuple[str, ...]] = {}
    for family, place in _PLACES.items():
        argv = ["netsh", "interface", place, "show", "addresses"]
        result = await (execute or SubprocessExec()).run(argv, timeout=30.0)
        for name, address in parse(result.stdout.decode(errors="replace"), family):
            found[name] = (*found.get(name, ()), address)
    ours = service_interface(os.environ)
    found[ours] = tuple(a for a in found.get(ours, ()) if not a.endswith(tuple(SINGLE.values())))
    interfaces = {name: tuple(sorted(found[name])) for name in sorted(found) if found[name]}
    ipv6 = any(":" in address for some in interfaces.values() for address in some)
    return HostFacts(hostname=hostname(), interfaces=interfaces, ipv6=ipv6)


def parse(text: str, family: Family) -> Iterator[tuple[str, str]]:
    """Yield each interface and address with the length of its prefix, as netsh lists them.

    Of IPv4, an address is what is followed by a line with its prefix (gateways are not); of IPv6,
    the last word of a line, and how long its prefix is netsh does not say: 64 is taken.
    """
    name, lines = "", text.splitlines()
    for line, following in zip(lines, [*lines, ""][1:], strict=True):
        if section := _SECTIONS[family].fullmatch(line):
            name = section["name"]
            continue
        last = line.split()[-1].partition("%")[0] if line.split() else ""
        prefix = _PREFIX.search(following) if family is Family.IPV4 else None
        address = canonical_ip(last)
        if not name or not address or family_of(address) is not family:
            continue
        if family is Family.IPV6:
            yield name, f"{address}/64"
        elif prefix:
            yield name, f"{address}/{prefix[1]}"


async def watch_addresses(look_again: float = _LOOK_AGAIN) -> AsyncIterator[HostFacts]:
    """Yield the facts now, and again each time that they have become different."""
    facts = await read_facts()
    yield facts
    while True:
        await asyncio.sleep(look_again)
        latest = await read_facts()
        if latest != facts:
            facts = latest
            yield facts
