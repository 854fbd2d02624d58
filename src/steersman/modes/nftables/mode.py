"""The nftables mode as the rest of the program sees it (modes/base.py)."""

from __future__ import annotations

import errno
import os
import platform
import re
import socket
from collections import defaultdict
from collections.abc import Collection, Generator, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec

from steersman.failover.watch import FailureWatch
from steersman.host.exec import Exec, Result, failure_reason, tool_result
from steersman.host.netlink import (
    NETLINK_NETFILTER,
    BpfInstruction,
    Subscription,
)
from steersman.host.process import NEEDS_NET_ADMIN
from steersman.host.worker import Changes
from steersman.model.connections import ConnectionSearch
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats
from steersman.modes.base import ByOthers, Mode, Requirements, Support
from steersman.modes.nftables import render
from steersman.modes.nftables.apply import TEXT_KEYS, KernelTables, resolve_texts
from steersman.modes.nftables.counters import Scrape
from steersman.modes.nftables.layout import (
    ENDPOINT_KINDS,
    TABLE,
    is_first_slot,
    kind_of,
    pool_key,
    unpack_slot,
)
from steersman.modes.nftables.relay import Relay, split_listeners
from steersman.modes.nftables.sender import open_netlink
from steersman.modes.nftables.skeleton import foundation
from steersman.modes.specs import ModeOptions
from steersman.modes.tracer import Tracer
from steersman.netfilter.nft.generations import WriterLog, generation
from steersman.netfilter.nft.tables import table_left

if TYPE_CHECKING:
    from steersman.modes.nftables.words import NftablesWords

_MIN_KERNEL = (5, 13)
_MIN_NFT = (1, 0, 1)
_SKIP = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK"
_NFNLGRP_NFTABLES = 7
_TRAITS = Traits(
    filters_without_endpoints=True,
    rejects_unknown_ports=True,
    drops_unassigned_addresses=True,
    spares_hairpins_elsewhere=True,
)
_RELAYING = msgspec.structs.replace(_TRAITS, localhost_node_ports=True, relays_localhost=True)


def subscribe(own_port: int) -> Subscription:
    """Open the socket for notifications, in the calling thread's network namespace.

    Args:
        own_port: port of the socket for transactions. A socket filter drops notifications of its
            changes, as every sync causes at least one.
    """
    swapped = socket.htonl(own_port)  # a filter reads words in network byte order
    wanted = (
        BpfInstruction(0x20, 0, 0, 12),  # load the word at 12: nlmsg_pid
        BpfInstruction(0x15, 0, 1, swapped),
        BpfInstruction(0x06, 0, 0, 0),  # drop
        BpfInstruction(0x06, 0, 0, 0xFFFFFFFF),  # keep
    )
    return Subscription(NETLINK_NETFILTER, (_NFNLGRP_NFTABLES,), wanted=wanted)


