"""Every object that a mode renders can be printed in the words of its tool, with its purpose."""

from __future__ import annotations

import pytest

from steersman.host.listening import ListeningSocket
from steersman.host.worker import KernelWorker
from steersman.model.names import Family, PlanKey, Protocol
from steersman.model.plan import Verdict
from steersman.model.ruleset import Diff
from steersman.modes.kinds import Words, iptables_rules
from steersman.modes.nftables import words as nftables_words
from steersman.modes.words import KernelWords
from steersman.proxy.listeners import Decision, ListenerPlan
from tests.support.builders import case_files
from tests.support.builders.objects import HTTP
from tests.support.modes.ipvs import IPVS
from tests.support.modes.registry import MODES, NFTABLES, ModeUnderTest, render

every_mode = pytest.mark.parametrize("under_test", [*MODES.values(), IPVS], ids=lambda m: m.name)


@every_mode
def test_every_line_of_a_service_says_what_it_is_for(under_test: ModeUnderTest) -> None:
    silent, lines = [], 0
    for name in case_files.names():
        mode = under_test.offline()
        plan = case_files.world(name, mode.traits).plan(mode.traits)
        words = mode.words
        for service in plan.services.values():
            wanted = words.wanted(mode.render_service(service, plan.settings), {})
            for key, value in wanted.items():
                for line in words.words(key, value):
                    lines += 1
                    assert line.place
                    if not line.purpose:
                        silent.append(f"{name}: {line.place}: {line.text}")
    assert lines
    assert not silent


@every_mode
def test_objects_of_a_service_are_found_among_all(under_test: ModeUnderTest) -> None:
    """All of its own and of no other Service, by what the kernel has."""
    for name in case_files.names():
        mode = under_test.offline()
        plan = case_files.world(name, mode.traits).plan(mode.traits)
        words = mode.words
        kernel = words.wanted(render(plan, mode), {})
        for service in plan.services.values():
            own = words.wanted(mode.render_service(service, plan.settings), {})
            found = set(words.of_services(kernel, [service]))
            others = {
                key
                for other in plan.services.values()
                if other.key != service.key
                for key in words.wanted(mode.render_service(other, plan.settings), {})
            }
            assert found - own.keys() <= others | {
                key for key in kernel if words.is_on_path(key, [service])
            }, name
            if under_test.name != "userspace":  # sockets are found by the rules that lead there
                assert own.keys() <= found, name


def test_a_diff_is_printed_by_line() -> None:
    words = KernelWords(KernelWorker(), dict)
    change = Diff(
        added={("nat", "B", ""): "-A B 1\n-A B 2", "empty": ""},
        removed={("nat", "A"): "-A A 1"},
        changed={"c": ("kept\nold", "kept\nnew")},
    )
    assert words.describe(change).splitlines() == [
        "- nat A: -A A 1",
        "+ nat B: -A B 1",
        "+ nat B: -A B 2",
        "+ empty: ",
        "- c: old",
        "+ c: new",
    ]
    assert words.describe(Diff()) == ""


@every_mode
def test_every_object_of_a_diff_is_printed(under_test: ModeUnderTest) -> None:
    mode = under_test.offline()
    plan = case_files.world(case_files.names()[0], mode.traits).plan(mode.traits)
    words, ruleset = mode.words, dict(render(plan, mode))
    lines = words.describe(Diff(ruleset)).splitlines()
    assert len(lines) >= len(ruleset)
    assert all(line.startswith("+ ") for line in lines)
    assert words.describe(Diff({}, ruleset)) == "\n".join(f"-{line[1:]}" for line in lines)


def test_a_chain_without_rules_is_printed_as_iptables_save_declares_it() -> None:
    key = (Family.IPV6, "nat", "KUBE-SEP-A", "")
    assert iptables_rules(key, "") == [
        Words("ip6tables -t nat, chain KUBE-SEP-A", ":KUBE-SEP-A - [0:0]", "has no rule")
    ]


def test_sockets_are_read_once_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may be about thousands of Services, and a node may have as many sockets."""
    reads = 0

    def listening() -> dict[ListeningSocket, int]:
        nonlocal reads
        reads += 1
        return {ListeningSocket(Protocol.TCP, "127.0.0.1", 30080): 7}

    monkeypatch.setattr(nftables_words, "listening_sockets", listening)
    drop = Decision(Verdict.DROP)
    served, missing = (
        ListenerPlan(PlanKey(HTTP, Family.IPV4), "127.0.0.1", port, drop, drop, drop)
        for port in (30080, 30081)
    )
    words = NFTABLES.offline().words
    for _ in range(3):
        assert words.wanted({b"a": served, b"b": missing}, {}) == {b"b": missing}
    assert reads == 1
