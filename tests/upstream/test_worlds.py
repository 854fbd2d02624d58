"""Every recorded flow, decided by `trace` and by the rendered rules as upstream decided it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import pytest

from steersman.model.addresses import family_of, split_host_port
from steersman.model.names import Protocol
from tests.support.modes.flows import Answer, FlowCase, by_trace
from tests.support.modes.ipvs import IPVS, Servers, as_ipvs_serves
from tests.support.modes.registry import MODES, ModeUnderTest
from tests.support.stale import Entry, contains_entry, stale_entries
from tests.upstream.worlds import RECORDINGS, Record, Recording

Decide: TypeAlias = Callable[[FlowCase], Answer]

DIFFERENCES: Mapping[tuple[str, str, int, str, str], str] = {
    ("206-v6only", "nftables", 1, "[fd00:10:248::1:2]:443", "ext2"): (
        "chance: one of three endpoints was not met in 24 connections"
    ),
}
"""Why steersman does otherwise than a record: world, mode, step, destination, client."""
_REFUSED = {"TCP": "reset", "UDP": "refused by ICMP", "SCTP": "no answer"}
"""What a client meets at a port of the node where nothing listens."""


def outcome(answer: Answer, recording: Recording, record: Record) -> str:
    """Return what a client meets that is served so, in the words of the records."""
    if answer.kind != "untouched":
        words = {"forward": "answered", "reject": "refused by ICMP", "drop": "no answer"}
        return words.get(answer.kind, str(answer))
    return _REFUSED[record.protocol] if recording.is_of_node(record.address) else "not translated"


def agrees(answer: Answer, recording: Recording, record: Record) -> bool:
    """Return whether upstream did the same, as far as a record can show."""
    if outcome(answer, recording, record) != record.outcome:
        return False
    # Each address of the node looks the same to an endpoint: its own, or that of the rules.
    own = {
        end
        for end, _ in answer.ends
        if record.client == "node" or recording.is_of_node(split_host_port(end)[0])
    }
    ours = {
        (end, "" if end in own else "node" if masqueraded else "preserved")
        for end, masqueraded in answer.ends
    }
    theirs = {(end, "" if end in own else source) for end, source in record.seen}
    # A client that is kept to an endpoint does not meet the others.
    return bool(theirs) and theirs <= ours if record.affinity and ours else theirs == ours


def compare(recording: Recording, mode: str, decide: list[Decide], loopback: str = "") -> list[str]:
    """Return a line for each record that is decided otherwise, and for each stale difference.

    Args:
        mode: upstream's mode.
        loopback: upstream's mode for destinations in 127.0.0.0/8, if that is another one.
    """
    loopback, wrong = loopback or mode, []
    records = (
        record
        for each in dict.fromkeys((mode, loopback))
        for record in recording.records(each)
        if each == (loopback if record.address.startswith("127.") else mode)
    )
    for record in records:
        answer = decide[record.step](recording.flow(record))
        key = (recording.name, mode, record.step, record.destination, record.client)
        if agrees(answer, recording, record) is (key in DIFFERENCES):
            seen = ", ".join(sorted(" ".join(each) for each in record.seen))
            wrong.append(f"{record}: {answer}; upstream: {record.outcome} {seen}")
    return wrong


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) == 13


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
@pytest.mark.parametrize("recording", RECORDINGS, ids=repr)
def test_trace(recording: Recording, mode: str) -> None:
    traits = MODES[mode].traits
    plans = [world.plan(traits) for world in recording.worlds(mode)]
    assert not compare(recording, mode, [partial(by_trace, plan) for plan in plans])


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("mode", [MODES["iptables"], MODES["nftables"], MODES["ebpf"]], ids=str)
@pytest.mark.parametrize("recording", RECORDINGS, ids=repr)
def test_rules(recording: Recording, mode: ModeUnderTest) -> None:
    """What each mode renders decides as upstream's mode of that name, or as the one it is like.

    Upstream's nftables mode has no node ports on loopback even if nodePortAddresses name it. Ours
    that are like it have them then, as upstream's iptables mode.
    """
    assert mode.evaluator
    upstream = mode.like or mode.name
    plans = [world.plan(mode.traits) for world in recording.worlds(upstream)]
    decide = [mode.evaluator(plan) for plan in plans]
    loopback = "iptables" if mode.like and recording.opens_loopback else upstream
    assert not compare(recording, upstream, decide, loopback)


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("recording", RECORDINGS, ids=repr)
def test_listeners(recording: Recording) -> None:
    """Upstream has no userspace mode any more: what it renders must decide as `trace` does."""
    mode = MODES["userspace"]
    assert mode.evaluator
    plans = [world.plan(mode.traits) for world in recording.worlds("iptables")]
    decide = [mode.evaluator(plan) for plan in plans]
    wrong = []
    for record in recording.records("iptables"):
        flow = recording.flow(record)
        if flow.protocol == "SCTP":
            expected = Answer("untouched")
        else:
            expected = by_trace(plans[record.step], flow)
            expected = replace(expected, ends=frozenset((end, True) for end, _ in expected.ends))
        if (answer := decide[record.step](flow)) != expected:
            wrong.append(f"{record}: {answer}, not {expected}")
    assert not wrong


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("recording", RECORDINGS, ids=repr)
def test_virtual_servers(recording: Recording) -> None:
    """Upstream was not recorded in ipvs mode: what it renders must decide as its README says."""
    plans = [world.plan(IPVS.traits) for world in recording.worlds("iptables")]
    servers = [Servers(plan) for plan in plans]
    wrong = []
    for record in recording.records("iptables"):
        flow, plan = recording.flow(record), plans[record.step]
        told = by_trace(plan, flow)
        # The node would use the address of the Service, which is its own, as the source.
        masquerade = record.client == "node" and not recording.is_of_node(record.address)
        masquerade |= any(masq for end, masq in told.ends if not flow.calls_itself(end))
        ends = frozenset(end for end, _ in told.ends)
        flow = replace(flow, kind=told.kind, endpoints=ends, masquerade=masquerade)
        (served,) = as_ipvs_serves((flow,), plan)
        if (answer := servers[record.step].answer(flow)) != served.expected:
            wrong.append(f"{record}: {answer}, not {served.expected}")
    assert not wrong


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
@pytest.mark.parametrize("recording", RECORDINGS, ids=repr)
def test_health_checks(recording: Recording, mode: str) -> None:
    plans = [world.plan(MODES[mode].traits) for world in recording.worlds(mode)]
    checks = list(recording.health_checks(mode))
    assert checks
    for check in checks:
        ready = {
            plan.ready_here
            for key, plan in plans[check.step].services.items()
            if plan.health_check_node_port
            and key.name.object_name.name == check.service
            and key.family is family_of(check.address)
        }
        assert ready == ({check.ready} if check.status else set()), check
        assert check.status in (0, 200 if check.ready else 503), check


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
@pytest.mark.parametrize("recording", RECORDINGS, ids=repr)
def test_open_flows(recording: Recording, mode: str) -> None:
    """Connections stay, and a client of UDP that never pauses comes to the endpoints of now.

    Which endpoint a client had is not recorded: each of those it could have is looked at.
    """
    worlds = recording.worlds(mode)
    plans = [world.plan(MODES[mode].traits) for world in worlds]
    seen = Counter[str]()
    for record, before, after in recording.open_flows(mode):
        family, flow = family_of(record.address), recording.flow(record)
        found = stale_entries(plans[record.step], worlds[record.step].snapshot, family)
        entry = partial(Entry, Protocol(record.protocol).number, record.address, record.port)
        had = {end for end, _ in by_trace(plans[record.step - 1], flow).ends}
        told = by_trace(plans[record.step], flow)
        ended = {end for end in had if contains_entry(found, entry(*split_host_port(end)))}
        seen[f"{record.protocol} {before} {after}"] += 1
        if record.protocol == "TCP":
            assert (before, after, ended) == ("ok", "alive", set()), record
        elif (before, after) == ("ok", "timeout"):
            assert ended == had, record
        elif before != "ok" and after == "valid":
            assert told.kind == "forward", record
            untranslated = entry(record.address, record.port)
            assert contains_entry(found, untranslated), record
        elif after == "valid":
            kept = {end for end, _ in told.ends} & had
            # Who has one that is published though it does not serve chooses again.
            out = recording.not_serving(record.step)
            assert {split_host_port(end)[0] for end in kept & ended} <= out, record
    assert seen["TCP ok alive"] > 10
    assert seen["UDP ok valid"] > 5
