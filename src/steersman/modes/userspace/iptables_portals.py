"""Portals made of iptables rules; iptables_rules.py has their text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from itertools import chain

from steersman.host.exec import Exec
from steersman.model.names import Family
from steersman.modes.base import Support, probed
from steersman.modes.userspace import ALL_CHAINS, CHAINS
from steersman.modes.userspace.iptables_rules import (
    FoundRules,
    Rule,
    parse,
    portal_rules,
    write,
)
from steersman.modes.userspace.render import BASE, STRAY, BaseKey, Key, Portal, StrayKey
from steersman.modes.userspace.rule_portals import RulePortals
from steersman.netfilter.iptables.restore import Run
from steersman.netfilter.iptables.tool import Iptables, choose_tool, legacy_left
from steersman.netfilter.nft.tables import known_chains_left
from steersman.proxy.listeners import FrontendKey


class IptablesPortals(RulePortals[Rule]):
    """The portals of this node, written by iptables."""

    def __init__(self, execute: Exec, variant: str = "", *, leftovers: bool = False) -> None:
        """Make portals; nothing is run before `probe`.

        Args:
            execute: runs programs.
            variant: `nft`, `legacy`, or "" for the one in use here.
            leftovers: only to remove leftovers: probing must create no table.
        """
        super().__init__()
        self._execute = execute
        self._variant = variant
        self._leftovers = leftovers
        self._iptables: Iptables | None = None
        """None before a successful `probe`."""
        self._found: dict[Family, FoundRules] = {}
        """As of the last `read_rules`."""

    def probe(self) -> Support:
        """Find the iptables to use."""
        choice = choose_tool(self._execute, self._variant, leftovers=self._leftovers)
        if choice.tool is None:
            return Support(usable=False, missing=choice.missing)
        self.families, self.variant = choice.families, choice.tool.variant
        self._iptables = Iptables(self._execute, choice.tool)
        return Support(usable=True, missing=choice.missing)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for our chains; only iptables-legacy itself can list its own."""
        if self._variant == "legacy":
            return legacy_left(families)
        return known_chains_left(ALL_CHAINS, families)

    def _probed(self) -> Iptables:
        """Return the iptables to use. Raise BusyError if none works."""
        return probed(self.probe, lambda: self._iptables)

    def read_rules(self) -> dict[Key, Portal | str]:
        """Return the portals whose rules are all there, and other rules in our chains."""
        found: dict[Key, Portal | str] = {}
        iptables = self._probed()
        for family in self.families:
            kernel = self._found[family] = parse(iptables.save(int(family)))
            if kernel.complete:
                found[BaseKey(BASE, family)] = ""
            elif kernel.chains or kernel.jumps:
                found[StrayKey(STRAY, family, "", BASE)] = ""  # a part of the base is left
            portals, strays = self.written.compare(family, kernel.rules)
            found.update(portals.items())
            for rule in sorted(strays):
                found[self.stray(family, rule)] = rule.line
        return found

    def parts_of(self, key: FrontendKey, portal: Portal, port: int) -> tuple[Rule, ...]:
        """Return the rules of a portal."""
        return portal_rules(key, portal, port)

    def stray(self, family: Family, part: Rule) -> StrayKey:
        """Return the key of a rule whose portal is not known."""
        return StrayKey(STRAY, family, part.table, part.line)

    def write_rules(
        self,
        family: Family,
        gone: Set[Key],
        new: Mapping[FrontendKey, Collection[Rule]],
        *,
        base: bool,
    ) -> None:
        """Write rules by iptables-restore."""
        iptables = self._probed()
        if family not in self.families:
            return
        kernel = self._found.get(family, FoundRules())
        if base:
            # Create or flush the chains, and write all portals.
            kept = [key for key in self.written.of(family) if key not in gone and key not in new]
            every = chain(self.written.all_parts(kept), *new.values())
            text = write((), every, fresh=kernel.jumps)
        elif gone & {BaseKey(BASE, family), StrayKey(STRAY, family, "", BASE)}:
            text = write((), (), gone=kernel)
        else:
            # A rule cannot be replaced without its number: delete the old and append the new.
            changed = {k: rules for k, rules in new.items() if self.written.parts(k) != rules}
            old = self.written.among(gone | changed.keys())
            strays = [
                Rule(key.where, key.text)
                for key in gone
                if isinstance(key, StrayKey) and key.where in CHAINS
            ]
            removed = chain(self.written.all_parts(old), strays)
            text = write(removed, chain.from_iterable(changed.values()))
        if text:
            iptables.restore(Run(int(family), text))
