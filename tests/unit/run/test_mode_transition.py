"""Leaving a mode that carries connections: they get time, and the log counts those that are cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable

import pytest

from steersman.host.exec import SubprocessExec
from steersman.model.errors import ApplyError, BusyError
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset, patch
from steersman.modes.base import Mode, Support
from steersman.modes.capabilities import Carrier
from steersman.modes.specs import ModeOptions, ModeSpec
from steersman.run.process import mode_transition
from steersman.run.process.mode_transition import (
    Leftovers,
    clean_up,
    remove_leftovers,
    remove_leftovers_once,
)
from tests.support.modes.inline import Held, Inline


class Carrying(Mode):
    """A mode with one server and one rule, and connections that end one by one."""

    name = "carrying"
    traits = Traits()
    worker = Inline()

    def __init__(self, *connected: int) -> None:
        self.have: dict[str, str] = {"server": "open", "rule": "x"}
        self.history: list[dict[str, str]] = []
        self.held_after: dict[str, str] = {}
        self.connected = list(connected)
        self.carrier = Connections(self)
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def probe(self) -> Support:
        return Support(usable=True)

    def render_node(self, settings: NodeSettings) -> Ruleset:
        raise NotImplementedError

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        raise NotImplementedError

    def read(self) -> Ruleset:
        return dict(self.have)

    def fingerprint(self) -> Hashable | None:
        return None

    def apply(self, change: Diff) -> None:
        self.have = patch(self.have, change)
        self.history.append(self.have)


class Connections(Carrier):
    """The connections of a mode that carries some."""

    def __init__(self, mode: Carrying) -> None:
        self._mode = mode

    def hold_ports(self) -> None:
        self._mode.held_after = self._mode.history[-1]

    def without_new_connections(self, have: Ruleset) -> Ruleset:
        return {"server": "closing"} if "server" in have else {}

    def connections(self) -> int:
        left = self._mode.connected
        return left.pop(0) if len(left) > 1 else left[0]


def left(mode: Carrying, patience: float = 0.0) -> str:
    (said,) = asyncio.run(remove_leftovers_once([("carrying", mode)], patience)).messages
    return said


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_transition, "_POLL", 0.0)


def test_they_get_time() -> None:
    mode = Carrying(2, 2, 1, 0)
    assert left(mode, 60.0) == "carrying mode: removed 2 kernel objects that it left behind"
    assert mode.history == [{"server": "closing"}, {}]
    assert mode.held_after == {"server": "closing"}, "no connection comes that is not held"


def test_but_not_for_ever() -> None:
    mode = Carrying(2)
    assert "; 2 connections were cut" in left(mode, 0.001)
    assert mode.history == [{"server": "closing"}, {}]


def test_without_patience_they_are_cut() -> None:
    mode = Carrying(3)
    assert "; 3 connections were cut, --drain-period" in left(mode)
    assert mode.history == [{}]


def test_nobody_waits_for_nobody() -> None:
    mode = Carrying(0)
    assert "cut" not in left(mode, 60.0)
    assert mode.history == [{}]


def test_a_mode_that_does_not_say() -> None:
    class Silent(Connections):
        def connections(self) -> int:
            raise BusyError("gone")

    mode = Carrying(1)
    mode.carrier = Silent(mode)
    assert "its leftovers stay: gone" in left(mode, 60.0)


@pytest.mark.parametrize("error", [BusyError("the lock"), ApplyError("in use"), OSError(24, "x")])
def test_what_cannot_be_removed_now_is_removed_later(error: Exception) -> None:
    class Held(Carrying):
        held = True

        def apply(self, change: Diff) -> None:
            if self.held:
                raise error
            super().apply(change)

    async def release(_: float) -> None:
        waits.append(dict(mode.have))
        mode.held = len(waits) < 2

    mode, waits = Held(0), list[dict[str, str]]()
    other = Carrying(0)
    asyncio.run(remove_leftovers([("held", mode), ("other", other)], sleep=release))
    assert (mode.have, len(waits), len(other.history)) == ({}, 2, 1)


def test_syncs_wait_for_the_attempt_after_a_failed_one() -> None:
    """iptables-nft begins to read again whenever a sync changes a rule."""
    syncs = {"run": True}

    class Disturbed(Carrying):
        def probe(self) -> Support:
            if syncs["run"]:
                raise BusyError("iptables-save did not end within 60 s")
            return super().probe()

    @contextlib.asynccontextmanager
    async def quiet() -> AsyncIterator[None]:
        syncs["run"] = False
        yield
        syncs["run"] = True

    async def at_once(_: float) -> None:
        return

    mode = Disturbed(0)
    asyncio.run(remove_leftovers([("disturbed", mode)], sleep=at_once, quiet=quiet))
    assert (mode.have, syncs["run"]) == ({}, True)


async def test_syncs_wait_for_a_slow_attempt_for_some_seconds_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mode_transition, "_QUIET_SECONDS", 0.01)
    worker, attempts = Held("probe"), list[str]()

    class Slow(Carrying):
        def probe(self) -> Support:
            attempts.append("probe")
            if len(attempts) == 1:
                raise BusyError("the lock")
            return super().probe()

    async def at_once(_: float) -> None:
        worker.go.clear()

    @contextlib.asynccontextmanager
    async def quiet() -> AsyncIterator[None]:
        yield
        worker.go.set()

    mode = Slow(0)
    mode.worker = worker

    async with asyncio.timeout(60):
        await remove_leftovers([("slow", mode)], sleep=at_once, quiet=quiet)
    assert mode.have == {}


@pytest.mark.parametrize(("refusals", "looks", "history"), [(2, 3, [{}]), (9, 3, [])])
def test_a_mode_that_cannot_be_looked_at_is_looked_at_again(
    refusals: int, looks: int, history: list[dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    class Hidden(Carrying):
        looks = 0

        def probe(self) -> Support:
            self.looks += 1
            return Support(usable=self.looks > refusals, missing=("a lock is held.",))

    async def at_once(_: float) -> None:
        return

    mode = Hidden(0)
    asyncio.run(remove_leftovers([("hidden", mode)], sleep=at_once))
    assert (mode.looks, mode.history) == (looks, history)
    assert "remain; retrying" not in caplog.text, "there may be nothing of it"


@pytest.mark.parametrize(
    "error", [None, BusyError("the lock"), ApplyError("in use"), OSError(2, "x")]
)
def test_a_clean_up_closes_each_mode(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Carrying):
        def apply(self, change: Diff) -> None:
            if error is not None:
                raise error
            super().apply(change)

    modes = [Failing(0), Carrying(0)]
    left = [Leftovers(ModeSpec("carrying"), "", mode) for mode in modes]
    monkeypatch.setattr(mode_transition, "leftover_modes", lambda *_: iter(left))
    asyncio.run(clean_up(SubprocessExec(), ModeOptions()))
    assert [mode.closed for mode in modes] == [1, 1]
    assert not modes[1].have
