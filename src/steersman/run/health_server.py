"""The health servers: sockets around run/health.py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from aiohttp import web

from steersman.model.kube import Node
from steersman.model.names import ObjectName
from steersman.run.health import Moment, ProxyHealth, ServiceHealth, readyz
from steersman.run.http import (
    NOT_FOUND,
    Answer,
    ListenError,
    Listening,
    ShortPage,
    listen,
    short_pages,
)

log = logging.getLogger(__name__)


def now() -> Moment:
    """Read both clocks."""
    return Moment(time.time_ns(), time.monotonic())


def proxy_health_app(
    health: ProxyHealth,
    node: Callable[[], Node | None],
    *,
    ready: Callable[[], bool] = lambda: True,
    count: Callable[[str, int], None] = lambda _path, _status: None,
    clock: Callable[[], Moment] = now,
) -> web.Application:
    """Return the application of `healthzBindAddress`.

    Args:
        health: whose health.
        node: returns this node's object as it is now.
        ready: says whether the first full sync reached the kernel.
        count: told of each answer of `healthz` and `livez`, for the metrics.
        clock: for tests.
    """

    def counted(name: str, answer: Callable[[], Answer]) -> ShortPage:
        def page() -> Answer:
            said = answer()
            count(name, said.status)
            return said

        return page

    return short_pages(
        {
            "/healthz": counted("healthz", lambda: health.healthz(clock(), node())),
            "/livez": counted("livez", lambda: health.livez(clock())),
            "/readyz": lambda: readyz(ready()),
        },
        lambda: NOT_FOUND,
    )


class ServiceHealthServers:
    """Listens on the health check node ports of Services, in one or both families."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        proxy_healthy: Callable[[], bool],
        on_failure: Callable[[ObjectName, int, str], None] = lambda *_: None,
    ) -> None:
        """Listen nowhere yet.

        Args:
            addresses: returns the addresses to listen on: the unspecified ones, or this node's
                addresses that serve node ports.
            proxy_healthy: says whether the kernel follows the cluster.
            on_failure: told of a Service and its port that cannot be listened on, and why; for
                the Event FailedToStartServiceHealthcheck.
        """
        self._state = ServiceHealth()
        self._addresses = addresses
        self._proxy_healthy = proxy_healthy
        self._on_failure = on_failure
        self._running: dict[tuple[ObjectName, int, str], Listening] = {}
        self._said: dict[tuple[ObjectName, int, str], str] = {}
        """Why nobody listens, as logged: syncs come many times a second."""

    @property
    def failing(self) -> bool:
        """Whether some port could not be listened on at the last `sync`."""
        return bool(self._said)

    async def sync(self, ports: Mapping[ObjectName, int], counts: Mapping[ObjectName, int]) -> None:
        """Take the wanted ports and the counts of ready local endpoints.

        What cannot be listened on is reported, and tried again the next time.
        """
        self._state.sync_services(ports)
        addresses = self._addresses()
        wanted = {(name, port, at) for name, port in ports.items() for at in addresses}
        await self._close(key for key in self._running if key not in wanted)
        self._said = {key: why for key, why in self._said.items() if key in wanted}
        for key in sorted(wanted - self._running.keys()):
            await self._open(*key)
        self._state.sync_endpoints(counts)

    async def close(self) -> None:
        """Stop listening."""
        await self._close(self._running)

    async def _close(self, keys: Iterable[tuple[ObjectName, int, str]]) -> None:
        servers = [self._running.pop(key) for key in list(keys)]
        await asyncio.gather(*(server.close() for server in servers))

    async def _open(self, name: ObjectName, port: int, address: str) -> None:
        def page() -> Answer:
            return self._state.answer(name, self._proxy_healthy())

        try:
            server = await listen(short_pages({}, page), address, port)
        except ListenError as error:
            why, before = str(error.strerror), self._said.get((name, port, address))
            self._said[name, port, address] = why
            if why != before:
                log.error("health check of %s: cannot %s", name, why)
            self._on_failure(name, port, why)
        else:
            self._said.pop((name, port, address), None)
            self._running[name, port, address] = server
