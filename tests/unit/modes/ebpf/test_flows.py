"""Flows: their timeouts, and which of them have expired."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest

from steersman.modes.ebpf import flows, layout
from steersman.modes.ebpf.bpf import HashMap
from steersman.modes.ebpf.flows import Timeouts, read_timeouts
from tests.support.steps import result_of


def test_timeouts_are_those_of_netfilter(tmp_path: Path) -> None:
    (tmp_path / "nf_conntrack_udp_timeout").write_text("7\n")
    (tmp_path / "nf_conntrack_tcp_timeout_established").write_text("what?\n")
    assert read_timeouts(tmp_path) == Timeouts(udp=7)


CLIENT, VIP, POD, HOST = (
    layout.pack_address(address) + port.to_bytes(2, "big")
    for address, port in (
        ("203.0.113.9", 40000),
        ("10.96.0.1", 80),
        ("10.244.0.5", 8080),
        ("192.0.2.1", 40000),
    )
)
NOW, SECOND = 10**15, 10**9
TIMEOUTS = Timeouts()


def entry(
    ends: tuple[bytes, bytes], hook: int, kind: int, to: bytes, age: float, state: int
) -> tuple[bytes, bytes]:
    address, port = layout.split_endpoint(to)
    last = NOW - int(age * SECOND)
    value = layout.FLOW.pack(address, last, port.to_bytes(2, "big"), kind, state, 1)
    return layout.flow_key(*ends, 6, hook), value


def connection(ages: tuple[float, float], states: tuple[int, int]) -> list[tuple[bytes, bytes]]:
    """The two entries of a connection that is not masqueraded."""
    return [
        entry((CLIENT, VIP), flows.INGRESS, flows.TO_ENDPOINT, POD, ages[0], states[0]),
        entry((POD, CLIENT), flows.EGRESS, flows.FROM_SERVICE, VIP, ages[1], states[1]),
    ]


OPENING, ESTABLISHED, FINISHED = flows.OPENING, flows.ESTABLISHED, flows.FINISHED


@pytest.mark.parametrize(
    ("ages", "states", "expired"),
    [
        ((61, 61), (OPENING, OPENING), True),
        ((61, 59), (OPENING, OPENING), False),
        ((90000, 90000), (ESTABLISHED, ESTABLISHED), True),
        ((90000, 1), (ESTABLISHED, ESTABLISHED), False),
        ((3601, 3601), (FINISHED, ESTABLISHED), True),
        ((3601, 3601), (ESTABLISHED, FINISHED), True),
        ((3601, 3601), (ESTABLISHED, ESTABLISHED), False),
        ((3601, 3599), (FINISHED, ESTABLISHED), False),
    ],
)
def test_both_directions_expire_together(
    ages: tuple[float, float], states: tuple[int, int], expired: bool
) -> None:
    entries = connection(ages, states)
    for key, value in entries:
        found = flows.expired_entries(key, value, dict(entries).get, TIMEOUTS, NOW)
        assert found == (dict(entries) if expired else {})


def test_an_entry_without_its_opposite_expires_alone() -> None:
    (key, value), other = connection((61, 61), (OPENING, OPENING))
    alone: dict[bytes, bytes] = {}
    assert flows.expired_entries(key, value, alone.get, TIMEOUTS, NOW) == {key: value}
    # An opposite entry of another connection does not count.
    elsewhere = entry((POD, CLIENT), flows.EGRESS, flows.FROM_SERVICE, HOST, 1, OPENING)
    assert elsewhere[0] == other[0]
    found = flows.expired_entries(key, value, dict([elsewhere]).get, TIMEOUTS, NOW)
    assert found == {key: value}


class Busy(dict[bytes, bytes]):
    """A map of flows; connections in `reopened` are opened again while it is read."""

    reopened: frozenset[bytes] = frozenset()
    size = 2
    """Entries of a batch."""

    def batches(self) -> Iterator[list[tuple[bytes, bytes]]]:
        rest = list(self)
        while some := [key for key in rest if key in self][: self.size]:
            batch = [(key, self[key]) for key in some]
            for key in self.reopened:
                address, _, *more = layout.FLOW.unpack(self[key])
                self[key] = layout.FLOW.pack(address, NOW, *more)
            yield batch
            rest = [key for key in rest if key not in some]

    def delete_all(self, keys: Iterable[bytes]) -> int:
        return sum(self.pop(key, None) is not None for key in list(keys))


def collect(many: Busy) -> flows.Collected:
    """All steps of a pass."""
    return result_of(flows.collect(cast(HashMap, many), TIMEOUTS))


@pytest.mark.parametrize("which", [0, 1])
def test_a_connection_that_is_opened_again_stays(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic_ns", lambda: NOW)
    entries = connection((61, 61), (OPENING, OPENING))
    many = Busy(entries)
    many.reopened = frozenset([entries[which][0]])
    assert collect(many) == flows.Collected(2, 0)
    assert set(many) == {key for key, _ in entries}
    many = Busy(entries)
    assert collect(many) == flows.Collected(0, 2)
    assert many == {}


def test_a_pass_holds_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted with its opposite, an entry of a later batch is not counted twice."""
    monkeypatch.setattr("time.monotonic_ns", lambda: NOW)
    old = connection((61, 61), (OPENING, OPENING))
    young = entry((HOST, VIP), flows.INGRESS, flows.TO_ENDPOINT, POD, 1, OPENING)
    many = Busy([old[0], young, old[1]])
    many.size = 1
    steps = flows.collect(cast(HashMap, many), TIMEOUTS)
    next(steps)
    assert dict(many) == dict([young]), "both entries of the first connection are gone"
    steps.close()
    many = Busy([old[0], young, old[1]])
    many.size = 1
    assert collect(many) == flows.Collected(1, 2)
