"""The iptables rules of portals, in the spelling of iptables-save. Pure.

Upstream's chains lead clients to the listeners; a chain of ours drops and rejects (README.md has
the facts). Every rule is one line and knows its table, so that the rules in the kernel and the
wanted ones compare as sets.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from steersman.model.addresses import join_host_port
from steersman.model.plan import Verdict
from steersman.modes.userspace import (
    ALL_CHAINS,
    CHAINS,
    CONTAINER,
    FILTER,
    FIREWALL,
    HOST,
    NAT,
)
from steersman.modes.userspace.render import Portal
from steersman.netfilter.iptables import saved
from steersman.netfilter.iptables.names import REJECT
from steersman.netfilter.iptables.restore import Step
from steersman.proxy.listeners import FrontendKey

# Upstream's jumps, and ours for new connections.
_PORTALS = '-m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules"'
_COMMENT = '-m comment --comment "kubernetes service portals"'
_NEW = f"-m conntrack --ctstate NEW {_COMMENT}"
JUMPS = {
    NAT: (f"-A PREROUTING {_PORTALS} -j {CONTAINER}", f"-A OUTPUT {_PORTALS} -j {HOST}"),
    FILTER: tuple(f"-A {hook} {_NEW} -j {FIREWALL}" for hook in ("INPUT", "FORWARD", "OUTPUT")),
}
# The end of the firewall has a guard for each portal, which drops clients that came to its listener
# by no portal. These rules before the guards keep all other connections from them: with 10,000
# portals those would take twice as long to be made. A chain of their own would be left behind when
# an older version takes over; strange rules in this chain it removes.
_UNGUARDED = tuple(
    f"-A {FIREWALL} {match} {_COMMENT} -j RETURN"
    for match in ("-m conntrack --ctstate DNAT", "-m addrtype ! --dst-type LOCAL")
)
_GUARD = " -m conntrack ! --ctstate DNAT -j DROP"
_PHASE = (0, 0)  # one run has it all: a guard is in force before clients come to its listener
_UNQUOTED = re.compile(r'--comment (?!")(\S+)')


class Rule(NamedTuple):
    """One line of a table."""

    table: str
    line: str
    """As iptables-save prints it, from `-A`."""


ALL_JUMPS = frozenset(Rule(table, line) for table, lines in JUMPS.items() for line in lines)
ALL_UNGUARDED = frozenset(Rule(FILTER, line) for line in _UNGUARDED)


class FoundRules(NamedTuple):
    """Our rules of a family in the kernel."""

    rules: frozenset[Rule] = frozenset()
    """The rules of portals, and strange ones, in our chains."""
    jumps: frozenset[Rule] = frozenset()
    """The rules of other chains that lead to ours."""
    chains: frozenset[tuple[str, str]] = frozenset()
    """Table and name."""
    unguarded: frozenset[Rule] = frozenset()
    """The rules that keep connections from the guards."""

    @property
    def complete(self) -> bool:
        """Whether all is there that belongs to no portal."""
        return (
            self.chains >= ALL_CHAINS
            and self.jumps >= ALL_JUMPS
            and self.unguarded >= ALL_UNGUARDED
        )


def parse(text: str) -> FoundRules:
    """Find our rules in the output of iptables-save."""
    rules: set[Rule] = set()
    jumps: set[Rule] = set()
    found: set[tuple[str, str]] = set()
    for table, name, policy, lines in saved.chains(text):
        ours = CHAINS.get(table, ())
        if name in ours:
            found |= {(table, name)} if policy else set()
            rules |= {Rule(table, normalized(line)) for line in lines}
        else:  # rules of other chains may jump to ours
            to_us = (line for line in lines if line.split()[-1] in ours)
            jumps |= {Rule(table, normalized(line)) for line in to_us}
    unguarded = rules & ALL_UNGUARDED
    return FoundRules(
        frozenset(rules - unguarded), frozenset(jumps), frozenset(found), frozenset(unguarded)
    )


def normalized(line: str) -> str:
    """Return a rule in the spelling of iptables-nft: legacy omits the quotes of a single word."""
    return _UNQUOTED.sub(r'--comment "\1"', line)


def portal_rules(key: FrontendKey, portal: Portal, port: int) -> tuple[Rule, ...]:
    """Return the rules of a portal whose listener is bound to a port."""
    if portal.verdict is not Verdict.FORWARD:
        target = "DROP" if portal.verdict is Verdict.DROP else REJECT[key.family]
        match = _match(key, portal.name, key.address, key.port)
        return (Rule(FILTER, f"-A {FIREWALL} {match} -j {target}"),)
    rules: list[Rule] = []
    address, at, way = key.address, key.port, ""
    if portal.host:
        # Lead clients to the listener, and keep those away that did not come by the portal.
        match = _match(key, portal.name, address, at)
        target = f"DNAT --to-destination {join_host_port(portal.host, port)}"
        rules += [Rule(NAT, f"-A {name} {match} -j {target}") for name in (CONTAINER, HOST)]
        address, at = portal.host, port
        match = _match(key, portal.name, address, at)
        rules.append(Rule(FILTER, f"-A {FIREWALL} {match}{_GUARD}"))
        way = " -m conntrack --ctstate DNAT"
    # Only pods and this node: drop clients that are neither.
    if portal.internal_only is not None:
        detector = portal.internal_only
        source = f"! -s {detector.cidr}" if detector.cidr else ""
        match = _match(key, portal.name, address, at, source)
        if not detector.cidr and (detector.interface or detector.interface_prefix):
            interface = detector.interface or f"{detector.interface_prefix}+"
            # iptables-save prints interfaces after addresses.
            match = match.replace(" -p ", f" ! -i {interface} -p ", 1)
        local = "-m addrtype ! --src-type LOCAL"
        rules.append(Rule(FILTER, f"-A {FIREWALL} {match} {local} -j DROP"))
    # Source ranges: clients in one of them return before the last rule drops all others, among them
    # those that came to the listener by no portal: returning takes them past its guard.
    for cidr in portal.source_ranges:
        match = _match(key, portal.name, address, at, f"-s {cidr}")
        rules.append(Rule(FILTER, f"-A {FIREWALL} {match}{way} -j RETURN"))
    if portal.source_ranges:
        match = _match(key, portal.name, address, at)
        rules.append(Rule(FILTER, f"-A {FIREWALL} {match} -j DROP"))
    return tuple(rules)


def _match(key: FrontendKey, name: str, address: str, port: int, source: str = "") -> str:
    destination = f"-d {address}/{key.family.bits}"
    protocol = key.protocol.lower()
    match = f'-p {protocol} -m comment --comment "{name}" -m {protocol} --dport {port}'
    return " ".join(filter(None, (source, destination, match)))


def change(removed: Iterable[Rule], added: Iterable[Rule]) -> list[Step]:
    """Return the steps of iptables-restore that delete rules, and then add others.

    Guards come to the end of the firewall, all other rules of it to its top.
    """
    removed, added = list(removed), list(added)
    steps = []
    for table in CHAINS:
        new = [rule.line for rule in added if rule.table == table]
        top = [line for line in new if table == FILTER and not line.endswith(_GUARD)]
        last = [line for line in new if table != FILTER or line.endswith(_GUARD)]
        gone = [rule.line for rule in removed if rule.table == table]
        if gone or new:
            steps.append(Step(_PHASE, table, delete=gone, insert=top, last=last))
    return steps


def whole(added: Iterable[Rule], jumps: Collection[Rule]) -> list[Step]:
    """Return the steps that create the chains, or empty them, and add the rules of all portals.

    Args:
        added: these rules.
        jumps: those to the chains that exist. They may be further down, so they are replaced.
    """
    steps = _without(jumps)
    for table, names in CHAINS.items():
        for name in names:
            append = "\n".join(_UNGUARDED) if name == FIREWALL else ""
            steps.append(Step(_PHASE, table, declare=name, append=append))
        steps.append(Step(_PHASE, table, insert=JUMPS[table]))
    return [*steps, *change((), added)]


def removal(found: FoundRules) -> list[Step]:
    """Return the steps that remove our chains, and the jumps to them."""
    chains = (Step(_PHASE, table, declare=name, remove=name) for table, name in found.chains)
    return [*chains, *_without(found.jumps)]


def _without(jumps: Collection[Rule]) -> list[Step]:
    return [Step(_PHASE, rule.table, delete=[rule.line]) for rule in sorted(jumps)]
