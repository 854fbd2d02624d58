"""The nftables mode as the rest of the program sees it (modes/base.py)."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import msgspec

from steersman.host.exec import Exec
from steersman.host.netlink import (
    NETLINK_NETFILTER,
    AnswersLostError,
    BpfInstruction,
    Netlink,
    Subscription,
)
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats
from steersman.modes.base import ByOthers, Mode, Support
from steersman.modes.nftables import render
from steersman.modes.nftables.apply import Tables, has_texts, resolve_texts
from steersman.modes.nftables.forget import forgets
from steersman.modes.nftables.layout import (
    FIRST_SLOTS,
    LOCAL_SLOTS,
    TABLE,
    Kind,
    unpack_slot,
)
from steersman.modes.nftables.probe import probe
from steersman.modes.nftables.relay import Relay
from steersman.modes.nftables.render_localhost import render_localhost, without_listeners
from steersman.modes.nftables.scrape import Scrape
from steersman.modes.nftables.skeleton import foundation
from steersman.modes.nftables.text import diff_text
from steersman.modes.nftables.wire import NEWGEN, table_of
from steersman.modes.specs import ModeOptions
from steersman.netfilter.nf_tables import table_left

_BUFFER = 1 << 28  # bytes of the largest transaction, 50,000 Services take 20 MB
_NFNLGRP_NFTABLES = 7
_INLINE = 64  # objects up to which the system call is not worth a thread


def open_netlink() -> Netlink:
    """Open the socket, in the network namespace of the calling thread."""
    return Netlink(NETLINK_NETFILTER, buffer=_BUFFER)


def subscribe(own_port: int) -> Subscription:
    """Open the socket for notifications, in the network namespace of the calling thread.

    Those of the socket with `own_port` wake nobody up: there is at least one for each sync.
    """
    swapped = socket.htonl(own_port)  # a filter reads words in network byte order
    wanted = (
        BpfInstruction(0x20, 0, 0, 12),  # load the word at 12: nlmsg_pid
        BpfInstruction(0x15, 0, 1, swapped),
        BpfInstruction(0x06, 0, 0, 0),  # drop
        BpfInstruction(0x06, 0, 0, 0xFFFFFFFF),  # keep
    )
    return Subscription(NETLINK_NETFILTER, (_NFNLGRP_NFTABLES,), wanted=wanted)


async def _concerns_us(news: Subscription, own_port: int) -> bool:
    """Wait for a notification; whether it may be of somebody else's change to our tables."""
    try:
        heard = await news.receive()
    except AnswersLostError:
        return True
    return any(
        each.port != own_port and each.kind & 0xFF != NEWGEN and table_of(each.payload) == TABLE
        for each in heard
    )


_TRAITS = Traits(
    filters_without_endpoints=True,
    rejects_unknown_ports=True,
    drops_unassigned_addresses=True,
    spares_hairpins_elsewhere=True,
)
_RELAYING = msgspec.structs.replace(_TRAITS, localhost_node_ports=True, relays_localhost=True)


