"""Leaving the userspace mode for another one, and coming to it."""

from __future__ import annotations

import sys

import pytest

from steersman.host.exec import SubprocessExec
from steersman.model.plan import Endpoint
from steersman.model.ruleset import diff
from steersman.modes.base import Mode, release
from steersman.modes.registry import create, may_have_left
from steersman.modes.specs import ModeOptions, spec_of
from steersman.modes.userspace.linux_addresses import DEFAULT_INTERFACE
from steersman.run.process.mode_transition import clean_up, other_modes, remove_leftovers_once
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
    support = await mode.worker.do(mode.probe)
    assert support.usable
    wanted = {**mode.render_node(SETTINGS), **mode.render_service(served(one), SETTINGS)}
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), wanted))
    others = other_modes(mode.name, SubprocessExec(), mode.variant, may_have_left=may_have_left)
    await remove_leftovers_once(others, 0.0, mode)


@pytest.mark.parametrize(
    ("before", "after"), [("nft", "nftables"), ("legacy", "nftables"), ("nftables", "nft")]
)
def test_nothing_is_left_of_other_portals_of_this_mode(before: str, after: str) -> None:
    """Their rules would lead clients to ports on which nobody listens any more."""

    async def body(one: Endpoint) -> None:
        old = userspace_mode(SubprocessExec(), before)
        await old.worker.do(old.probe)
        await become(old, served(one))
        assert await ask(PORT, b"!", VIP) == b"one!"
        await release(old)
        mode = userspace_mode(SubprocessExec(), after)
        await serve(mode, one)
        ours = "table ip kube-portals" if after == "nftables" else "KUBE-PORTALS-"
        theirs = "table ip kube-portals" if before == "nftables" else "KUBE-PORTALS-"
        left, there = theirs in rules(before), ours in rules(after)
        answer = await ask(PORT, b"!", VIP)
        await release(mode)
        assert (left, there) == (False, True)
        assert answer == b"one!"

    on_a_node(body)


@VARIANTS
@pytest.mark.parametrize("other", ["iptables", "nftables"])
def test_another_mode_serves_when_this_one_was_left(variant: str, other: str) -> None:
    async def body(one: Endpoint) -> None:
        sh("sysctl -qw net.ipv4.conf.all.route_localnet=1")
        old = userspace_mode(SubprocessExec(), variant)
        await old.worker.do(old.probe)
        await become(old, served(one))
        await release(old)
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
        await release(mode)

    on_a_node(body)


@pytest.mark.parametrize("kind", ["nft", "legacy", "nftables"])
def test_what_may_be_left_is_known_without_the_mode(kind: str) -> None:
    def seen() -> set[str]:
        variants = spec_of("userspace").variants
        return {v.name for v in variants if may_have_left("userspace", v.of(ModeOptions()))}

    async def body(one: Endpoint) -> None:
        assert seen() == set()
        old = userspace_mode(SubprocessExec(), kind)
        await old.worker.do(old.probe)
        await become(old, served(one))
        await release(old)
        assert seen() == {kind}
        await clean_up(SubprocessExec(), ModeOptions())
        assert seen() <= {"legacy"}, "its tables stay, empty"

    on_a_node(body)


def test_modes_that_left_nothing_are_not_imported() -> None:
    code = """
import sys
from steersman.host.exec import SubprocessExec
from steersman.modes.registry import may_have_left
from steersman.run.process.mode_transition import other_modes
found = other_modes("nftables", SubprocessExec(), may_have_left=may_have_left)
print(*(name for name, _ in found), sep=", ")
print(*sorted(name for name in sys.modules if name.endswith(".mode")))
"""

    async def body(_: Endpoint) -> None:
        names, modules = sh(f"{sys.executable} -c '{code}'").splitlines()
        assert names == "iptables (nft), iptables (legacy)"
        assert modules == "steersman.modes.iptables.mode"

    on_a_node(body)


def test_a_mode_that_changes_nothing_cleans_nothing() -> None:
    mode = create("userspace", SubprocessExec(), ModeOptions(portals="none"))
    variant = str(getattr(mode, "variant", ""))
    assert list(other_modes(mode.name, SubprocessExec(), variant)) == []


@pytest.mark.parametrize("kind", ["nft", "legacy", "nftables", "direct"])
def test_cleanup_removes_every_kind_of_portals(kind: str) -> None:
    async def body(one: Endpoint) -> None:
        old = userspace_mode(SubprocessExec(), kind)
        await old.worker.do(old.probe)
        await become(old, served(one))
        await release(old)
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
