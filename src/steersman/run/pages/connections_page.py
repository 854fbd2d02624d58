"""The page `/connections`: who is connected to a Service through this node now."""

from __future__ import annotations

from collections.abc import Callable, Generator

import msgspec

from steersman.model.connections import MOST_CONNECTIONS, ConnectionSearch
from steersman.model.errors import ApplyError, BusyError
from steersman.run.serve.http import Answer, Request
from steersman.run.sync.sync import Sync


class ConnectionsPage:
    """Serves `/connections?service=NAMESPACE/NAME&port=http/TCP&most=N&ended=1`.

    `port` may be repeated; the name of a port may be empty. Without it, all are meant.
    """

    def __init__(self, sync: Callable[[], Sync]) -> None:
        self._sync = sync

    async def serve(self, request: Request) -> Answer:
        """Answer with a ConnectionList; the mode's other work goes on meanwhile."""
        query, sync = request.query, self._sync()
        service = query.get("service", "")
        ports = {value for name, value in request.arguments if name == "port"}
        plans = [
            plan
            for key, plan in sync.state.plan.services.items()
            if str(key.name.object_name) == service
            and (not ports or f"{key.name.port}/{key.name.protocol}" in ports)
        ]
        if not plans:
            return Answer(f"Service {service} is not served here\n", 404)
        try:
            most = min(max(int(query.get("most", "100")), 0), MOST_CONNECTIONS)
        except ValueError:
            return Answer("most: give a number\n", 400)
        search = ConnectionSearch(
            plans, sync.state.plan.settings, most, ended=query.get("ended") == "1"
        )
        mode = sync.mode
        find = mode.find_connections or _of_conntrack
        try:
            await mode.worker.do_slowly(find(search))
        except (ApplyError, BusyError, OSError) as error:
            return Answer(f"the connections cannot be read now: {error}\n", 503)
        found = search.result(mode.name)
        return Answer(msgspec.msgpack.encode(found), content_type="application/msgpack")


def _of_conntrack(search: ConnectionSearch) -> Generator[None, None, None]:
    from steersman.netfilter.conntrack.flows import (  # noqa: PLC0415 - not on Windows
        find_connections,
    )

    return find_connections(search)