class NftablesMode(Mode):
    """Programs nftables: text for the skeleton, raw elements for all that changes."""

    name = "nftables"

    def __init__(
        self,
        execute: Exec,
        connect: Callable[[], Netlink] = open_netlink,
        subscribe: Callable[[int], Subscription] = subscribe,
        relay: Relay | None = None,
    ) -> None:
        """Make the mode; nothing is opened before it is used.

        Args:
            execute: the door to `nft`.
            connect: opens the netlink socket (in another network namespace, for tests).
            subscribe: opens the socket for notifications, likewise.
            relay: serves node ports on loopback; None leaves them alone.
        """
        self.traits = _TRAITS if relay is None else _RELAYING
        self._relay = relay or Relay()
        self._exec = execute
        self._connect = connect
        self._subscribe = subscribe
        self._tables: Tables | None = None
        self._lock = asyncio.Lock()
        self._scrape = Scrape(connect, self._lock)
        self._texts = {foundation(family) for family in Family}
        self._early: tuple[int, dict[bytes, Any]] | None = None
        """What the kernel had when the mode was probed: the first `read` need not look again."""
        self._told = 0
        """How many changes by others (Sender.strangers) `wait_for_external_change` has reported."""
        self.slots: dict[bytes, tuple[bytes, ...]] = {}
        """Which endpoint has which slot: the one value that rendering keeps (render.py)."""

    async def probe(self) -> Support:
        """Say whether nftables can be programmed here; learn the slots in use if so."""
        support = await probe(self._exec, self._connect)
        if support.usable:
            async with self._lock:
                tables = self._opened()
                before = tables.sender.strangers()  # a change while it is read counts as later
                objects = await asyncio.to_thread(tables.read)
                self._early = (before, objects)
            self.slots = slots_of(objects)
        return support

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the texts of the skeleton."""
        ruleset = render.render_node(settings)
        self._texts.update(text for text in ruleset.values() if isinstance(text, str))
        return ruleset

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render one ServicePort; the slots of its endpoints are kept for the next time."""
        ruleset = render.render_service(plan, settings, self.slots)
        return (
            {**ruleset, **listeners} if (listeners := render_localhost(plan, settings)) else ruleset
        )

    async def read(self) -> Ruleset:
        """Dump what is in our tables."""
        async with self._lock:
            tables = self._opened()
            early, self._early = self._early, None
            if early and early[0] == tables.sender.strangers():
                objects = early[1]
            else:
                objects = await asyncio.to_thread(tables.read)
            return {**resolve_texts(objects, self._texts), **self._relay.listening}

    async def fingerprint(self) -> Hashable | None:
        """How often others changed the ruleset; our own transactions do not count."""
        async with self._lock:
            return ByOthers(self._opened().sender.strangers())

    def describe(self, change: Diff) -> str:
        """Print a Diff as nft commands (`--dry-run`)."""
        return diff_text(change)

    async def stats(self, plans: Collection[ServicePlan]) -> ConnectionStats:
        """Connections so far by ServicePort."""
        return await self._scrape.stats(self._opened().counters, self._relay, plans)

    async def wait_for_external_change(self) -> None:
        """Wait until somebody else changed our tables (or all of the ruleset).

        Where anything at all was changed since the last time (or since the mode was probed), it
        returns at once. Call it after the first sync: while somebody listens, the kernel tells of
        every element, which doubles the cost of a cold start.
        """
        own_port = self._opened().netlink.port
        with self._subscribe(own_port) as news:
            while not await self._told_of_strangers():
                while not await _concerns_us(news, own_port):
                    pass

    async def _told_of_strangers(self) -> bool:
        """Whether others changed something that nobody was told of."""
        async with self._lock:  # our own nft is over then, and accounted for
            before, self._told = self._told, self._opened().sender.strangers()
            return self._told != before

    async def apply(self, change: Diff) -> None:
        """Carry out a Diff: at most one run of nft, then one transaction for everything else."""
        change, listeners = without_listeners(change)
        async with self._lock:
            tables = self._opened()
            if has_texts(change):
                change = await tables.load_texts(change)
            if len(change) <= _INLINE and not forgets(change):
                tables.write(change)
            else:
                await asyncio.to_thread(tables.write, change)
            await self._relay.follow(listeners)
        for key in change.removed:
            if key[0] in _ENDPOINTS and key[-4:] in FIRST_SLOTS:
                self.slots.pop(key, None)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for our tables."""
        return table_left(TABLE, families)

    async def aclose(self, drain: float = 0.0) -> int:
        """Stop serving loopback; return how many connections were cut after `drain` seconds."""
        return await self._relay.close(drain)

    def _opened(self) -> Tables:
        if self._tables is None:
            self._tables = Tables(self._connect(), self._exec)
        return self._tables


_ENDPOINTS = (Kind.SERVICE_ENDPOINTS, Kind.NODEPORT_ENDPOINTS)


def slots_of(objects: Ruleset) -> dict[bytes, tuple[bytes, ...]]:
    """Slots as they are in the kernel, by the key of the first one."""
    found: defaultdict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
    for key, endpoint in objects.items():
        if key[0] in _ENDPOINTS:
            slot = unpack_slot(key)
            found[key[:-4] + FIRST_SLOTS[slot >= LOCAL_SLOTS]].append((slot, endpoint))
    return {first: tuple([end for _, end in sorted(ends)]) for first, ends in found.items()}


def create(execute: Exec, options: ModeOptions) -> NftablesMode:  # noqa: ARG001 - it has none
    """Build the mode for registry.py."""
    return NftablesMode(execute, relay=Relay())
