"""The text of portal rules for iptables, in the spelling of iptables-save. Pure.

Upstream's chain names (facts of the mode: README.md). Every rule is one line and knows its table,
so that what the kernel has and what it should have compare as sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from steersman.model.addresses import join_host_port
from steersman.model.names import Family
from steersman.model.plan import LocalDetector, Verdict
from steersman.modes.userspace.names import Portal
from steersman.proxy.listeners import FrontendKey

NAT, FILTER = "nat", "filter"
CONTAINER, HOST = "KUBE-PORTALS-CONTAINER", "KUBE-PORTALS-HOST"
FIREWALL = "KUBE-PORTALS-FIREWALL"
CHAINS = {NAT: (CONTAINER, HOST), FILTER: (FIREWALL,)}
_PORTALS = '-m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules"'
_NEW = '-m conntrack --ctstate NEW -m comment --comment "kubernetes service portals"'
JUMPS = {
    NAT: (f"-A PREROUTING {_PORTALS} -j {CONTAINER}", f"-A OUTPUT {_PORTALS} -j {HOST}"),
    FILTER: tuple(f"-A {hook} {_NEW} -j {FIREWALL}" for hook in ("INPUT", "FORWARD", "OUTPUT")),
}
_REFUSE = {
    Family.IPV4: "REJECT --reject-with icmp-port-unreachable",
    Family.IPV6: "REJECT --reject-with icmp6-port-unreachable",
}
_UNQUOTED = re.compile(r'--comment (?!")(\S+)')


class Rule(NamedTuple):
    """One line of a table."""

    table: str
    line: str
    """As iptables-save prints it, from `-A`."""


class Kernel(NamedTuple):
    """What a family has of ours."""

    rules: frozenset[Rule]
    """Those in our chains."""
    jumps: frozenset[Rule]
    """Those that lead to our chains from elsewhere."""
    chains: frozenset[tuple[str, str]]
    """Table and name."""

    @property
    def complete(self) -> bool:
        """Whether every chain and every jump is there."""
        return self.chains >= ALL_CHAINS and self.jumps >= ALL_JUMPS


ALL_CHAINS = frozenset((table, chain) for table, chains in CHAINS.items() for chain in chains)
ALL_JUMPS = frozenset(Rule(table, line) for table, lines in JUMPS.items() for line in lines)


def normal(line: str) -> str:
    """A rule as iptables-nft spells it: legacy leaves out the quotes round a single word."""
    return _UNQUOTED.sub(r'--comment "\1"', line)


def portal_rules(key: FrontendKey, portal: Portal, port: int) -> tuple[Rule, ...]:
    """Return the rules of a portal; `port` is the one that its listener is bound to."""
    if portal.verdict is not Verdict.FORWARD:
        target = "DROP" if portal.verdict is Verdict.DROP else _REFUSE[key.family]
        match = _match(key, portal.name, key.address, key.port)
        return (Rule(FILTER, f"-A {FIREWALL} {match} -j {target}"),)
    rules = list(_leading(key, portal, port)) if portal.host else []
    address = portal.host or key.address
    return (*rules, *_guarding(key, portal, address, port if portal.host else key.port))


def _match(key: FrontendKey, name: str, address: str, port: int, source: str = "") -> str:
    where = f"-d {address}/{key.family.bits}"
    protocol = key.protocol.lower()
    match = f'-p {protocol} -m comment --comment "{name}" -m {protocol} --dport {port}'
    return " ".join(filter(None, (source, where, match)))


def _leading(key: FrontendKey, portal: Portal, port: int) -> Iterator[Rule]:
    match = _match(key, portal.name, key.address, key.port)
    target = f"DNAT --to-destination {join_host_port(portal.host, port)}"
    for chain in (CONTAINER, HOST):
        yield Rule(NAT, f"-A {chain} {match} -j {target}")


def _guarding(key: FrontendKey, portal: Portal, address: str, port: int) -> Iterator[Rule]:
    """Who is kept from the listener: those who come not by the portal, and those not wanted."""

    def rule(target: str, more: str = "", source: str = "") -> Rule:
        words = (f"-A {FIREWALL}", _match(key, portal.name, address, port, source), more)
        return Rule(FILTER, " ".join(filter(None, (*words, f"-j {target}"))))

    if portal.host:
        yield rule("DROP", "-m conntrack ! --ctstate DNAT")
    if portal.insiders is not None:
        source = _no_pod(portal.insiders)
        if source.startswith("! -i"):  # iptables-save prints interfaces after addresses
            match = rule("DROP", "-m addrtype ! --src-type LOCAL").line
            yield Rule(FILTER, match.replace(" -p ", f" {source} -p ", 1))
        else:
            yield rule("DROP", "-m addrtype ! --src-type LOCAL", source)
    for cidr in portal.source_ranges:
        yield rule("RETURN", source=f"-s {cidr}")
    if portal.source_ranges:
        yield rule("DROP")


def _no_pod(detector: LocalDetector) -> str:
    if detector.cidr:
        return f"! -s {detector.cidr}"
    if detector.interface:
        return f"! -i {detector.interface}"
    return f"! -i {detector.interface_prefix}+" if detector.interface_prefix else ""


def parse(text: str) -> Kernel:
    """Find what is ours in what iptables-save printed."""
    rules, jumps, chains, table = set(), set(), set(), ""
    for line in text.splitlines():
        ours = CHAINS.get(table, ())
        words = line.split()
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith(":") and words[0][1:] in ours:
            chains.add((table, words[0][1:]))
        elif line.startswith("-A ") and words[1] in ours:
            rules.add(Rule(table, normal(line)))
        elif line.startswith("-A ") and words[-1] in ours:
            jumps.add(Rule(table, normal(line)))
    return Kernel(frozenset(rules), frozenset(jumps), frozenset(chains))


def write(
    removed: Iterable[Rule],
    added: Iterable[Rule],
    *,
    fresh: frozenset[Rule] | None = None,
    gone: Kernel | None = None,
) -> str:
    """Write the input of `iptables-restore --noflush`; "" for nothing.

    Args:
        removed: rules to delete.
        added: rules to append.
        fresh: given, make the chains (or empty them) and their jumps; these jumps are there.
        gone: given, remove the chains and jumps that this has.
    """
    drop, append = _by_table(removed), _by_table(added)
    lines: list[str] = []
    for table in (FILTER, NAT):
        part = _table(table, drop.get(table, []), append.get(table, []), fresh, gone)
        if part:
            lines += [f"*{table}", *part, "COMMIT"]
    return "\n".join([*lines, ""]) if lines else ""


def _by_table(rules: Iterable[Rule]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for table, line in rules:
        found.setdefault(table, []).append(line)
    return found


def _table(
    table: str,
    removed: list[str],
    added: list[str],
    fresh: frozenset[Rule] | None,
    gone: Kernel | None,
) -> list[str]:
    lines: list[str] = []
    if gone is not None:
        chains = sorted(chain for where, chain in gone.chains if where == table)
        lines += [f":{chain} - [0:0]" for chain in chains]
        lines += _delete(rule.line for rule in sorted(gone.jumps) if rule.table == table)
        return [*lines, *(f"-X {chain}" for chain in chains)]
    if fresh is not None:
        lines += [f":{chain} - [0:0]" for chain in CHAINS[table]]
        lines += _delete(rule.line for rule in sorted(fresh) if rule.table == table)
        lines += [line.replace("-A", "-I", 1) for line in JUMPS[table]]
    return [*lines, *_delete(removed), *added]


def _delete(lines: Iterable[str]) -> list[str]:
    return [line.replace("-A", "-D", 1) for line in lines]
