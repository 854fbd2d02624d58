"""Portals made of nftables objects, for machines without iptables; nft_rules.py has their text."""

from __future__ import annotations

from collections.abc import Iterable

from steersman.host.exec import Result, RunTool, tool_result
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.modes.base import Support
from steersman.modes.userspace import TABLE
from steersman.modes.userspace.nft_rules import (
    Chain,
    Element,
    Object,
    base,
    change,
    objects,
    parse,
    remove,
    table_of,
    whole,
)
from steersman.modes.userspace.render import STRAY, Portal, StrayKey
from steersman.modes.userspace.rule_portals import RulePortals
from steersman.netfilter.nft.tables import table_left
from steersman.proxy.listeners import FrontendKey

_NO_TABLE = "No such file or directory"
_TIMEOUT = 60.0
_PROBE = f"add table ip {TABLE}\n"


class NftPortals(RulePortals[Object]):
    """The portals of this node, written by nft."""

    variant = "nftables"
    own_tables = frozenset({TABLE})

    def __init__(self, run: RunTool) -> None:
        """Make portals; nothing is run before `probe`."""
        super().__init__()
        self._run = run
        self.families = tuple(Family)

    def probe(self) -> Support:
        """Check whether nft can be used.

        This lists nothing: nft reads all rules for `list tables`, again and again while other
        programs change them, so that on a busy node it only ends by its timeout.
        """
        try:
            result = self._nft("--check", "-f", "-", stdin=_PROBE)
        except BusyError as error:
            return Support(usable=False, missing=(f"{error}.",))
        if result.returncode:
            return Support(usable=False, missing=(f"nft does not work: {result.message}.",))
        return Support(usable=True)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for our tables."""
        return table_left(TABLE, families)

    def read_family(self, family: Family) -> tuple[bool | None, frozenset[Object]]:
        """Read our table by nft."""
        result = self._nft("-nn", "list", "table", *table_of(family).split())
        if result.returncode:
            if _NO_TABLE not in result.message:
                raise BusyError(f"nft cannot list the portals: {result.message}")
            return False, frozenset()
        have = parse(result.stdout.decode(errors="replace"))
        return base(family) <= have or None, have - base(family)

    def parts_of(self, key: FrontendKey, portal: Portal, port: int) -> frozenset[Object]:
        """Return the objects of a portal."""
        return objects(key, portal, port)

    def to_stray(self, family: Family, part: Object) -> StrayKey:
        """Return the key of an object whose portal is not known."""
        at = (part.map, part.text) if isinstance(part, Element) else ("", part.name)
        return StrayKey(STRAY, family, *at)

    def from_stray(self, key: StrayKey) -> Object:
        """Return the object of such a key."""
        return Element(key.where, key.text) if key.where else Chain(key.text, ())

    def write_all(self, family: Family, parts: Iterable[Object]) -> None:
        """Replace the whole table."""
        self._write(whole(family, parts))

    def write_change(
        self, family: Family, removed: Iterable[Object], added: Iterable[Object]
    ) -> bool:
        """Write elements and chains; a refusal means that another program has changed the table."""
        text = change(family, removed, added)
        return not text or not self._nft("-f", "-", stdin=text).returncode

    def remove_all(self, family: Family) -> None:
        """Remove our table."""
        self._write(remove(family))

    def _write(self, text: str) -> None:
        result = self._nft("-f", "-", stdin=text)
        if result.returncode:
            raise ApplyError(f"nft: {result.message or f'exit status {result.returncode}'}")

    def _nft(self, *words: str, stdin: str = "") -> Result:
        argv, data = ["nft", *words], stdin.encode()
        return tool_result(self._run, argv, data, package="nftables", timeout=_TIMEOUT)
