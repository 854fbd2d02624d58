"""The test API server for tests that are not in its loop: calls over HTTP, and a thread."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from tests.support.apiserver.server import ApiServer
from tests.support.apiserver.world import Object


def control(url: str, operation: str, **arguments: Any) -> Any:
    """Call an operation of a server in another thread or process."""
    data = json.dumps({"op": operation, **arguments}).encode()
    request = urllib.request.Request(f"{url}/__control__", data, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.loads(answer.read())["result"]


class ServerThread:
    """An ApiServer in a thread, driven through `control`."""

    def __init__(self, objects: Iterable[Object] = ()) -> None:
        self._objects = list(objects)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self.url = ""

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with ApiServer(self._objects) as server:
            self.url = server.url
            self._ready.set()
            await self._stop.wait()

    def control(self, operation: str, **arguments: Any) -> Any:
        return control(self.url, operation, **arguments)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60), "the API server did not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
