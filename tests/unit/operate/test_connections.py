"""`steersman connections`: names of ends, endpoints without connections, and the tables."""

from __future__ import annotations

import msgspec
import pytest

from steersman.model.connections import ConnectionList, ConnectionState, OpenConnection
from steersman.model.world import World
from steersman.operate import connections
from steersman.operate.answer import Line, QuestionError, Table
from steersman.operate.connections import Connections, named
from steersman.operate.names import Names
from tests.support.builders import kube
from tests.support.builders.asked import DEMO, asked

WORLD = asked(*DEMO)


def row(client: str, endpoint: str, state: str = "open") -> OpenConnection:
    return OpenConnection(
        endpoint, client, "10.96.0.10:80", "TCP", ConnectionState(state), "192.0.2.1:7", None, 65.0
    )


def answer(*rows: OpenConnection, ended: int = 0, more: int = 0) -> Connections:
    counts: dict[str, int] = {}
    for each in rows:
        counts[each.endpoint] = counts.get(each.endpoint, 0) + 1
    names = Names(WORLD)
    target = names.resolve_service("shop/web")
    found = ConnectionList("nftables", rows, counts, ended, len(rows) + more)
    return named(found, target, names, "a test")


def texts(shown: Connections, *, wide: bool = False) -> list[str]:
    lines = []
    for block in shown.blocks(wide):
        if isinstance(block, Line):
            lines.append(block.text)
        else:
            assert isinstance(block, Table)
            cells = [[c if isinstance(c, str) else c[0] for c in row] for row in block.rows]
            lines += [" ".join(each).rstrip() for each in cells] or [block.empty]
    return lines


def test_a_service_that_nobody_uses_has_its_endpoints() -> None:
    shown = answer()
    assert texts(shown) == [
        "Service shop/web, through node node-a",
        "10.244.1.11:8080 shop/web-1 0",
        "10.244.1.12:8080 shop/web-2 0",
        "10.244.2.13:8080 shop/web-3 0",
        "no connection to it goes through this node now",
    ]
    assert shown.exit_code == 0


async def test_a_service_that_is_not_served_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pods = kube.service("pods", "None")
    world = asked(pods, *DEMO)

    async def of_process() -> World:
        return world

    monkeypatch.setattr(connections, "world_of_process", of_process)
    with pytest.raises(QuestionError, match=r"Service shop/pods is not served here: headless"):
        await connections.list_connections("shop/pods")


def test_ends_have_names_and_old_endpoints_are_told_apart() -> None:
    shown = answer(
        row("10.244.1.12:4000", "10.244.1.11:8080"),
        row("192.0.2.2:4001", "10.244.1.9:8080", "closing"),
        row("[fd00::9]:4002", "", "opening"),
        ended=2,
        more=5,
    )
    assert texts(shown)[1:] == [
        "none - 1",
        "10.244.1.11:8080 shop/web-1 1",
        "10.244.1.12:8080 shop/web-2 0",
        "10.244.1.9:8080 - 1 gets no new ones",
        "10.244.2.13:8080 shop/web-3 0",
        "10.244.1.12:4000 shop/web-2 10.96.0.10:80/TCP 10.244.1.11:8080 open - 65s",
        "192.0.2.2:4001 node-b 10.96.0.10:80/TCP 10.244.1.9:8080 closing - 65s",
        "[fd00::9]:4002 - 10.96.0.10:80/TCP none opening - 65s",
        "5 more; --limit 8 shows all",
        "2 have ended; --all shows them",
    ]
    assert "192.0.2.1:7" in texts(shown, wide=True)[6]
    assert shown.connections[0].client_name == "shop/web-2"


def test_time_that_goes_by_is_no_news() -> None:
    before, after = row("10.244.9.9:4001", "10.244.1.11:8080"), 99.0
    later = msgspec.structs.replace(before, idle=after, age=after)
    assert answer(before).watched == answer(later).watched
    assert answer(before).data != answer(later).data