class NftablesMode(Mode):
    """Programs nftables: text for the skeleton, raw elements for all that changes."""

    name = "nftables"
    writers: WriterLog
    find_leftovers = staticmethod(partial(table_left, TABLE))

    def __init__(
        self,
        execute: Exec,
        relay: Relay | None = None,
        *,
        looks: bool = False,
    ) -> None:
        """Initialize; sockets are opened on first use.

        Args:
            execute: runs `nft`.
            relay: serves node ports on loopback; None leaves them alone.
            looks: another process programs the kernel at the same time; this one only reads.
        """
        self.traits = _TRAITS if relay is None else _RELAYING
        self._relay = relay or Relay()
        self.drain = self._relay.close
        self._exec = execute
        self._looks = looks
        self._tables: KernelTables | None = None
        self._scrape = Scrape()
        self._texts = {foundation(family) for family in Family}
        """Texts that may be in the kernel, which has only their hashes."""
        self._probed: tuple[int, dict[bytes, Any]] | None = None
        """Foreign generations and objects when the mode was probed, for the first `read`."""
        self._suspected = False
        """Another program may have changed our tables unnoticed."""
        self._reported = 0
        """Foreign generations that were reported as `changes`."""
        self.writers = WriterLog(lambda: subscribe(self._opened().netlink.port), table=TABLE)
        self.slots: dict[bytes, bytes] = {}
        """Endpoints by slot, the only state of rendering (render.py)."""

    def probe(self) -> Support:
        """Check kernel, nft and privileges (behaviour 1.5); read the slots in use."""
        missing = []
        release = platform.release()
        if not os.environ.get(_SKIP) and _version(release) < _MIN_KERNEL:
            missing.append(
                f"The kernel is {release}; nftables mode needs 5.13 or later (set {_SKIP}=1 if "
                "your kernel has the changes under an older number)."
            )
        try:
            result = self._exec.run_tool(["nft", "--version"])
            version = result.stdout.decode(errors="replace").strip()
            if _version(version) < _MIN_NFT:
                missing.append(
                    f"{version or 'nft'} is too old; nftables mode needs nft 1.0.1 or later."
                )
        except OSError as error:
            missing.append(f"{failure_reason('nft', 'nftables', error)}.")
        try:
            with open_netlink() as netlink:
                generation(netlink)
        except OSError as error:
            missing.append(
                f"This process may not program the kernel: it {NEEDS_NET_ADMIN}."
                if error.errno == errno.EPERM
                else f"The kernel does not speak nf_tables with us ({error}); it needs "
                "CONFIG_NF_TABLES and this process CAP_NET_ADMIN."
            )
        if not missing:
            tables = self._opened()
            # A foreign change during the read counts as a later one.
            before = tables.sender.foreign.check()
            objects = tables.read()
            self._probed = (before, objects)
            self.slots = slots_of(objects)
        return Support(not missing, tuple(missing))

    def requirements(self) -> Requirements:
        """Return what answers between ports of a bridge need; a map has no slow length."""
        tables = frozenset({TABLE})
        return Requirements(own_tables=tables, bridge_netfilter=True)

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the texts of the skeleton."""
        ruleset = render.render_node(settings)
        self._texts.update(text for text in ruleset.values() if isinstance(text, str))
        return ruleset

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render one ServicePort; its endpoints keep their slots until the next time."""
        ruleset = render.render_service(plan, settings, self.slots)
        listeners = render.render_localhost(plan, settings)
        return {**ruleset, **listeners} if listeners else ruleset

    @cached_property
    def words(self) -> NftablesWords:
        """What prints elements and chains, as nft does."""
        from steersman.modes.nftables.words import NftablesWords, scripts  # noqa: PLC0415

        return NftablesWords(self.worker, self.read, scripts)

    def read(self) -> Ruleset:
        """Dump our tables, unless `probe` has just done that."""
        tables = self._opened()
        probed, self._probed = self._probed, None
        # Beside the process that programs the kernel, what `probe` read is as good as the next.
        if probed and (self._looks or probed[0] == tables.sender.foreign.check()):
            objects = probed[1]
        else:
            objects = tables.read()
            if self._looks:  # the other process gives slots away
                self.slots = slots_of(objects)
        self.changes_during_read = tables.changes
        return {**resolve_texts(objects, self._texts), **self._relay.listening}

    def read_beside(self) -> Ruleset:
        """Dump our tables by another socket, and put up with transactions meanwhile."""
        with open_netlink() as netlink:
            objects = KernelTables(netlink, self._nft).read()
        return {**resolve_texts(objects, self._texts), **self._relay.listening}

    def fingerprint(self) -> Hashable:
        """Return the number of foreign generations; our own transactions do not count."""
        return ByOthers(self._foreign_changes())

    def _foreign_changes(self) -> int:
        return self._opened().sender.foreign.check()

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        """Return the connections so far by ServicePort; call it on the event loop."""
        return self._scrape.steps(self._relay.counts(), tuple(plans))  # now: the loop counts them

    def find_connections(self, search: ConnectionSearch) -> Generator[None, None, None]:
        """Add the connections that conntrack has, and those from loopback."""
        from steersman.netfilter.conntrack.flows import (  # noqa: PLC0415 - only pages ask
            find_connections,
        )

        yield from find_connections(search)
        self.worker.on_loop(self._relay.find_connections(search))

    def changes(self) -> Changes:
        """Hear of other programs that change our tables, or flush the ruleset.

        The first judgement counts what they did since the last one (or since `probe`). Call it
        after the first sync: from then on the kernel notifies this process of every element, which
        doubles the cost of a cold start.
        """
        self._suspected = True
        return Changes(self.writers.follow().fd, self._hears_of_changes)

    def _hears_of_changes(self) -> bool:
        """Read the notifications; return whether another program changed our tables."""
        if not self.writers.hear() and not self._suspected:
            return False
        self._suspected = False
        before, self._reported = self._reported, self._foreign_changes()
        return self._reported != before  # else it was a run of our own nft

    def apply(self, change: Diff) -> None:
        """Carry out a Diff: at most one run of nft, then one transaction for everything else."""
        change, listeners = split_listeners(change)
        tables, elements = self._opened(), change
        if any(key in part for part in (change.added, change.changed) for key in TEXT_KEYS):
            elements = tables.load_texts(change)
        tables.write(elements)
        if listeners:
            self.worker.on_loop(self._relay.apply(listeners))
        for key in change.removed:
            if is_first_slot(key):
                self.slots.pop(key, None)

    def fill(self, parts: Iterable[Diff]) -> None:
        """Carry out the first part as `apply` does, and the others in a transaction each."""
        others = iter(parts)
        self.apply(next(others))
        listeners: list[Diff] = []

        def in_kernel() -> Iterator[Diff]:
            for part in others:
                kernel, ours = split_listeners(part)
                listeners.append(ours)
                yield kernel

        self._opened().write_parts(in_kernel())
        for each in filter(None, listeners):
            self.worker.on_loop(self._relay.apply(each))

    def close(self) -> None:
        """Close the sockets."""
        self.writers.close()
        if self._tables is not None:
            self._tables.netlink.close()
            self._tables = None

    def _opened(self) -> KernelTables:
        if self._tables is None:
            self._tables = KernelTables(open_netlink(), self._nft)
        return self._tables

    def _nft(self, argv: Sequence[str], script: bytes) -> Result:
        result = tool_result(self._exec.run_tool, argv, script, package="nftables")
        self.writers.forget(result.pid)
        return result

    def watch_failures(self) -> FailureWatch:
        """Watch packets of connections that conntrack translates, and the dials from loopback."""
        from steersman.netfilter.failure_log import FailureLog  # noqa: PLC0415 - rarely used

        return self._relay.with_dials(FailureLog(self.worker))

    def tracer(self) -> Tracer:
        """Return what follows a packet through our tables, and those of others."""
        from steersman.modes.netfilter_tracer import NetfilterTracer  # noqa: PLC0415 - rarely used

        return NetfilterTracer(self._exec, lambda table, _: table.endswith(f" {TABLE}"))


def create(execute: Exec, options: ModeOptions) -> NftablesMode:
    """Build the mode for registry.py."""
    return NftablesMode(execute, relay=Relay(), looks=options.looks)


def slots_of(objects: Ruleset) -> dict[bytes, bytes]:
    """Return the endpoints by slot that the kernel has, joined, by the key of the first slot."""
    found: defaultdict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
    for key, endpoint in objects.items():
        if kind_of(key) in ENDPOINT_KINDS:
            found[pool_key(key)].append((unpack_slot(key), endpoint))
    return {first: b"".join([end for _, end in sorted(ends)]) for first, ends in found.items()}


def _version(text: str) -> tuple[int, ...]:
    """Return the first version number in a text; () if there is none."""
    found = re.search(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in found.group().split(".")) if found else ()
