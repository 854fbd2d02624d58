"""The scripts of a Diff: the tools accept them, and they do what the mode itself would do."""

from __future__ import annotations

import subprocess
from random import Random

import pytest

from steersman.host.exec import SubprocessExec
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Ruleset, Script, diff
from steersman.modes.base import Mode
from steersman.modes.iptables.mode import COUNTERS, create
from steersman.modes.nftables.layout import Kind, kind_of
from steersman.modes.nftables.mode import NftablesMode
from steersman.modes.specs import ModeOptions
from steersman.netfilter.nfacct import PacketCounters
from tests.support.builders import nftables_plans
from tests.support.builders.plans import SETTINGS, random_plan
from tests.support.lab.namespace import in_namespace, sh
from tests.support.lab.nft import nft

pytestmark = pytest.mark.kernel


def world(rng: Random, numbers: range) -> list[ServicePlan]:
    return [random_plan(rng, number, rng.choice(list(Family))) for number in numbers]


def rendered(mode: Mode, plans: list[ServicePlan], settings: NodeSettings) -> Ruleset:
    out = dict(mode.render_node(settings))
    for plan in plans:
        out.update(mode.render_service(plan, settings))
    return out


def run(script: Script, *more: str) -> None:
    done = subprocess.run(
        [*script.argv, *more], input=script.text, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, f"{done.stderr}\n{script.text}"


def check_nft(script: Script) -> None:
    run(Script("nft", ("nft", "-c", "-f", "-"), script.text))


@pytest.mark.parametrize("seed", range(6))
def test_nft_accepts_every_script_and_carries_it_out(seed: int) -> None:
    async def body() -> None:
        mode, rng = NftablesMode(SubprocessExec()), Random(seed)
        assert (await mode.worker.do(mode.probe)).usable
        settings = nftables_plans.SETTINGS
        if seed == 0:  # upstream has a table of the same name
            nft("add table ip kube-proxy; add chain ip kube-proxy services")
        one = world(rng, range(12))
        two = [plan for plan in one if rng.random() < 0.7] + world(rng, range(12, 18))
        for plans in (one, two, []):
            want = dict(rendered(mode, plans, settings)) if plans else {}
            have = await mode.worker.do(mode.read)
            change = diff(have, want)
            for script in mode.words.scripts(have, change):
                check_nft(script)
                if not any(kind_of(key) == Kind.CHAIN for key in {**have, **want}):
                    run(script)
                    assert without_markers(await mode.worker.do(mode.read)) == without_markers(want)
            await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))

    in_namespace(body)


def without_markers(objects: Ruleset) -> Ruleset:
    """Leave out texts, which a marker of ours tells, and lazy chains, which go in by netlink."""
    texts = (Kind.SKELETON, Kind.RULES, Kind.FIREWALL_IPS, Kind.AFFINITY_IPS)
    return {key: value for key, value in objects.items() if kind_of(key) not in texts}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_iptables_restore_accepts_every_script_and_carries_it_out(variant: str, seed: int) -> None:
    async def body() -> None:
        mode = create(SubprocessExec(), ModeOptions(iptables_variant=variant))
        assert (await mode.worker.do(mode.probe)).usable
        rng = Random(seed)
        one = world(rng, range(10))
        two = [plan for plan in one if rng.random() < 0.7] + world(rng, range(10, 14))
        have: Ruleset = {}
        for plans in (one, two, []):
            want = rendered(mode, plans, SETTINGS) if plans else {}
            have = await mode.worker.do(mode.read)
            scripts = mode.words.scripts(have, diff(have, want))
            for script in scripts:
                if script.tool == "nfacct":  # not installed everywhere
                    PacketCounters(COUNTERS).create()
                    continue
                assert script.tool in ("iptables-restore", "ip6tables-restore")
                run(script, "--test")
                run(script)
            have = await mode.worker.do(mode.read)
            left = diff(have, want)
            assert not {*left.added, *left.changed}
            assert all("KUBE-FIREWALL" in str(key) or "kubelet" in str(key) for key in left.removed)
        assert "KUBE-SVC" not in sh(f"iptables-{variant}-save")

    in_namespace(body)


def test_there_is_no_script_for_sockets_of_the_process() -> None:
    mode = NftablesMode(SubprocessExec())
    objects = {bytes((Kind.RELAY, 4)) + b"\x06\0\0\0\x75\x30\0\0": object()}
    assert mode.words.scripts({}, diff({}, objects)) == ()
