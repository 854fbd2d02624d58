"""The connections of virtual servers, as `steersman connections` lists them."""

from __future__ import annotations

import asyncio

from steersman.model.connections import ConnectionSearch
from steersman.modes.base import release
from tests.support.lab.cluster import Lab
from tests.support.lab.inside import Inside
from tests.support.lab.switches import ENDS, ONLY_V4, SERVICE, WAYS, connected, lab, program
from tests.support.modes.ipvs import mode_behind

__all__ = ["lab"]  # a fixture


def test_each_connection_has_its_client_and_endpoint(lab: Lab) -> None:
    mode = mode_behind(Inside(lab.node.path))
    asyncio.run(program(mode))
    live = [connected(lab.socket(way[0], "TCP"), *way) for way in WAYS]
    try:
        search = ConnectionSearch([SERVICE], ONLY_V4)
        asyncio.run(mode.worker.do_slowly(mode.find_connections(search)))
        found = {each.client: each for each in search.result("ipvs").rows}
        for way, sock in zip(WAYS, live, strict=True):
            address, port = sock.getsockname()
            each = found[f"{address}:{port}"]
            assert each.frontend == f"{way[1]}:{way[2]}"
            assert each.endpoint in {f"{end}:8080" for end in ENDS}
            assert (each.protocol, each.state) == ("TCP", "open")
            assert each.idle is not None
    finally:
        for sock in live:
            sock.close()
        asyncio.run(release(mode))
