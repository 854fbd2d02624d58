"""The text of portal rules for nft: a table of ours in each family, always written whole. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping

from steersman.model.addresses import join_host_port
from steersman.model.names import Family
from steersman.model.plan import Detector, Verdict
from steersman.modes.userspace.names import FrontendKey, Portal

TABLE = "kube-portals"
_WORDS = {Family.IPV4: "ip", Family.IPV6: "ip6"}
_NAME_LENGTH = 120  # bytes; nft takes comments up to 128
_CHAINS = """table {family} kube-portals {{
 chain firewall {{
{firewall}
 }}
 chain container {{
  type nat hook prerouting priority dstnat; policy accept;
{leading}
 }}
 chain host {{
  type nat hook output priority -100; policy accept;
{leading}
 }}
 chain input {{
  type filter hook input priority filter; policy accept;
  ct state new jump firewall
 }}
 chain forward {{
  type filter hook forward priority filter; policy accept;
  ct state new jump firewall
 }}
 chain output {{
  type filter hook output priority filter; policy accept;
  ct state new jump firewall
 }}
}}
"""


def table_of(family: Family) -> str:
    """The table of a family, as nft names it."""
    return f"{_WORDS[family]} {TABLE}"


def remove(family: Family) -> str:
    """The input of nft that removes the table, there or not."""
    return f"table {table_of(family)}\ndelete table {table_of(family)}\n"


def replace(
    family: Family, portals: Mapping[FrontendKey, Portal], ports: Mapping[FrontendKey, int]
) -> str:
    """The input of nft that puts these portals in place of all others, in one transaction.

    Args:
        family: the family; keys of others must not be given.
        portals: the portals by destination.
        ports: the ports that their listeners are bound to.
    """
    firewall: list[str] = []
    leading: list[str] = []
    for key, portal in portals.items():
        firewall += _guarding(key, portal, ports[key])
        if portal.verdict is Verdict.FORWARD and portal.host:
            to = join_host_port(portal.host, ports[key])
            leading.append(f"{_match(key, key.address, key.port)} dnat to {to}{_comment(portal)}")
    words = _WORDS[family]
    text = _CHAINS.format(family=words, firewall=_lines(firewall), leading=_lines(leading))
    return remove(family) + text


def _lines(rules: Iterable[str]) -> str:
    return "\n".join(f"  {rule}" for rule in rules)


def _match(key: FrontendKey, address: str, port: int) -> str:
    return f"{_WORDS[key.family]} daddr {address} {key.protocol.lower()} dport {port}"


def _comment(portal: Portal) -> str:
    return f' comment "{portal.name[:_NAME_LENGTH]}"'


def _guarding(key: FrontendKey, portal: Portal, port: int) -> Iterable[str]:
    """Who is refused, and who is kept from the listener."""
    comment = _comment(portal)
    if portal.verdict is not Verdict.FORWARD:
        yield f"{_match(key, key.address, key.port)} {portal.verdict}{comment}"
        return
    match = _match(key, portal.host or key.address, port if portal.host else key.port)
    if portal.host:
        yield f"{match} ct status & dnat != dnat drop{comment}"
    if portal.insiders is not None:
        pods = _no_pod(_WORDS[key.family], portal.insiders)
        yield f"{match} {pods}fib saddr type != local drop{comment}"
    if portal.source_ranges:
        ranges = ", ".join(_united(portal.source_ranges))
        yield f"{match} {_WORDS[key.family]} saddr != {{ {ranges} }} drop{comment}"


def _no_pod(words: str, detector: Detector) -> str:
    if detector.cidr:
        return f"{words} saddr != {detector.cidr} "
    if detector.interface:
        return f'iifname != "{detector.interface}" '
    return f'iifname != "{detector.interface_prefix}*" ' if detector.interface_prefix else ""


def _united(cidrs: Iterable[str]) -> Iterable[str]:
    """The same addresses without overlaps, which nft refuses."""
    networks = [ipaddress.ip_network(cidr) for cidr in cidrs]
    return map(str, ipaddress.collapse_addresses(networks))  # type: ignore[type-var]  # one family
