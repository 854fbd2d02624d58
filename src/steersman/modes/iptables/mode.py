"""The iptables mode: pure rendering and the kernel put together behind the seam of modes/base."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from steersman.host.exec import Exec, SubprocessExec
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.base import ByOthers, Mode, Support
from steersman.modes.iptables.accounting import COUNTERS, Accounting, counts, ends
from steersman.modes.iptables.names import is_kubelets
from steersman.modes.iptables.parse import parse
from steersman.modes.iptables.render import Features, render_service
from steersman.modes.iptables.render_node import render_node
from steersman.modes.iptables.script import write_runs
from steersman.netfilter.generation import ForeignChanges, digest_rules
from steersman.netfilter.iptables import Iptables, choose_tool
from steersman.netfilter.names import RuleKey
from steersman.netfilter.rule_text import LIMITS, Run

_TCP_LIBERAL = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")


class IptablesOptions(msgspec.Struct, frozen=True):
    """What may be set about this mode."""

    variant: str = ""
    """`nft`, `legacy`, or "" for the one that this machine uses."""
    features: Features | None = None
    """What rules may use; None: `probe` finds out."""
    leftovers: bool = False
    """Only to remove what is left: no table is created by asking, kubelet's objects are passed
    over."""
    lock_wait: int = 5
    """Seconds to wait for the lock of iptables-legacy."""


class IptablesMode(Mode):
    """Programs Services as iptables rules (behaviour 8), with the iptables of this machine."""

    name = "iptables"
    traits = Traits(
        refuses_node_ports_everywhere=True,
        spares_own_external_traffic=True,
        localhost_node_ports=True,
    )

    def __init__(
        self,
        execute: Exec,
        options: IptablesOptions | None = None,
        accounting: Accounting | None = None,
    ) -> None:
        """Make the mode; nothing is run before `probe`, `read` or `apply`.

        Args:
            execute: how to run programs.
            options: what may be set.
            accounting: the packet counters where these programs run; without it, and if programs
                run elsewhere than we do, rules do not count.
        """
        self._execute = execute
        here = isinstance(execute, SubprocessExec) and not execute.prefix
        self._here = here
        self._accounting = accounting or (Accounting() if here else None)
        self._options = options or IptablesOptions()
        self.features = self._options.features or Features()
        self.families: tuple[Family, ...] = tuple(Family)
        """The families that can be served, as far as known."""
        self._iptables: Iptables | None = None
        self._foreign: ForeignChanges | None = None
        self._spelled: dict[int, dict[str, str]] = {}
        self._held: frozenset[tuple[int, str, str]] = frozenset()
        self._left: set[RuleKey] = set()

    @property
    def variant(self) -> str:
        """`nft` or `legacy`; "" before `probe`."""
        return self._iptables.tool.variant if self._iptables else ""

    async def probe(self) -> Support:
        """Find the iptables to use and what it can do."""
        options = self._options
        choice = await choose_tool(self._execute, options.variant, leftovers=options.leftovers)
        if choice.tool is None:
            return Support(usable=False, missing=choice.missing)
        self.families = choice.families
        iptables = Iptables(self._execute, choice.tool, self._options.lock_wait)
        if self._options.features is None:
            self.features = Features(
                random_fully=choice.tool.random_fully,
                nfacct=await self._can_account(iptables),
                tcp_liberal=_tcp_liberal(),
            )
        self._iptables = iptables
        if self._here and choice.tool.variant == "nft":
            with suppress(OSError):
                self._foreign = ForeignChanges()
        return Support(usable=True, missing=choice.missing)

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the fixed part, in the families that can be served."""
        families = tuple(family for family in settings.families if family in self.families)
        return render_node(msgspec.structs.replace(settings, families=families), self.features)

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render one ServicePort's part."""
        if plan.key.family not in self.families:
            return {}
        return render_service(plan, settings, self.features)

    async def read(self) -> Ruleset:
        """Return what the kernel has of ours; see `Mode.read`."""
        iptables = await self._probed()
        ruleset: dict[RuleKey, str] = {}
        held: set[tuple[int, str, str]] = set()
        for family in self.families:
            text = await iptables.save(family)
            found = await asyncio.to_thread(parse, text, int(family))
            ruleset.update(found.ruleset)
            self._spelled[int(family)] = found.spelled
            held.update((int(family), table, chain) for table, chain in found.held)
        self._held = frozenset(held)
        for key in self._left & ruleset.keys():
            del ruleset[key]
        if self._options.leftovers:
            return {key: body for key, body in ruleset.items() if not is_kubelets(key)}
        return ruleset

    async def fingerprint(self) -> Hashable:
        """Return a token that differs if other programs may have changed the rules."""
        iptables = await self._probed()
        if self._foreign is not None:
            return ByOthers(self._foreign.token())
        texts = [await iptables.save(family) for family in self.families]
        return await asyncio.to_thread(digest_rules, texts)

    async def apply(self, change: Diff) -> None:
        """Carry out a Diff; see `Mode.apply`. One run per family, unless it is a very large one."""
        iptables = await self._probed()
        if self._accounting and counts(change):
            self._accounting.create()
        change = self._without_left(change)
        spelled = {k: v for words in self._spelled.values() for k, v in words.items()}
        limits = LIMITS[iptables.tool.variant]
        running: asyncio.Task[None] | None = None
        try:
            for run in write_runs(change, limits, spelled, self._held):  # written while one runs
                if running is not None:
                    await running
                running = asyncio.create_task(self._restore(iptables, run))
                await asyncio.sleep(0)
            if running is not None:
                await running
        finally:
            if running is not None and not running.done():  # cancelled: nothing is left running
                running.cancel()
                await asyncio.wait((running,))
        if self._accounting and ends(change):
            await self._accounting.delete()

    async def _can_account(self, iptables: Iptables) -> bool:
        """Return whether rules may count packets with `-m nfacct`."""
        if self._accounting is None or not self._accounting.supported():
            return False
        return all([await iptables.knows_nfacct(family) for family in self.families])

    def packets(self) -> Mapping[str, int]:
        """Return packets by counter, 0 if no rule needed it yet; {} if rules do not count."""
        if not (self._accounting and self.features.nfacct):
            return {}
        return dict.fromkeys(COUNTERS, 0) | self._accounting.packets()

    async def _restore(self, iptables: Iptables, run: Run) -> None:
        if self._foreign is not None:
            self._foreign.check()
        await iptables.restore(run)
        if self._foreign is not None:
            self._foreign.check(run.text.count("\nCOMMIT\n"))

    async def _probed(self) -> Iptables:
        if self._iptables is None:
            support = await self.probe()
            if self._iptables is None:
                raise BusyError(" ".join(support.missing))
        return self._iptables

    def _without_left(self, change: Diff) -> Diff:
        """Leave what is shared with kubelet where it is, and from then on out of sight.

        Kubelet or this process may have written it, so it is never removed (behaviour 8.1);
        were it read back, every diff would try again.
        """
        back = self._left & change.added.keys()
        self._left -= back
        self._left.update(filter(is_kubelets, change.removed))
        if not back:
            return change
        added = {key: value for key, value in change.added.items() if key not in back}
        return Diff(added, change.removed, change.changed)


def _tcp_liberal() -> bool:
    try:
        return _TCP_LIBERAL.read_text().strip() not in ("", "0")
    except OSError:
        return False
