"""Packet counters of the iptables mode: with real packets, from the process to its page."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest

from steersman.host.netlink import NetlinkError
from steersman.model.errors import BusyError
from steersman.modes.iptables.mode import COUNTERS
from steersman.modes.iptables.names import INVALID_DROPPED, LOCALHOST_ACCEPTED
from steersman.netfilter import nfacct
from steersman.netfilter.nfacct import PacketCounters
from steersman.run.observe.scraped import NFACCT
from tests.support.apiserver.reading import service, slice_
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import command, get, manifests, steersman
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

NODE_PORT, POD = 30080, "10.244.0.1"


def world() -> list[dict[str, Any]]:
    made = service("web", "10.96.0.10")
    made["spec"]["type"] = "NodePort"
    made["spec"]["ports"][0]["nodePort"] = NODE_PORT
    return [made, slice_("web-x", "web", POD)]


async def counted(counter: str) -> float | None:
    """The metric of a counter; None if it is not there."""
    found = re.search(rf"^{NFACCT[counter].name} (\S+)$", (await get("/metrics"))[1], re.MULTILINE)
    return float(found[1]) if found else None


def knock() -> None:
    """Send the first packet of a connection to the node port on loopback."""
    with socket.socket() as client:
        client.setblocking(False)
        assert client.connect_ex(("127.0.0.1", NODE_PORT)) == errno.EINPROGRESS


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_packets_to_node_ports_on_loopback_are_a_metric(tmp_path: Path, variant: str) -> None:
    """What upstream's end-to-end test of this metric does."""

    async def body() -> None:
        sh("ip route add 10.244.0.0/16 dev lo")
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", f"--iptables-variant={variant}")
        async with steersman(tmp_path, *flags) as proxy:
            await proxy.said("sync 1 (start)")
            assert await counted(LOCALHOST_ACCEPTED) == 0
            assert await counted(INVALID_DROPPED) == 0
            knock()

            async def seen() -> bool:
                return await counted(LOCALHOST_ACCEPTED) == 1

            await until(seen)
        async with steersman(tmp_path, *flags, name="again") as proxy:
            await proxy.said("0 added, 0 changed, 0 removed")
            assert await counted(LOCALHOST_ACCEPTED) == 1, "a restart keeps what was counted"
        assert PacketCounters(COUNTERS).packets().keys() == set(COUNTERS)
        status, out, _ = await command("cleanup")
        assert status == 0, out
        assert PacketCounters(COUNTERS).packets() == {}
        assert "nfacct" not in sh(f"iptables-{variant}-save")

    in_namespace(body)


def test_counters_are_created_once_and_stay_while_rules_use_them() -> None:
    async def body() -> None:
        counters = PacketCounters(COUNTERS)
        assert counters.supported()
        assert counters.packets() == {}, "asking creates nothing"
        counters.create()
        counters.create()
        assert counters.packets() == dict.fromkeys(COUNTERS, 0)
        sh(f"iptables-nft -A INPUT -m nfacct --nfacct-name {INVALID_DROPPED}")
        deleting = asyncio.create_task(asyncio.to_thread(counters.delete))
        await until(lambda: counters.packets() == {INVALID_DROPPED: 0})
        sh("iptables-nft -F INPUT")
        await deleting
        assert counters.packets() == {}

    in_namespace(body)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP])
def test_a_kernel_without_counters_is_not_supported(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NetlinkError(code, "refused")

    monkeypatch.setattr(nfacct, "Netlink", refuse)
    counters = PacketCounters(COUNTERS)
    assert not counters.supported()
    assert counters.packets() == {}
    with pytest.raises(BusyError, match="cannot be created"):
        counters.create()
    counters.delete()
