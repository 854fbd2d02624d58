"""Portals made of iptables rules; iptables_rules.py has their text."""

from __future__ import annotations

from collections.abc import Iterable

from steersman.host.exec import Exec
from steersman.model.names import Family
from steersman.modes.base import Support, probed
from steersman.modes.userspace import ALL_CHAINS
from steersman.modes.userspace.iptables_rules import (
    FoundRules,
    Rule,
    change,
    parse,
    portal_rules,
    removal,
    whole,
)
from steersman.modes.userspace.render import STRAY, Portal, StrayKey
from steersman.modes.userspace.rule_portals import RulePortals
from steersman.netfilter.iptables.restore import UNCUT, Step, write_steps
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
        """As of the last `read_family`."""

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

    def probed_families(self) -> tuple[Family, ...]:
        """Find the iptables to use, unless that is done."""
        self._probed()
        return self.families

    def read_family(self, family: Family) -> tuple[bool | None, frozenset[Rule]]:
        """Read by iptables-save."""
        kernel = self._found[family] = parse(self._probed().save(int(family)))
        partial = bool(kernel.chains or kernel.jumps)
        return kernel.complete or (None if partial else False), kernel.rules

    def parts_of(self, key: FrontendKey, portal: Portal, port: int) -> tuple[Rule, ...]:
        """Return the rules of a portal."""
        return portal_rules(key, portal, port)

    def to_stray(self, family: Family, part: Rule) -> StrayKey:
        """Return the key of a rule whose portal is not known."""
        return StrayKey(STRAY, family, part.table, part.line)

    def from_stray(self, key: StrayKey) -> Rule:
        """Return the rule of such a key."""
        return Rule(key.where, key.text)

    def write_all(self, family: Family, parts: Iterable[Rule]) -> None:
        """Create or flush the chains, and write all portals."""
        self._restore(family, whole(parts, self._read(family).jumps))

    def write_change(self, family: Family, removed: Iterable[Rule], added: Iterable[Rule]) -> bool:
        """Delete rules and append others: none can be replaced without its number."""
        self._restore(family, change(removed, added))
        return True

    def remove_all(self, family: Family) -> None:
        """Remove our chains, and the jumps to them."""
        self._restore(family, removal(self._read(family)))

    def _read(self, family: Family) -> FoundRules:
        return self._found.get(family, FoundRules())

    def _restore(self, family: Family, steps: list[Step]) -> None:
        for run in write_steps({int(family): steps} if steps else {}, UNCUT, {}):
            self._probed().restore(run)
