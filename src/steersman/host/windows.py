"""Interfaces and addresses of a Windows machine, as netsh lists them; facts.py adds the rest.

netsh translates its output, so only the parts that no language changes are read: where an interface
begins (its name, in quotes or after a number and a colon), and how addresses look.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Iterator, Mapping

from steersman.host.exec import Exec, SubprocessExec
from steersman.model.addresses import canonical_ip, family_of
from steersman.model.inputs import HostFacts
from steersman.model.names import Family

SERVICE_INTERFACE = "vEthernet (HNS Internal NIC)"
SERVICE_INTERFACE_VARIABLE = "INTERFACE_TO_ADD_SERVICE_IP"
"""Environment variable that names another interface, as in upstream kube-proxy."""
HOST_PREFIXES = {Family.IPV4: "/32", Family.IPV6: "/128"}
"""Prefix of an address that is alone in its network, as Service addresses are added."""
_NAMES = {Family.IPV4: "ipv4", Family.IPV6: "ipv6"}
_SECTIONS = {
    Family.IPV4: re.compile(r'\S.*"(?P<name>[^"]+)"\s*'),
    Family.IPV6: re.compile(r"\S.*? \d+: (?P<name>.*\S)\s*"),
}
_PREFIX = re.compile(r"[0-9.]+/(\d+)")
_POLL_SECONDS = 10.0  # netsh sends no notifications


def service_interface(environment: Mapping[str, str]) -> str:
    """Return the interface that Service addresses are added to."""
    return environment.get(SERVICE_INTERFACE_VARIABLE) or SERVICE_INTERFACE


async def read_network(execute: Exec | None = None) -> HostFacts:
    """Return the facts, without a hostname and without Service addresses.

    Raises:
        OSError: netsh cannot be run.
    """
    found: dict[str, tuple[str, ...]] = {}
    for family, name in _NAMES.items():
        argv = ["netsh", "interface", name, "show", "addresses"]
        result = await (execute or SubprocessExec()).run(argv, timeout=30.0)
        for interface, address in parse(result.stdout.decode(errors="replace"), family):
            found[interface] = (*found.get(interface, ()), address)
    ours = service_interface(os.environ)
    alone = tuple(HOST_PREFIXES.values())
    found[ours] = tuple(a for a in found.get(ours, ()) if not a.endswith(alone))
    interfaces = {name: tuple(sorted(found[name])) for name in sorted(found) if found[name]}
    ipv6 = any(":" in address for some in interfaces.values() for address in some)
    return HostFacts(hostname="", interfaces=interfaces, ipv6=ipv6)


def parse(text: str, family: Family) -> Iterator[tuple[str, str]]:
    """Yield interfaces and `address/length` from the output of `netsh ... show addresses`.

    An IPv4 address is followed by a line with its prefix; a gateway is not. An IPv6 address is the
    last word of a line; netsh does not list its prefix length, so 64 is assumed.
    """
    name, lines = "", text.splitlines()
    for line, following in zip(lines, [*lines, ""][1:], strict=True):
        if section := _SECTIONS[family].fullmatch(line):
            name = section["name"]
            continue
        # A scope (`fe80::1%12`) is no part of the address.
        last = line.split()[-1].partition("%")[0] if line.split() else ""
        prefix = _PREFIX.search(following) if family is Family.IPV4 else None
        address = canonical_ip(last)
        if not name or not address or family_of(address) is not family:
            continue
        if family is Family.IPV6:
            yield name, f"{address}/64"
        elif prefix:
            yield name, f"{address}/{prefix[1]}"


async def address_changes(seconds: float = _POLL_SECONDS) -> AsyncGenerator[None]:
    """Yield now and then every few seconds: something may have changed."""
    while True:
        yield
        await asyncio.sleep(seconds)
