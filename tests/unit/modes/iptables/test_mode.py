"""The iptables mode against a scripted iptables: features, counters, kubelet's objects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from steersman.host.exec import Result
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.model.ruleset import Diff
from steersman.modes.base import release
from steersman.modes.iptables import mode as mode_module
from steersman.modes.iptables.mode import IptablesMode
from steersman.modes.iptables.names import INVALID_DROPPED, LOCALHOST_ACCEPTED
from steersman.modes.specs import ModeOptions
from tests.support.builders.plans import SETTINGS, simple
from tests.support.modes.scripted import BOTH, WORKS, Scripted

CHANGE = Diff(
    added={(4, "nat", "KUBE-MARK-MASQ", ""): "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x1/0x1"}
)


def test_without_ip6tables_ipv6_is_off_with_a_sentence() -> None:
    execute = Scripted(*BOTH, ("ip6*", FileNotFoundError(2, "", "ip6tables-restore")), WORKS)
    mode = IptablesMode(execute)
    support = mode.probe()
    assert support.usable
    assert support.missing == (
        "IPv6 Services are not served: ip6tables: ip6tables-restore is not installed, install the"
        " package iptables.",
    )
    assert mode.families == (Family.IPV4,)
    assert {key[0] for key in mode.render_node(SETTINGS)} == {4}
    assert not mode.render_service(simple(1, family=Family.IPV6), SETTINGS)
    assert mode.render_service(simple(1), SETTINGS)


@pytest.mark.parametrize(
    ("version", "random_fully"),
    [("v1.6.1", False), ("v1.6.2", True), ("v1.8.9 (nf_tables)", True), ("v1.4", False)],
)
def test_random_fully_needs_a_version(version: str, random_fully: bool) -> None:
    mode = IptablesMode(Scripted(("iptables --version", f"iptables {version}"), WORKS))
    mode.probe()
    assert mode.features.random_fully is random_fully


@pytest.mark.parametrize(("text", "liberal"), [("1\n", True), ("0\n", False), (None, False)])
def test_liberal_tcp_is_read_at_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, liberal: bool
) -> None:
    file = tmp_path / "be_liberal"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(mode_module, "_TCP_LIBERAL", str(file))
    mode = IptablesMode(Scripted(*BOTH, WORKS))
    mode.probe()
    assert mode.features.tcp_liberal is liberal


class Kernel:
    """A scripted nfnetlink_acct."""

    def __init__(self, supported: bool = True) -> None:
        self.is_supported = supported
        self.did: list[str] = []
        self.error: Exception | None = None

    def supported(self) -> bool:
        return self.is_supported

    def packets(self) -> dict[str, int]:
        return {LOCALHOST_ACCEPTED: 7}

    def create(self) -> None:
        self.did.append("create")
        if self.error:
            raise self.error

    def delete(self) -> None:
        self.did.append("delete")


MATCH = "iptables* -m nfacct -h"


@pytest.mark.parametrize(
    ("supported", "status", "counts"),
    [(True, 0, True), (True, 2, False), (False, 0, False)],
)
def test_packets_are_counted_if_kernel_and_iptables_can(
    supported: bool, status: int, counts: bool
) -> None:
    execute = Scripted(*BOTH, (MATCH, status), WORKS)
    mode = IptablesMode(execute, counters=cast(Any, Kernel(supported)))
    mode.probe()
    assert mode.features.nfacct is counts
    found = {INVALID_DROPPED: 0, LOCALHOST_ACCEPTED: 7}
    assert mode.totals().packets == (found if counts else {})


def test_programs_that_run_elsewhere_do_not_count() -> None:
    mode = IptablesMode(Scripted(*BOTH, WORKS))
    mode.probe()
    assert (mode.features.nfacct, mode.totals().packets) == (False, {})


def test_counters_are_there_before_the_rules_and_go_after_them() -> None:
    kernel = Kernel()
    execute = Scripted(*BOTH, (MATCH, 0), WORKS)
    mode = IptablesMode(execute, counters=cast(Any, kernel))
    mode.probe()
    assert kernel.did == [], "a probe changes nothing"
    rules = dict(mode.render_node(SETTINGS))
    mode.apply(Diff(added=rules))
    assert kernel.did == ["create"]
    execute.ran.clear()
    kernel.error = BusyError("no memory")
    with pytest.raises(BusyError, match="no memory"):
        mode.apply(Diff(added=rules))
    assert execute.ran == []
    mode.apply(CHANGE)
    mode.apply(Diff(removed=rules))
    assert kernel.did == ["create", "create", "delete"]


# Failures


@pytest.mark.parametrize(
    "failure", [1, 4, TimeoutError("too slow"), FileNotFoundError(2, "", "iptables-save")]
)
def test_what_cannot_be_read_now_is_busy(failure: int | Exception) -> None:
    execute = Scripted(*BOTH, ("iptables-save", failure), WORKS)
    with pytest.raises(BusyError):
        IptablesMode(execute).read()


def test_without_iptables_nothing_can_be_read() -> None:
    with pytest.raises(BusyError, match="not installed"):
        IptablesMode(Scripted()).read()


# Fingerprint


SAVED = """# Generated by iptables-save v1.8.9 on Sun Nov 22 06:00:00 2026
*filter
:INPUT ACCEPT [17:4242]
-A INPUT -j ACCEPT
COMMIT
"""


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_digest_tells_rules_apart_but_not_the_time_or_counters(variant: str) -> None:
    def token(text: str) -> object:
        execute = Scripted(*BOTH, ("iptables-*save", text), WORKS)
        return IptablesMode(execute, ModeOptions(iptables_variant=variant)).fingerprint()

    later = SAVED.replace("06:00", "07:00").replace("17:4242", "18:5000")
    assert token(SAVED) == token(later)
    assert token(SAVED) != token(SAVED.replace("ACCEPT\nCOMMIT", "DROP\nCOMMIT"))


# Chains shared with kubelet

FIREWALL = (4, "filter", "KUBE-FIREWALL", "")


def test_what_kubelet_shares_is_left_and_then_out_of_sight() -> None:
    text = "*filter\n:KUBE-FIREWALL - [0:0]\nCOMMIT\n"
    execute = Scripted(*BOTH, ("iptables-save", text), WORKS)
    mode = IptablesMode(execute)
    assert mode.read() == {FIREWALL: ""}
    mode.apply(Diff(removed={FIREWALL: ""}))
    assert not mode.read()
    mode.apply(Diff(added={FIREWALL: ""}))
    assert mode.read() == {FIREWALL: ""}
    assert not any(line.startswith("iptables-restore -w") for line in execute.ran)


def test_a_shared_object_that_somebody_removed_meanwhile_is_written_again() -> None:
    text = "*filter\n:KUBE-FIREWALL - [0:0]\nCOMMIT\n"
    execute = Scripted(("iptables-save", text), *BOTH, WORKS)
    mode = IptablesMode(execute)
    mode.read()
    mode.apply(Diff(removed={FIREWALL: ""}))
    execute.answers[0] = ("iptables-save", "*filter\nCOMMIT\n")
    mode.apply(Diff(added={FIREWALL: ""}))
    assert sum(line.startswith("iptables-restore -w") for line in execute.ran) == 1


class Gated(Scripted):
    """Each program that writes waits for a gate."""

    def __init__(self, *answers: tuple[str, str | int | Exception]) -> None:
        super().__init__(*answers)
        self.begun, self.gate = threading.Event(), threading.Event()

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        if stdin:
            self.begun.set()
            assert self.gate.wait(60)
        return super().run_tool(argv, stdin, timeout=timeout)


async def test_a_cancelled_caller_waits_until_all_is_written() -> None:
    keys = [(family, "nat", "KUBE-MARK-MASQ", "") for family in (4, 6)]
    change = Diff(added=dict.fromkeys(keys, "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x1/0x1"))
    execute = Gated(*BOTH, WORKS)
    mode = IptablesMode(execute)
    await mode.worker.do(mode.probe)
    writing = asyncio.create_task(mode.worker.do(mode.apply, change))
    assert await asyncio.to_thread(execute.begun.wait, 60)
    writing.cancel()
    await asyncio.wait((writing,), timeout=0)
    assert not writing.done()
    execute.gate.set()
    await asyncio.wait((writing,))
    assert writing.cancelled()
    assert sum("-restore -w" in line for line in execute.ran) == 2
    await release(mode)
