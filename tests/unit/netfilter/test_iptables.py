# ruff: noqa: E501  (rules are one line each, as iptables has them)
"""Choosing an iptables, and the meaning of its failures: against a scripted one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from steersman.model.errors import ApplyError, BusyError
from steersman.netfilter.iptables.restore import Run
from steersman.netfilter.iptables.tool import Iptables, Tool, choose_tool
from tests.support.modes.scripted import BOTH, LEGACY, NFT, WORKS, Scripted

TOOL = Tool("iptables", "nft", (1, 8, 9))
RUN = Run(
    4,
    """*nat
:KUBE-MARK-MASQ - [0:0]
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x1/0x1
COMMIT
""",
)


def chosen(execute: Scripted, variant: str = "", nft: Sequence[str] = ()) -> str:
    """The command that is chosen, where nf_tables has these chains, or why there is none."""
    choice = choose_tool(
        execute,
        variant,
        nft_chains=lambda chains, _: [chain for _, chain in chains if chain in nft],
    )
    return choice.tool.command if choice.tool else " ".join(choice.missing)


def test_the_default_is_what_iptables_means() -> None:
    assert chosen(Scripted(*BOTH, WORKS)) == "iptables"
    legacy_first = (("iptables --version", LEGACY), *BOTH[1:])
    execute = Scripted(*legacy_first, WORKS)
    assert chosen(execute) == "iptables"


def test_a_wanted_variant_is_taken() -> None:
    assert chosen(Scripted(*BOTH, WORKS), "legacy") == "iptables-legacy"
    assert chosen(Scripted(*BOTH, WORKS), "nft") == "iptables-nft"
    only = Scripted(
        ("iptables --version", LEGACY),
        ("*-nft *", FileNotFoundError()),
        ("iptables-legacy --version", FileNotFoundError()),
        WORKS,
    )
    assert chosen(only, "legacy") == "iptables"
    assert "iptables-nft is not installed" in chosen(only, "nft")


def test_who_looks_for_leftovers_must_not_take_a_slow_program_for_a_missing_one() -> None:
    slow = ("*-save", TimeoutError("iptables-save did not end within 60 s"))
    with pytest.raises(BusyError, match="did not end within 60 s: it begins again"):
        choose_tool(Scripted(BOTH[2], slow, WORKS), "legacy", leftovers=True)


@pytest.mark.parametrize(
    ("nft", "legacy", "expected"),
    [
        ("", ":KUBE-PROXY-CANARY - [0:0]", "iptables-legacy"),
        ("KUBE-PROXY-CANARY", ":KUBE-SERVICES - [0:0]", "iptables"),
        ("KUBE-SERVICES", ":KUBE-KUBELET-CANARY - [0:0]", "iptables-legacy"),
        ("KUBE-IPTABLES-HINT", ":KUBE-SERVICES - [0:0]", "iptables"),
        ("", "-A KUBE-SERVICES -j KUBE-PROXY-CANARY", "iptables"),
    ],
)
def test_the_variant_in_use_is_preferred(nft: str, legacy: str, expected: str) -> None:
    execute = Scripted(*BOTH, ("iptables-legacy-save", legacy), WORKS)
    assert chosen(execute, nft=[nft]) == expected


def test_a_variant_that_cannot_be_listed_gives_no_hint() -> None:
    broken = ("iptables-legacy-save", PermissionError())
    assert chosen(Scripted(*BOTH, broken, WORKS)) == "iptables"


def test_where_nft_does_not_work_legacy_does() -> None:
    execute = Scripted(*BOTH, ("iptables -w *", 1), WORKS)
    execute.stderr = "Failed to initialize nft: Protocol not supported"
    assert chosen(execute) == "iptables-legacy"
    execute = Scripted(*BOTH, ("iptables* -w *", 1), WORKS)
    assert "iptables does not work: exit status 1." in chosen(execute)


def test_nothing_installed() -> None:
    assert chosen(Scripted()) == "iptables is not installed; install the package iptables."
    assert "not installed" in chosen(Scripted(("*", "gibberish")))
    assert "not installed" in chosen(Scripted(("*", 1)))


def test_parts_not_installed() -> None:
    assert "iptables-save is not installed" in chosen(
        Scripted(("iptables-save *", 127), ("iptables --version", NFT), ("iptables-restore *", NFT))
    )
    assert "iptables-restore is not installed" in chosen(Scripted(("iptables --version", NFT)))


def test_a_held_lock_does_not_make_a_variant_unusable() -> None:
    assert chosen(Scripted(*BOTH, ("iptables -w *", 4), WORKS)) == "iptables"


# Failures


@pytest.mark.parametrize(
    ("status", "stderr", "error", "says"),
    [
        (4, "Another app is currently holding the xtables lock.", BusyError, "xtables.lock is held"),
        (4, "line 3: RULE_APPEND failed (Resource temporarily unavailable)", BusyError, "RULE"),
        (4, "line 3: RULE_APPEND failed (Invalid argument): rule in chain X", ApplyError, "0x1/0x1"),
        (2, "Error occurred at line: 2", ApplyError, ":KUBE-MARK-MASQ"),
        (1, "iptables-restore: line 4 failed", ApplyError, "line 4 failed"),
        (1, "iptables-restore: line 99 failed", ApplyError, "line 99 failed"),
        (1, "", ApplyError, "exit status 1"),
        (-9, "", BusyError, "was killed by SIGKILL"),
            (-11, "", ApplyError, "exit status -11"),
    ],
)  # fmt: skip
def test_what_a_failed_restore_means(
    status: int, stderr: str, error: type[Exception], says: str
) -> None:
    execute = Scripted(("iptables-restore -w *", status))
    execute.stderr = stderr
    with pytest.raises(error, match=says):
        Iptables(execute, TOOL).restore(RUN)


def test_restores_keep_foreign_rules_and_wait_for_the_lock() -> None:
    execute = Scripted(WORKS)
    Iptables(execute, TOOL).restore(RUN)
    assert execute.ran[-1] == "iptables-restore -w 5 --noflush --counters"
