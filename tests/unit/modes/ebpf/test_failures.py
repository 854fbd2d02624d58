"""Which answers, and which failures, the ebpf mode returns from what its programs have noted."""

from __future__ import annotations

import errno
import re
import time
from collections import Counter
from typing import cast

import pytest

from steersman.failover.watch import Failure
from steersman.model.failover import Backend, Observation
from steersman.model.names import Protocol
from steersman.modes.ebpf import failures, layout
from steersman.modes.ebpf.bpf import HashMap
from steersman.modes.ebpf.failures import EbpfFailures, Event
from steersman.modes.ebpf.loader import StaleMapsError, explain

SECOND = 1_000_000_000
NOW = 1000 * SECOND
CLIENT = layout.pack_address("10.244.1.100")
TCP, UDP = Protocol.TCP.number, Protocol.UDP.number
SILENT, REFUSED = 1, 2


def end(number: int) -> bytes:
    return layout.pack_address(f"10.244.2.{number}") + (8080).to_bytes(2, "big")


def backend(number: int) -> Backend:
    return Backend(f"10.244.2.{number}", 8080, Protocol.TCP)


class Noted(EbpfFailures):
    """What programs have noted, in dicts."""

    def __init__(self) -> None:  # without a kernel
        self.health: dict[bytes, bytes] = {}
        self.latest = b""
        self._health = cast("HashMap", self.health)
        self._answers = cast("HashMap", self)
        self._told, self._last_read = {}, 0
        self._silent = Counter()
        self._counts_since = 0.0

    def get(self, _key: bytes) -> bytes:
        return self.latest

    def answer(self, number: int, at: int) -> None:
        self.health[layout.SLOT.pack(end(number))] = layout.HEALTH.pack(at, 0, 0)
        self.latest += layout.ANSWER.pack(end(number), at)

    def answered(self, *events: Event) -> list[Backend]:
        found = list(self._answered(events))
        assert {each.observation for each in found} <= {Observation.ANSWERED}
        return [each.backend for each in found]


def event(number: int, kind: int = SILENT, protocol: int = TCP, at: int = NOW) -> Event:
    return Event(end(number), CLIENT, at, protocol, kind)


@pytest.mark.parametrize(
    ("kind", "age", "told"),
    [
        (SILENT, SECOND // 2, True),  # after the SYN that is sent again now
        (SILENT, SECOND, False),  # before
        (REFUSED, SECOND // 2, False),
        (REFUSED, -SECOND // 100, True),
    ],
)
def test_an_answer_counts_if_it_is_newer_than_the_failure(kind: int, age: int, told: bool) -> None:
    noted = Noted()
    noted.answer(1, NOW - age)
    assert noted.answered(event(1, kind)) == [backend(1)] * told
    assert noted.answered(event(1, kind)) == []  # once


def test_others_that_answer_now_are_witnesses() -> None:
    noted = Noted()
    noted.answer(1, NOW - SECOND // 10)
    noted.answer(2, NOW - SECOND // 2)
    noted.answer(3, NOW - 5 * SECOND)
    assert noted.answered(event(4)) == [backend(1), backend(2)]
    assert noted.answered(event(4, at=NOW + SECOND // 10)) == []
    noted.answer(2, NOW + SECOND // 10)
    assert noted.answered(event(4, at=NOW + SECOND // 5)) == [backend(2)]


def test_a_refused_datagram_says_nothing_about_the_same_port_of_tcp() -> None:
    noted = Noted()
    noted.answer(1, NOW - 1)
    assert noted.answered(event(1, REFUSED, UDP)) == [backend(1)]
    assert event(1, REFUSED, UDP).failure == Failure(
        Backend("10.244.2.1", 8080, Protocol.UDP), Observation.REFUSED, "10.244.1.100"
    )


def test_answers_of_very_many_endpoints_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_REMEMBERED", 2)
    noted = Noted()
    for number in (1, 2, 3):
        noted.answer(number, NOW)
        noted.latest = b""
        assert noted.answered(event(number)) == [backend(number)]
    assert noted.answered(event(1)) == [backend(1)]  # it was told before


def test_two_silent_connections_are_told_until_it_is_known_who_answers() -> None:
    noted = Noted()
    noted._counts_since = time.monotonic()
    found = list(noted._failures([*[event(1)] * 5, event(2), *[event(1, REFUSED)] * 5]))
    assert Counter(each.backend for each in found) == {backend(1): 7, backend(2): 1}
    noted._counts_since -= 2.0
    assert len(list(noted._failures([event(1)] * 5))) == 5


def test_a_client_that_is_not_bound_is_not_named() -> None:
    unbound = Event(end(1), layout.IPV4_PREFIX + bytes(4), NOW, TCP, SILENT)
    assert unbound.failure == Failure(backend(1), Observation.SILENT)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StaleMapsError(frozenset({"seats"})), "another version of steersman .*seats"),
        (FileNotFoundError(errno.ENOENT, "", str(failures.FILE)), "not installed"),
        (FileNotFoundError(errno.ENOENT, "", "/pins"), "not attached: "),
        (PermissionError(errno.EPERM, "no"), "needs root"),
        (OSError(errno.EINVAL, "no"), "Linux 5.18 with BTF"),
    ],
)
def test_the_reason_is_said(error: OSError | StaleMapsError, said: str) -> None:
    assert re.search(said, explain(error, failures.FILE))
