"""The sockets that take connections to node ports on 127.0.0.1 and ::1, and pass them on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from steersman.model.errors import ApplyError
from steersman.model.ruleset import Diff
from steersman.modes.nftables.layout import FIRST_SLOTS, pack_address, pack_port
from steersman.modes.nftables.render_localhost import frontend_key
from steersman.proxy.engine import Proxy
from steersman.proxy.listeners import FrontendKey, ListenerPlan
from steersman.proxy.sockets import OpenSocket, PortAllocator, open_socket

log = logging.getLogger(__name__)
_UDP_IDLE = 30.0
"""Seconds until an idle UDP client is forgotten: what conntrack gives to one without answers."""


class Relay:
    """Listeners on loopback that follow the Diffs of the mode.

    A port that somebody else holds is said in the log and tried again when the kernel is next
    read; it stops nobody's rules.
    """

    def __init__(self, open_socket: OpenSocket = open_socket) -> None:
        """Make it without listeners.

        Args:
            open_socket: makes sockets (in another network namespace, for tests).
        """
        self._open_socket = open_socket
        self._made: Proxy | None = None
        self._keys: dict[bytes, FrontendKey] = {}

    @property
    def listening(self) -> dict[bytes, ListenerPlan]:
        """What there is, by the mode's keys."""
        if not self._keys:
            return {}
        listeners = self._proxy().listeners
        return {key: listeners[known] for key, known in self._keys.items()}

    def counts(self) -> dict[bytes, int]:
        """Connections passed on, by the key of the listener, a slot and the endpoint."""
        keys = {listener.owner: key for key, listener in self.listening.items()}
        return {
            keys[owner]
            + FIRST_SLOTS[0]
            + pack_address(end.ip)
            + pack_port(end.port): each.connections
            for owner, end, each in (self._made.traffic if self._made else ())
            if owner in keys
        }

    async def follow(self, change: Diff) -> None:
        """Close what goes, then open or change the others. On the loop that serves them."""
        if not change:
            return
        await self._stop(change.removed)
        new = {**change.added, **{key: pair[1] for key, pair in change.changed.items()}}
        for key, listener in new.items():
            await self._start(key, listener)

    async def _stop(self, keys: Iterable[bytes]) -> None:
        gone = [self._keys.pop(key) for key in keys if key in self._keys]
        if gone:
            self._proxy().stop(self._proxy().take(gone))
            await asyncio.sleep(0)  # transports close their sockets a round later

    async def _start(self, key: bytes, listener: ListenerPlan) -> None:
        name = frontend_key(listener)
        try:
            replaced = await self._proxy().start({name: listener})
        except ApplyError as error:
            log.warning("%s; the node port is not served there", error)
        else:
            self._proxy().stop(replaced.values())
            self._keys[key] = name

    async def close(self, seconds: float) -> int:
        """Stop listening, let connections end; return how many were cut after `seconds`."""
        self._keys.clear()
        return await self._made.drain(seconds) if self._made else 0

    def _proxy(self) -> Proxy:
        if self._made is None:
            self._made = Proxy(self._open_socket, PortAllocator(), _UDP_IDLE)
        return self._made
