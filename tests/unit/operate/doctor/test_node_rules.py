"""Doctor's checks of the mode: parts, rules in the kernel, the lock, the number of rules."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from steersman.host.sysctl import Setting
from steersman.model.node_state import NodeState
from steersman.model.world import World
from steersman.modes.base import Requirements, Support
from steersman.operate.doctor import node_rules
from steersman.operate.doctor.context import Question
from steersman.operate.doctor.result import CheckResult, Verdict
from tests.support.builders.doctor import context_of, named, only, world_of
from tests.support.builders.objects import endpoint, service, slice_
from tests.support.modes.memory import MemoryMode

PARTS, RULES, LOCK, NUMBER, SYSCTLS = named(
    "mode", "rules", "lock", "number-of-rules", "mode-sysctls"
)
THINGS = service(), slice_(endpoint("10.0.0.5")), service("other", clusterIP="10.96.0.11")


class NeedyMode(MemoryMode):
    """A mode with requirements."""

    def __init__(self, needs: Requirements | None = None, support: Support | None = None) -> None:
        super().__init__()
        self.needs = needs or Requirements()
        self.support = support or Support(usable=True)

    def probe(self) -> Support:
        return self.support

    def requirements(self) -> Requirements:
        return self.needs


def synced(things: Any = THINGS, needs: Requirements | None = None) -> NeedyMode:
    """A mode whose kernel has all that the plan asks for."""
    mode = NeedyMode(needs)
    world = world_of(*things)
    mode.kernel = dict(mode.render_node(world.plan.settings))
    for plan in world.plan.services.values():
        mode.kernel |= mode.render_service(plan, world.plan.settings)
    return mode


def test_missing_parts_of_the_mode() -> None:
    def said(*missing: str, usable: bool) -> tuple[Verdict, str]:
        result = only(PARTS, context_of(mode=NeedyMode(support=Support(usable, missing))))
        return result.verdict, result.text

    assert said(usable=True)[0] is Verdict.OK
    assert said("No bpffs is mounted.", usable=True) == (Verdict.WARNING, "No bpffs is mounted")
    assert said("ip_vs is missing.", usable=False) == (
        Verdict.ERROR,
        "the memory mode cannot run here: ip_vs is missing",
    )
    assert said(usable=False) == (Verdict.ERROR, "the memory mode cannot run here")
    assert only(PARTS, context_of()).verdict is Verdict.UNKNOWN


def rules(mode: MemoryMode, **more: Any) -> CheckResult:
    return only(RULES, context_of(*THINGS, mode=mode, **more))


def test_rules_in_the_kernel_are_compared_with_the_plan() -> None:
    assert rules(synced()).text == "all 4 kernel objects of shop/cart are as planned"
    mode = synced()
    assert "of this node" in rules(mode, question=Question()).text
    del mode.kernel["clusterIP 10.96.0.10:80"]
    mode.kernel["node"] = "someone else"
    result = rules(mode)
    assert result.verdict is Verdict.ERROR
    assert result.text == (
        "the kernel's rules of shop/cart are not as planned: 1 missing, 1 different"
    )
    assert result.evidence == (
        "missing: clusterIP 10.96.0.10:80: shop/cart:http (TCP, IPv4)",
        "missing: node: node-1",
        "not planned: node: someone else",
    )
    assert result.remedy.startswith("start steersman")
    running = rules(mode, world={"process": NodeState()})
    assert "steersman drift" in running.remedy


def test_rules_of_other_services_are_not_looked_at() -> None:
    mode = synced()
    del mode.kernel["clusterIP 10.96.0.11:80"]
    assert rules(mode).verdict is Verdict.OK
    assert rules(mode, question=Question()).verdict is Verdict.ERROR


def test_what_changes_while_the_kernel_is_read_is_no_difference() -> None:
    """The kernel has endpoints that came after the World was asked for."""
    later = (service(), slice_(endpoint("10.0.0.6")), THINGS[2])
    mode = synced(later)

    def said(*now: Any, question: Question | None) -> CheckResult:
        async def renew(_: World) -> World:
            return world_of(*now)

        return rules(mode, renew=renew, question=question)

    for question in (None, Question()):
        assert said(*later, question=question).verdict is Verdict.OK
        assert said(*THINGS, question=question).verdict is Verdict.ERROR
    # What has not changed is compared.
    del mode.kernel["node"]
    assert said(*later, question=None).evidence == ("missing: node: node-1",)


def test_what_a_disturbed_reading_missed_is_read_again() -> None:
    class Disturbed(NeedyMode):
        changes_during_read = 3
        missed: tuple[str, ...] = ()
        """What each reading misses."""

        def read(self) -> dict[Any, Any]:
            found = dict(super().read())
            found.pop(self.missed[min(self.reads, len(self.missed)) - 1])
            return found

    mode = Disturbed()
    mode.kernel = dict(synced().kernel)

    def said(*missed: str) -> CheckResult:
        async def renew(world: World) -> World:
            return world

        mode.reads, mode.missed = 0, missed
        return rules(mode, renew=renew)

    fine = said("node", "clusterIP 10.96.0.10:80")
    assert fine.verdict is Verdict.OK
    assert fine.evidence == ("the rules changed 3 times while they were read",)
    assert mode.reads == 2
    assert said("node").evidence == ("missing: node: node-1",)
    assert mode.reads == 3


def test_a_kernel_without_rules(tmp_path: Path) -> None:
    result = rules(NeedyMode())
    assert result.text == "the kernel has no rules of the memory mode"

    class Gone(NeedyMode):
        def read(self) -> dict[Any, Any]:
            raise FileNotFoundError(2, "no pins")

    assert rules(Gone()).text == "the kernel has no rules of the memory mode"
    proc = {"proc/self/ns/mnt": "", "proc/7/ns/mnt": ""}
    seen = context_of(mode=Gone(), root=tmp_path, files=proc, server_pid=7)
    assert only(RULES, seen).text == (
        "the rules cannot be read: the running process keeps its objects in files of another "
        "mount namespace"
    )
    assert rules(NeedyMode(support=Support(usable=False))).verdict is Verdict.UNKNOWN


@contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_lock_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rules, "_PAUSE", 0.0)
    monkeypatch.setattr(node_rules, "sees_processes", lambda _: True)
    monkeypatch.delenv("XTABLES_LOCKFILE", raising=False)
    (tmp_path / "proc").symlink_to("/proc")
    mode = NeedyMode(Requirements(lock="/run/xtables.lock"))
    context = context_of(mode=mode, root=tmp_path)
    assert only(LOCK, context).verdict is Verdict.OK
    with locked(tmp_path / "run/xtables.lock"):
        result = only(LOCK, context_of(mode=mode, root=tmp_path))
        assert result.verdict is Verdict.ERROR
        assert f"is kept locked by pid {os.getpid()}" in result.text
    assert only(LOCK, context_of(mode=NeedyMode())).verdict is Verdict.SKIPPED


def test_a_lock_as_a_container_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rules, "_PAUSE", 0.0)
    monkeypatch.delenv("XTABLES_LOCKFILE", raising=False)
    mode = NeedyMode(Requirements(lock="/run/xtables.lock"))
    mountinfo = tmp_path / "proc/self/mountinfo"
    mountinfo.parent.mkdir(parents=True)
    mountinfo.write_text("35 1 98:0 / / rw - overlay overlay rw\n")

    def look() -> CheckResult:
        return only(LOCK, context_of(mode=mode, root=tmp_path))

    assert look().verdict is Verdict.UNKNOWN  # the file of the node is not there
    with locked(tmp_path / "run/xtables.lock"):
        result = look()
        assert result.verdict is Verdict.ERROR
        assert "is kept locked by a process that cannot be seen from here" in result.text
    assert look().verdict is Verdict.UNKNOWN
    mountinfo.write_text("36 1 98:0 /mnt /run/xtables.lock rw - tmpfs tmpfs rw\n")
    assert look().verdict is Verdict.OK


def test_a_lock_that_many_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rules, "_PAUSE", 0.0)
    holders = iter(f" by pid {number} (iptables)" for number in range(100))
    monkeypatch.setattr(node_rules, "sees_processes", lambda _: True)
    monkeypatch.setattr(node_rules, "lock_holder", lambda *_: next(holders))
    mode = NeedyMode(Requirements(lock="/run/xtables.lock"))
    assert only(LOCK, context_of(mode=mode, root=tmp_path)).verdict is Verdict.WARNING


def test_too_many_rules() -> None:
    few = context_of(*THINGS, mode=synced(needs=Requirements(most_rules=100)))
    assert only(NUMBER, few).text == "4 rules"
    many = context_of(*THINGS, mode=synced(needs=Requirements(most_rules=3, instead="use maps")))
    result = only(NUMBER, many)
    assert (result.verdict, result.remedy) == (Verdict.WARNING, "use maps")
    assert only(NUMBER, context_of(mode=synced())).verdict is Verdict.SKIPPED


def test_sysctls_of_the_mode(tmp_path: Path) -> None:
    def said(value: str) -> list[str]:
        settings = (Setting("proc/sys/net/a", 1), Setting("proc/sys/net/b", 5, at_least=True))
        files = {"proc/sys/net/a": value, "proc/sys/net/b": "9"}
        mode = NeedyMode(Requirements(settings=settings))
        return [only(SYSCTLS, context_of(mode=mode, root=tmp_path, files=files)).text]

    assert said("1") == ["all 2 sysctls of the mode are set"]
    assert said("0") == ["/proc/sys/net/a is 0, not 1"]
    assert only(SYSCTLS, context_of(mode=NeedyMode())).verdict is Verdict.SKIPPED
    missing = NeedyMode(Requirements(settings=(Setting("proc/sys/net/c", 1),)))
    assert only(SYSCTLS, context_of(mode=missing, root=tmp_path)).verdict is Verdict.UNKNOWN


def test_checks_of_rules_share_one_reading() -> None:
    mode = synced(needs=Requirements(most_rules=100))

    async def both() -> None:
        context = context_of(*THINGS, mode=mode)
        await asyncio.gather(node_rules.rules(context), node_rules.number_of_rules(context))
        await context.aclose()

    asyncio.run(both())
    assert mode.reads == 1
