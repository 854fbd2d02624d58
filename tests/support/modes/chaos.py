"""Some time in which everything goes wrong at once, for a mode.

The daemon's own parts, source to kernel, run in a network namespace against the test API server;
meanwhile objects change, watches break, the server forgets and restarts, rules are flushed, the
kernel lacks memory, and the proxy itself dies, in the middle of a write, too. Afterwards the kernel
must have exactly the rules of a fresh start.
`STEERSMAN_CHAOS_SECONDS` sets how long (default 45), `STEERSMAN_CHAOS_SEED` what happens.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from functools import partial

from steersman.host.exec import SubprocessExec
from steersman.model.ruleset import diff
from steersman.modes.base import Mode, release
from steersman.modes.ebpf.datapath import EbpfOptions
from steersman.modes.ebpf.mode import EbpfMode
from steersman.modes.registry import create
from steersman.modes.specs import ModeOptions
from tests.support.apiserver.chaos import (
    FLUSHES,
    SERVICES,
    Chaos,
    fresh_rules,
    same_rules,
    same_world,
    service,
    slice_,
)
from tests.support.apiserver.server import ApiServer
from tests.support.lab import ebpf
from tests.support.lab.namespace import sh
from tests.support.waiting import until

SECONDS = float(os.environ.get("STEERSMAN_CHAOS_SECONDS", "45"))
MUST = {"change", "flush", "restart_proxy", "restart_server", "lack_memory"}
"""What happens in each run, even on a slow machine."""
NFT_FLUSHES = (
    "nft flush ruleset",
    "nft delete table ip kube-proxy",
    "nft flush map ip kube-proxy service-ips",
    "nft 'add table ip other; add chain ip other here; add rule ip other here counter drop'",
)
PORTAL_FLUSHES = (
    *FLUSHES,
    "iptables -w 5 -t nat -F KUBE-PORTALS-HOST",
    "iptables -w 5 -t nat -A KUBE-PORTALS-CONTAINER -d 203.0.113.9 -j RETURN",
)
IPVS_FLUSHES = (
    "ipvsadm -C",
    "ipvsadm -D -t 10.96.0.1:80",
    "ipvsadm -A -t 10.96.0.200:80 && ipvsadm -a -t 10.96.0.200:80 -r 10.244.0.1:8080 -m",
    "ipset flush",
    "ipset flush KUBE-IPVS-PORTS",
    "ip link delete kube-ipvs0",
    "ip address flush dev kube-ipvs0",
    "ip address add 10.96.0.201/32 dev kube-ipvs0",
    "iptables -w 5 -t nat -F KUBE-IPVS-SERVICES",
    *FLUSHES,
)
_DAMAGES = {"nftables": NFT_FLUSHES, "userspace": PORTAL_FLUSHES, "ipvs": IPVS_FLUSHES}


def made(name: str) -> tuple[Callable[[], Mode], Sequence[str]]:
    """What makes a mode in this namespace, and how others damage what it has written."""
    if name == "ebpf":
        cgroup = ebpf.new_cgroup(ebpf.next_number())
        pins = ebpf.bpffs() / cgroup.name
        sh("ip link add sm0 type bridge && ip link set sm0 up")
        damages = (f"rm {pins}/links/*-sm_ingress", f"rm {pins}/links/sm_connect4")
        more = "ip link add sm1 type bridge || ip link del sm1"
        options = EbpfOptions(pins, cgroup, file=ebpf.compiled())
        return partial(EbpfMode, SubprocessExec(), options), (*damages, more, "nft flush ruleset")
    mode, _, variant = name.partition("-")
    make = partial(create, mode, SubprocessExec(), ModeOptions(iptables_variant=variant))
    return make, _DAMAGES.get(mode, FLUSHES)


async def live_through(chaos: Chaos, reader: Mode | None) -> None:
    """Let all happen to the proxy, and wait until the kernel has what it should."""
    await chaos.start_proxy()
    events = [
        *[chaos.change] * 12, *[chaos.remove] * 4, *[chaos.flush] * 2, chaos.drop_watches,
        chaos.forget_history, chaos.restart_server, chaos.server_down, chaos.faults,
        chaos.stall, chaos.check, chaos.restart_proxy, chaos.lack_memory,
    ]  # fmt: skip
    loop = asyncio.get_running_loop()
    end = loop.time() + SECONDS / 2
    while loop.time() < end or not chaos.happened >= MUST:
        event = chaos.dice.choice(events)
        await event()
        chaos.happened.add(event.__name__)
        await asyncio.sleep(chaos.dice.random() * 0.05)
    chaos.server.clear_faults()
    chaos.server.stall(False)
    await until(lambda: same_world(chaos))
    await until(lambda: same_rules(chaos, reader))


async def run_chaos(name: str) -> None:
    """Let all happen to a mode, and assert that the kernel has the rules of a fresh start.

    Args:
        name: of the mode; after a hyphen the variant of iptables.
    """
    dice = random.Random(int(os.environ.get("STEERSMAN_CHAOS_SEED", "7")))
    sh("ip addr add 192.0.2.1/24 dev lo")
    make, flushes = made(name)
    world = [service(n, dice) for n in range(SERVICES)] + [slice_(n, dice) for n in range(SERVICES)]
    async with ApiServer(world) as server:
        chaos = Chaos(server, make(), dice, make, flushes)
        reader = make() if name.startswith(("iptables", "ipvs")) else None
        try:
            await live_through(chaos, reader)
        finally:
            await chaos.kill_proxy()
            await release(chaos.mode)
            if reader is not None:
                await release(reader)
        if name == "ebpf":  # its maps belong to one process at a time
            mode = make()
            want = await fresh_rules(chaos, mode)
            assert not diff(await mode.worker.do(mode.read), want)
            await release(mode)
