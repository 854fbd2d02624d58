"""The iptables mode: rendering, reading and writing put together behind modes/base.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from steersman.failover.watch import FailureWatch
from steersman.host.exec import Exec
from steersman.host.limits import descriptor_limit
from steersman.host.sysctl import SysctlError, read
from steersman.host.worker import Changes
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset, Script
from steersman.model.stats import NodeTotals
from steersman.modes.base import ByOthers, Mode, Requirements, Support, probed
from steersman.modes.iptables.names import (
    FORWARD,
    INVALID_DROPPED,
    LOCALHOST_ACCEPTED,
    OWN_CHAINS,
    is_kubelets,
    is_ours,
)
from steersman.modes.iptables.parse import parse
from steersman.modes.iptables.render import Features, render_service
from steersman.modes.iptables.render_node import render_node
from steersman.modes.iptables.script import write_runs
from steersman.modes.specs import ModeOptions
from steersman.modes.tracer import Tracer
from steersman.netfilter.iptables.names import FILTER, RuleKey
from steersman.netfilter.iptables.restore import LIMITS, UNCUT, Run, restore_scripts
from steersman.netfilter.iptables.saved import digest_rules
from steersman.netfilter.iptables.tool import (
    LOCK,
    Iptables,
    choose_tool,
    legacy_left,
)
from steersman.netfilter.nfacct import PacketCounters
from steersman.netfilter.nft.generations import ForeignChanges, WriterLog
from steersman.netfilter.nft.tables import chains_left

if TYPE_CHECKING:
    from steersman.modes.iptables.words import IptablesWords

COUNTERS = (INVALID_DROPPED, LOCALHOST_ACCEPTED)
COUNTERS_TEXT = "".join(f"{{ pkts = {0:020}, bytes = {0:020} }} = {name};\n" for name in COUNTERS)
"""The packet counters of our rules as input of `nfacct restore`."""
_MOST_RULES = 10_000
"""Rules above which rule by rule takes too long: a new connection passes half of a long list."""
_ENOUGH_DESCRIPTORS = 64
_TCP_LIBERAL = "proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"


class IptablesMode(Mode):
    """Programs Services as rules (behaviour 8) with the iptables of this machine."""

    name = "iptables"
    writers: WriterLog
    traits = Traits(
        refuses_node_ports_everywhere=True,
        spares_own_external_traffic=True,
        localhost_node_ports=True,
    )

    def __init__(
        self,
        execute: Exec,
        options: ModeOptions | None = None,
        counters: PacketCounters | None = None,
        foreign: Callable[[], ForeignChanges] | None = None,
    ) -> None:
        """Create the mode; no program runs before `probe`, `read` or `apply`.

        Args:
            execute: runs programs.
            options: the operator's settings.
            counters: the packet counters where these programs run; None to count no packets.
            foreign: starts to count what others write there, which may raise OSError; None to
                compare all rules.
        """
        self._execute = execute
        self._counters = counters
        self._count_foreign = foreign
        self._options = options or ModeOptions()
        self.features = Features()
        """What rules may use; `probe` detects it."""
        self.families: tuple[Family, ...] = tuple(Family)
        """Families that can be served; all, until `probe` has run."""
        self._iptables: Iptables | None = None
        """None before a successful `probe`."""
        self._foreign: ForeignChanges | None = None
        self.writers = WriterLog()
        # From the last `read`:
        self._spellings: dict[str, str] = {}
        self._referenced: frozenset[tuple[int, str, str]] = frozenset()
        self._hidden: set[RuleKey] = set()  # see `_hide_shared`

    def probe(self) -> Support:
        """Find the iptables to use and its capabilities."""
        options = self._options
        choice = choose_tool(self._execute, options.iptables_variant, leftovers=options.leftovers)
        if choice.tool is None:
            return Support(usable=False, missing=choice.missing)
        self.families = choice.families
        iptables = Iptables(self._execute, choice.tool)
        nfacct = self._counters is not None and self._counters.supported()
        if nfacct:
            nfacct = all(map(iptables.knows_nfacct, self.families))
        tcp_liberal = False
        with suppress(SysctlError):
            tcp_liberal = read(_TCP_LIBERAL) != 0
        self.features = Features(
            random_fully=choice.tool.random_fully,
            nfacct=nfacct,
            tcp_liberal=tcp_liberal,
        )
        self._iptables = iptables
        self.variant = choice.tool.variant
        if self._count_foreign is not None and choice.tool.variant == "nft":
            with suppress(OSError):
                self._foreign = self._count_foreign()
        return Support(usable=True, missing=choice.missing)

    def requirements(self) -> Requirements:
        """Return what rules need: the lock is only that of iptables-legacy."""
        listed_by = {}
        if self._iptables:
            tool = self._iptables.tool
            listed_by = {(tool.variant, each): tool.save_of(each) for each in self.families}
        return Requirements(
            own_jumps=OWN_CHAINS,
            listed_by=listed_by,
            bridge_netfilter=True,
            lock=LOCK if (self.variant or self._options.iptables_variant) == "legacy" else "",
            most_rules=_MOST_RULES,
            instead="`steersman switch` to the nftables mode, whose maps do not get slower",
        )

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the fixed part, in the families that can be served."""
        families = tuple(family for family in settings.families if family in self.families)
        return render_node(msgspec.structs.replace(settings, families=families), self.features)

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render one ServicePort's part."""
        if plan.key.family not in self.families:
            return {}
        return render_service(plan, settings, self.features)

    @cached_property
    def words(self) -> IptablesWords:
        """What prints rules as iptables-save does."""
        from steersman.modes.iptables.words import IptablesWords  # noqa: PLC0415 - rarely used

        return IptablesWords(self.worker, self.read, self._scripts)

    def _scripts(self, have: Ruleset, change: Diff) -> tuple[Script, ...]:
        """Write a Diff as input of iptables-restore, a run per family; counters come first."""
        del have
        runs = write_runs(change, UNCUT, self._spellings, self._referenced)
        command = self._iptables.tool.command if self._iptables else "iptables"
        restores = restore_scripts(runs, command)
        if not needs_counters(change):
            return restores
        return (Script("nfacct", ("nfacct", "restore"), COUNTERS_TEXT), *restores)

    def read(self) -> Ruleset:
        """Return our objects in the kernel; see `Mode.read`."""
        ruleset = self._read_all()
        for key in self._hidden & ruleset.keys():  # see `_hide_shared`
            del ruleset[key]
        if self._options.leftovers:
            return {key: rules for key, rules in ruleset.items() if not is_kubelets(key)}
        return ruleset

    def _probed(self) -> Iptables:
        """Return the iptables to use; `cleanup` and `plan` read without a `probe` of their own."""
        return probed(self.probe, lambda: self._iptables)

    def _read_all(self) -> dict[RuleKey, str]:
        """Return our objects, those that are hidden from `read` too."""
        iptables = self._probed()
        ruleset: dict[RuleKey, str] = {}
        spellings: dict[str, str] = {}
        referenced: set[tuple[int, str, str]] = set()
        for family in self.families:
            found = parse(iptables.save(family), int(family))
            ruleset.update(found.ruleset)
            spellings.update(found.spellings)
            referenced.update((int(family), table, chain) for table, chain in found.referenced)
        self._spellings, self._referenced = spellings, frozenset(referenced)
        return ruleset

    def fingerprint(self) -> Hashable:
        """Return a token that differs if other programs may have changed the rules."""
        iptables = self._probed()
        if self._foreign is not None:
            return ByOthers(self._foreign.token())
        return digest_rules(map(iptables.save, self.families))

    def apply(self, change: Diff) -> None:
        """Carry out a Diff; see `Mode.apply`. One run per family, unless the Diff is very large."""
        iptables = self._probed()
        if self._counters and needs_counters(change):
            self._counters.create()
        change = self._hide_shared(change)
        limits = LIMITS[iptables.tool.variant]
        for run in write_runs(change, limits, self._spellings, self._referenced):
            self._restore(iptables, run)
        if self._counters and removes_everything(change):
            self._counters.delete()

    def changes(self) -> Changes | None:
        """Note which programs write nf_tables rules, for `writers`; none counts as a change.

        Comparing at each of their writes would cost far too much: all rules are read for that.
        """
        # With few descriptors, its socket would take one that iptables-restore needs.
        if self._foreign is None or descriptor_limit() < _ENOUGH_DESCRIPTORS:
            return None
        return self.writers.follow()

    def close(self) -> None:
        """Close the socket of `changes`."""
        self.writers.close()

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for our chains; those of iptables-legacy only its tool can list."""
        if self._options.iptables_variant == "legacy":
            return legacy_left(families)
        return chains_left(is_ours, families)

    def _restore(self, iptables: Iptables, run: Run) -> None:
        """Write one run, and tell its transactions from foreign ones."""
        if self._foreign is not None:
            self._foreign.check()
        self.writers.forget(iptables.restore(run))
        if self._foreign is not None:
            self._foreign.check(ours=run.text.count("\nCOMMIT\n"))

    def _hide_shared(self, change: Diff) -> Diff:
        """Keep objects shared with kubelet in the kernel, but hide removed ones from `read`.

        Either kubelet or this process may have written them, so they are never removed (behaviour
        8.1). If `read` returned them, every diff would try to remove them again. Those that are
        wanted again are still there, unless somebody else has removed them.
        """
        wanted_again = self._hidden & change.added.keys()
        present = wanted_again & self._read_all().keys() if wanted_again else set()
        self._hidden -= wanted_again
        self._hidden.update(filter(is_kubelets, change.removed))
        added = {key: value for key, value in change.added.items() if key not in present}
        return Diff(added, change.removed, change.changed) if present else change

    def totals(self) -> NodeTotals:
        """Return packets by counter, 0 if no rule has needed it yet; none if rules do not count."""
        if not (self._counters and self.features.nfacct):
            return NodeTotals()
        return NodeTotals(packets=dict.fromkeys(COUNTERS, 0) | self._counters.packets())

    def watch_failures(self) -> FailureWatch:
        """Watch packets of connections that conntrack translates."""
        from steersman.netfilter.failure_log import FailureLog  # noqa: PLC0415 - rarely used

        return FailureLog(self.worker)

    def tracer(self) -> Tracer:
        """Return what follows a packet through rules of either variant."""
        from steersman.modes.netfilter_tracer import NetfilterTracer  # noqa: PLC0415 - rarely used

        return NetfilterTracer(
            self._execute, lambda table, chain: is_ours(table.partition(" ")[2], chain)
        )


def needs_counters(change: Diff) -> bool:
    """Return whether a Diff writes rules that name these counters."""
    written = (*change.added.values(), *(new for _, new in change.changed.values()))
    return any("--nfacct-name" in rules for rules in written)


def removes_everything(change: Diff) -> bool:
    """Return whether a Diff only removes, the node's rules included: the mode is being left."""
    if change.added or change.changed:
        return False
    return any(key[1:3] == (FILTER, FORWARD) for key in change.removed)


def create(execute: Exec, options: ModeOptions) -> IptablesMode:
    """Build the mode for registry.py."""
    return IptablesMode(execute, options, PacketCounters(COUNTERS), ForeignChanges)
