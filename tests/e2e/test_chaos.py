"""Some time of everything going wrong at once ends in exactly the rules of a fresh start.

The daemon's own parts, source to kernel, run in a network namespace against the test API server;
meanwhile objects change, watches break, the server forgets and restarts, rules are flushed, and
the proxy itself dies. `STEERSMAN_CHAOS_SECONDS` sets how long (default 45).
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from steersman.host.exec import SubprocessExec
from steersman.modes.iptables.mode import create
from steersman.modes.specs import ModeOptions
from tests.support.apiserver.chaos import (
    SERVICES,
    Chaos,
    same_rules,
    same_world,
    service,
    slice_,
    until,
)
from tests.support.apiserver.server import ApiServer
from tests.support.lab.namespace import in_namespace, sh

SECONDS = float(os.environ.get("STEERSMAN_CHAOS_SECONDS", "45"))


async def run_chaos(variant: str, seed: int) -> None:
    dice = random.Random(seed)
    sh("ip addr add 192.0.2.1/24 dev lo")
    execute = SubprocessExec()
    world = [service(n, dice) for n in range(SERVICES)] + [slice_(n, dice) for n in range(SERVICES)]
    async with ApiServer(world) as server:
        chaos = Chaos(server, create(execute, ModeOptions(iptables_variant=variant)), dice)
        await chaos.start_proxy()
        events = [
            *[chaos.change] * 12, *[chaos.remove] * 4, *[chaos.flush] * 2, chaos.drop_watches,
            chaos.forget_history, chaos.restart_server, chaos.server_down, chaos.faults,
            chaos.stall, chaos.check, chaos.restart_proxy,
        ]  # fmt: skip
        loop = asyncio.get_running_loop()
        end = loop.time() + SECONDS / 2
        while loop.time() < end:
            event = dice.choice(events)
            await event()
            chaos.happened.add(event.__name__)
            await asyncio.sleep(dice.random() * 0.05)
        server.clear_faults()
        server.stall(False)
        await until(lambda: same_world(chaos))
        await until(lambda: same_rules(chaos, variant))
        await chaos.kill_proxy()
    assert chaos.happened >= {"change", "flush", "restart_proxy", "restart_server"}


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_chaos_ends_in_the_rules_of_a_fresh_start(variant: str) -> None:
    in_namespace(lambda: run_chaos(variant, seed=int(os.environ.get("STEERSMAN_CHAOS_SEED", "7"))))
