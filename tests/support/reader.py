"""A reader of the pages about the process that runs in this network namespace."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import ClientSession

from steersman.ui.fleet import Fleet
from steersman.ui.nodes import FixedNodes
from steersman.ui.pages import PAGES
from steersman.ui.site import Site
from tests.support.pages import serving
from tests.support.waiting import until

JSON = {"Accept": "application/json"}
SECONDS = 60.0


class Reader:
    """Reads pages, and sends their forms."""

    def __init__(self, client: ClientSession, token: str) -> None:
        self._client = client
        self._token = token

    async def twin(self, path: str) -> dict[str, Any]:
        """The JSON form of a page."""
        async with self._client.get(path, headers=JSON) as reply:
            assert reply.status == 200, await reply.text()
            found: dict[str, Any] = await reply.json()
            return found

    async def until(self, path: str, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The JSON form of a page, as soon as something is true of it."""
        found: dict[str, Any] = {}

        async def is_true() -> bool:
            found.update(await self.twin(path))
            return true(found)

        await until(is_true, SECONDS)
        return found

    async def send(self, path: str, **form: str) -> dict[str, Any]:
        """The JSON answer to a form."""
        data = {**form, "csrf": self._token}
        async with self._client.post(path, data=data, headers=JSON) as reply:
            assert reply.status == 200, await reply.text()
            found: dict[str, Any] = await reply.json()
            return found

    async def press(self, path: str, **form: str) -> str:
        """The answer to a form as a browser shows it, without markup."""
        async with self._client.post(path, data={**form, "csrf": self._token}) as reply:
            assert reply.status == 200
            text = re.sub(r"<[^>]+>", " ", await reply.text())
            return re.sub(r"\s+", " ", html.unescape(text))


@asynccontextmanager
async def reading(node: str = "node-a") -> AsyncIterator[Reader]:
    """Serve pages about this node, once it has been reached."""
    fleet = Fleet(FixedNodes())
    task = asyncio.create_task(fleet.run())
    try:
        async with asyncio.timeout(SECONDS):
            version = 0
            while node not in fleet.nodes:
                version = await fleet.changed(version)
        site = Site(fleet, PAGES)
        async with serving(site) as client:
            yield Reader(client, site.access.token)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
