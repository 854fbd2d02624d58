"""Leaving the userspace mode for another one, and coming to it."""

from __future__ import annotations

import pytest

from steersman.host.exec import SubprocessExec
from steersman.model.plan import Endpoint
from steersman.model.ruleset import diff
from steersman.modes.base import Mode
from steersman.modes.registry import create
from steersman.modes.specs import ModeOptions
from steersman.modes.userspace.direct_portals import DEFAULT_INTERFACE
from steersman.run.mode_transition import clean_up, other_modes, remove_leftovers_once
from tests.support.lab.namespace import sh
from tests.support.lab.userspace import userspace_mode
from tests.support.lab.userspace_node import (
    PORT,
    SETTINGS,
    VARIANTS,
    VIP,
    become,
    on_a_node,
    rules,
    served,
)
from tests.support.modes.userspace_proxy import ask

pytestmark = pytest.mark.kernel


async def serve(mode: Mode, one: Endpoint) -> None:
    assert (await mode.probe()).usable
    wanted = {**mode.render_node(SETTINGS), **mode.render_service(served(one), SETTINGS)}
    await mode.apply(diff(await mode.read(), wanted))
    await remove_leftovers_once(other_modes(mode.name, SubprocessExec()), 0.0, mode)


@VARIANTS
@pytest.mark.parametrize("other", ["iptables", "nftables"])
def test_another_mode_serves_when_this_one_was_left(variant: str, other: str) -> None:
    async def body(one: Endpoint) -> None:
        sh("sysctl -qw net.ipv4.conf.all.route_localnet=1")
        old = userspace_mode(SubprocessExec(), variant)
        await old.probe()
        await become(old, served(one))
        await old.aclose()
        kinds = ModeOptions(iptables_variant="" if variant == "nftables" else variant)
        await serve(create(other, SubprocessExec(), kinds), one)
        assert "KUBE-PORTALS" not in rules(variant).upper()
        assert await ask(PORT, b"!", VIP) == b"one!"

    on_a_node(body)


@VARIANTS
def test_nothing_is_left_of_another_mode_when_this_one_serves(variant: str) -> None:
    async def body(one: Endpoint) -> None:
        kinds = ModeOptions(iptables_variant="" if variant == "nftables" else variant)
        name = "nftables" if variant == "nftables" else "iptables"
        old = create(name, SubprocessExec(), kinds)
        await serve(old, one)
        mode = userspace_mode(SubprocessExec(), variant)
        await serve(mode, one)
        assert "KUBE-SVC" not in rules(variant)
        assert "kube-proxy" not in rules(variant)
        assert await ask(PORT, b"!", VIP) == b"one!"
        await mode.aclose()

    on_a_node(body)


def test_a_mode_that_changes_nothing_cleans_nothing() -> None:
    mode = create("userspace", SubprocessExec(), ModeOptions(portals="none"))
    variant = str(getattr(mode, "variant", ""))
    assert list(other_modes(mode.name, SubprocessExec(), variant)) == []


@pytest.mark.parametrize("kind", ["nft", "legacy", "nftables", "direct"])
def test_cleanup_removes_every_kind_of_portals(kind: str) -> None:
    async def body(one: Endpoint) -> None:
        old = userspace_mode(SubprocessExec(), kind)
        await old.probe()
        await become(old, served(one))
        await old.aclose()
        assert (await clean_up(SubprocessExec(), ModeOptions())).removed["userspace"] > 0
        assert "KUBE-PORTALS" not in (rules("nft") + rules("nftables") + rules("legacy")).upper()
        assert VIP not in sh("ip addr")
        links = sh("ip link")
        assert not sum((await clean_up(SubprocessExec(), ModeOptions())).removed.values())
        assert sh("ip link") == links

    on_a_node(body)


def test_cleanup_creates_nothing() -> None:
    async def body(_: Endpoint) -> None:
        await clean_up(SubprocessExec(), ModeOptions())
        assert DEFAULT_INTERFACE not in sh("ip link")

    on_a_node(body)
