"""The nftables mode in a user namespace, as in rootless clusters: sockets send little at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from steersman.compile.planner import Planner
from steersman.host.exec import SubprocessExec
from steersman.modes.nftables import sender
from steersman.modes.nftables.mode import NftablesMode
from steersman.run.sync.sync import Sync
from steersman.source.store import Store
from tests.support.builders import objects
from tests.support.builders.store import replace_objects
from tests.support.lab.nft import elements, nft

pytestmark = pytest.mark.kernel
SERVICES = 1000


async def program() -> None:
    """Start with many Services where nothing is, and then where upstream's table is."""
    store, names = Store("here", facts=objects.FACTS), [f"web-{n}" for n in range(SERVICES)]
    replace_objects(
        store,
        "Service",
        [
            objects.service(name, clusterIP=f"10.96.{n >> 8}.{n & 255}")
            for n, name in enumerate(names)
        ],
    )
    end = objects.endpoint("10.0.0.1")
    replace_objects(store, "EndpointSlice", [objects.slice_(end, name=n, owner=n) for n in names])
    for table in ("ip", "ip6"):
        nft(f"flush ruleset; add table {table} kube-proxy")
        sender.BUFFER = 1 << 16  # what `wmem_max` of most machines leaves, and less
        mode = NftablesMode(SubprocessExec())
        assert (await mode.worker.do(mode.probe)).usable
        sync = Sync(store, Planner(objects.CONFIG, mode.traits), mode)
        report = await sync.run()
        assert report
        assert report.result
        assert not sync.state.findings, sync.state.findings[:3]
        assert len(elements("cluster-ips")) == SERVICES


def test_many_services_take_as_many_transactions_as_it_needs() -> None:
    code = f"import asyncio; from {__name__} import program; asyncio.run(program())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", code]
    done = subprocess.run(argv, env=environment, text=True, capture_output=True, check=False)
    assert not done.returncode, done.stderr
