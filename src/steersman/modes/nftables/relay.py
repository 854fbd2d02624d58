"""Sockets that take connections to node ports on 127.0.0.1 and ::1, and pass them on.

The listeners are part of the mode's Ruleset (render.py, `render_localhost`), so a Diff says which
ones come and go.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from steersman.failover.watch import FailureWatch
from steersman.model.connections import ConnectionSearch
from steersman.model.errors import ApplyError
from steersman.model.ruleset import Diff
from steersman.modes.nftables.layout import (
    FIRST_SLOTS,
    Kind,
    kind_of,
    pack_address,
    pack_port,
)
from steersman.proxy.listeners import LISTENER, FrontendKey, ListenerPlan

if TYPE_CHECKING:
    from steersman.proxy.engine import Proxy

log = logging.getLogger(__name__)
_RELAY = int(Kind.RELAY)
_UDP_IDLE = 30.0
"""Seconds until an idle UDP client is forgotten; conntrack's time for one without answers."""


def split_listeners(change: Diff) -> tuple[Diff, Diff]:
    """Split a Diff into the part for the kernel and the part with listeners."""
    listeners = change.where(lambda key: kind_of(key) == _RELAY)
    if not listeners:
        return change, listeners
    return change.where(lambda key: kind_of(key) != _RELAY), listeners


class Relay:
    """Listeners on loopback that follow the Diffs of the mode.

    If another program holds a port, that is logged and tried again when the kernel is read next;
    it does not stop the rules.
    """

    def __init__(self) -> None:
        """Initialize without listeners."""
        self._opened: Proxy | None = None
        self._keys: dict[bytes, FrontendKey] = {}

    @property
    def listening(self) -> dict[bytes, ListenerPlan]:
        """The listeners that are open, by the mode's keys."""
        if not self._keys:
            return {}
        listeners = self._proxy().listeners
        return {key: listeners[name] for key, name in self._keys.items()}

    def counts(self) -> dict[bytes, int]:
        """Return the connections passed on to each endpoint, by `layout.counted_key`."""
        keys = {listener.owner: key + FIRST_SLOTS[0] for key, listener in self.listening.items()}
        return {
            keys[owner] + pack_address(end.ip) + pack_port(end.port): each.connections
            for owner, end, each in (self._opened.traffic if self._opened else ())
            if owner in keys
        }

    async def find_connections(self, search: ConnectionSearch) -> None:
        """Add the connections that a search wants."""
        if self._opened is not None:
            await self._opened.find_connections(search)

    async def apply(self, change: Diff) -> None:
        """Close listeners that are removed, then open or change the others.

        Call it on the event loop that serves them.
        """
        gone = [self._keys.pop(key) for key in change.removed if key in self._keys]
        if gone:
            self._proxy().remove(gone)
            await asyncio.sleep(0)  # transports close their sockets in the next iteration
        new = {**change.added, **{key: pair[1] for key, pair in change.changed.items()}}
        for key, listener in new.items():
            service_port, family = listener.owner
            protocol = service_port.protocol
            name = FrontendKey(LISTENER, family, protocol, listener.bind, listener.port, True)
            try:
                started = await self._proxy().start({name: listener})
            except ApplyError as error:
                log.warning("%s; the node port is not served there", error)
            else:
                await self._proxy().finish(started)
                self._keys[key] = name

    def with_dials(self, watch: FailureWatch) -> FailureWatch:
        """Add to a watch what becomes of the dials for clients of loopback."""
        from steersman.proxy.failures import WithDials  # noqa: PLC0415 - rarely used

        return WithDials(watch, self._proxy().shared.dials)

    async def close(self, seconds: float) -> int:
        """Stop listening and let connections end; return how many were cut after `seconds`."""
        self._keys.clear()
        return await self._opened.drain(seconds) if self._opened else 0

    def _proxy(self) -> Proxy:
        # 450 kB, for the first node port that loopback may use.
        from steersman.proxy.engine import Proxy  # noqa: PLC0415
        from steersman.proxy.ports import PortAllocator  # noqa: PLC0415

        if self._opened is None:
            self._opened = Proxy(PortAllocator(), _UDP_IDLE)
        return self._opened
