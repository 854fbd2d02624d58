"""The page `/connections`: of one Service, limited, and why it cannot answer."""

from __future__ import annotations

from collections.abc import Generator

import msgspec

from steersman.model.connections import (
    ConnectionList,
    ConnectionSearch,
    ConnectionState,
    OpenConnection,
)
from steersman.model.errors import BusyError
from steersman.run.pages.connections_page import ConnectionsPage
from tests.support.http import asking
from tests.support.modes.memory import MemoryMode, World


class Connected(MemoryMode):
    """Has three connections to each Service."""

    def find_connections(self, search: ConnectionSearch) -> Generator[None, None, None]:
        if self.busy:
            raise BusyError("somebody holds the lock")
        for owner in search.owners:
            for number in range(3):
                state = ConnectionState.ENDED if number == 2 else ConnectionState.OPEN
                name = f"{owner.name.service}-{number}"
                search.add(OpenConnection("10.1.0.1:8080", name, "10.96.0.1:80", "TCP", state))
                yield


async def asked(world: World, query: str) -> tuple[int, str | ConnectionList]:
    answer = await ConnectionsPage(lambda: world.sync).serve(asking(f"/connections?{query}"))
    if answer.status != 200:
        return answer.status, answer.content.decode()
    return 200, msgspec.msgpack.decode(answer.content, type=ConnectionList)


async def world() -> World:
    made = World()
    made.mode = Connected()
    made.start()
    await made.run()
    return made


async def test_the_connections_of_one_service_are_listed() -> None:
    status, found = await asked(await world(), "service=shop/s1&most=1")
    assert isinstance(found, ConnectionList)
    assert (status, [row.client for row in found.rows]) == (200, ["s1-0"])
    assert (found.matching, found.ended) == (2, 1)
    _, found = await asked(await world(), "service=shop/s1&ended=1")
    assert isinstance(found, ConnectionList)
    assert len(found.rows) == 3


async def test_why_there_is_no_answer() -> None:
    made = await world()
    assert await asked(made, "service=shop/gone") == (404, "Service shop/gone is not served here\n")
    assert (await asked(made, "service=shop/s1&port=https/TCP"))[0] == 404
    assert (await asked(made, "service=shop/s1&most=all"))[0] == 400
    made.mode.busy = True
    assert await asked(made, "service=shop/s1") == (
        *(503, "the connections cannot be read now: somebody holds the lock\n"),
    )
