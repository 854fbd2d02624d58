"""Switch the mode of the running process, without a restart and without a lost connection.

Old and new mode are beside each other in the kernel for a moment (make before break: a moment
without a NAT base chain would cut every translated connection, see mode_transition.py):

    check    the new mode can run here; its plan renders; no Finding of severity error is new;
             destinations that answer now are noted for the watch          nothing is written
    serve    the new mode's first sync, beside the old mode's objects; it has followed the cluster
             since the check, as the old one has
    leave    the old mode takes no new connections: it keeps what carries its present ones, if it
             has such connections, and is removed otherwise
    compare  the kernel is read back and equals the plan
    watch    new connections keep succeeding (canary.py), for some seconds
    drain    in the background: connections that the old mode carries end, then its objects go

If a step after `check` fails, the same steps lead back: the old mode is synced again and the new
one is removed.

A process that is killed in the middle leaves the objects of both modes. Its successor serves in the
configured mode and removes what others left, as after any change of the mode.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from steersman.config import ConfigError
from steersman.model import codes
from steersman.model.errors import ApplyError, BusyError
from steersman.model.findings import Severity
from steersman.model.ruleset import Ruleset, diff
from steersman.model.switch import (
    Outcome,
    StepState,
    SwitchRequest,
    SwitchResult,
    SwitchStep,
    Tell,
)
from steersman.modes.base import Mode, release
from steersman.modes.specs import SPECS
from steersman.run.observe.drift import DriftLog
from steersman.run.process.canary import Canary, Dial, dial, targets_of
from steersman.run.process.startup import StartError
from steersman.run.sync.engine import Engine, setting_changes
from steersman.run.sync.state import SyncReport

T = TypeVar("T")

log = logging.getLogger("steersman")

_FIRST_SYNC = 300.0
"""Seconds that the first sync of a mode may take; 50,000 Services take 20."""
_TRIES = 5
"""Attempts at a step if the kernel is busy: other programs hold a lock for a moment."""
_PAUSE = 1.0  # seconds between two attempts
_POLL = 0.1  # seconds between two looks at the canary
_NAMED = 5
"""Findings and destinations that a step names."""


class SwitchError(Exception):
    """A step of a switch failed; the message says why."""


_EXPECTED = (SwitchError, ApplyError, BusyError, OSError)


class Switchable(Protocol):
    """What a switch needs of the daemon; see there."""

    engine: Engine
    turn: asyncio.Lock
    drift: DriftLog

    @property
    def configured_mode(self) -> str:
        """The mode that the configuration asks for."""

    def new_engine(self, name: str) -> Engine:
        """Make the parts of another mode."""

    def prepare_machine(self, engine: Engine) -> None:
        """Set what the machine needs for a mode."""

    async def install(self, engine: Engine, report: SyncReport) -> None:
        """Serve by another mode from now on."""

    async def compare(self, *, whole: bool) -> SyncReport | None:
        """Compare the kernel with the plan, and repair what differs."""


@dataclass
class Switch:
    """A switch to another mode."""

    daemon: Switchable
    request: SwitchRequest
    tell: Tell
    retire: Callable[..., None]
    """As `Switcher.retire`."""
    left_before: bool
    """The mode has left objects that still carry connections."""
    dial: Dial | None = None
    """As `Switcher.dial`."""

    def __post_init__(self) -> None:
        self._old = self.daemon.engine
        self._began = time.monotonic()
        plan = self._old.sync.state.plan
        proxied = plan.settings.traits.terminates_connections
        self.canary = Canary(targets_of(plan), self.dial or dial, proxied=proxied)

    def _say(self, name: str, text: str, state: StepState = "ok") -> None:
        at = round(time.monotonic() - self._began, 3)
        log.log(
            logging.WARNING if state == "failed" else logging.INFO, "switch: %s: %s", name, text
        )
        self.tell(SwitchStep(name, text, state, at))

    def _result(self, outcome: Outcome, text: str) -> SwitchResult:
        return SwitchResult(
            outcome,
            self.daemon.engine.mode.name,
            self._old.mode.name,
            text,
            self.daemon.configured_mode,
            round(time.monotonic() - self._began, 3),
            self.canary.dials,
            self.canary.failed,
        )

    async def run(self) -> SwitchResult:
        """Carry out the steps."""
        request, old = self.request, self._old.mode
        if request.to == old.name:
            return self._result("unchanged", f"{old.name} mode serves already")
        new: Engine | None = None
        try:
            known = request.to in SPECS and SPECS[request.to].platform == sys.platform
            new = self.daemon.new_engine(request.to) if known else None
            await self._check(new)
        except (*_EXPECTED, ConfigError, StartError) as error:
            self._say("check", str(error), "failed")
            await self._drop(new)
            return self._result("refused", f"{old.name} mode goes on: nothing was changed")
        assert new is not None
        if request.dry_run:
            await self._drop(new)
            text = f"{request.to} mode can serve; {old.name} mode goes on, as this was a dry run"
            return self._result("checked", text)
        async with self.canary.watching():
            try:
                await self._go(new)
            except Exception as error:  # a defect, too, must not leave the node without a mode
                if not isinstance(error, _EXPECTED):
                    log.exception("a switch failed because of a bug")
                self._say("back", f"{error}; going back to {old.name} mode", "failed")
                return await self._back(new)
        # The rest is left to the background.
        configured = self.daemon.configured_mode
        self.retire(old, new.mode, self.request.drain_seconds)
        text = f"{new.mode.name} mode serves"
        if configured != new.mode.name:
            text += (
                f"; the configuration still says {configured}, which a restart brings back: "
                f"set the mode there to keep {new.mode.name}"
            )
        return self._result("switched", text)

    async def _drop(self, new: Engine | None) -> None:
        """Release a mode that does not serve; its objects, if it left some, drain as before."""
        if new is not None and self.left_before:
            self.retire(new.mode, self._old.mode, self.request.drain_seconds)
        elif new is not None:
            await release(new.mode)

    # Check: nothing is written

    async def _check(self, new: Engine | None) -> None:
        """Say what the new mode would bring; raise SwitchError if it must not serve."""
        old = self._old
        if new is None:
            known = ", ".join(n for n, spec in SPECS.items() if spec.platform == sys.platform)
            raise SwitchError(f"there is no mode {self.request.to} here; there is {known}")
        if not old.sync.store.synced or old.sync.state.result is None:
            raise SwitchError(f"{old.mode.name} mode has not synced yet; wait until it serves")
        # Can it run?
        name = new.mode.name
        support = await new.mode.worker.do(new.mode.probe)
        if not support.usable:
            raise SwitchError(f"{name} mode cannot run here: {' '.join(support.missing)}")
        variant = f" ({new.mode.variant})" if new.mode.variant else ""
        self._say("check", f"{name} mode{variant} can run here")
        for sentence in support.missing:
            self._say("check", sentence, "note")
        for sentence in setting_changes(old, new):
            self._say("check", sentence, "note")
        # What would it write, and which Services would it serve worse?
        change = await new.sync.rehearse()
        if new.sync.broken:
            owner, why = next(iter(new.sync.broken.items()))
            raise SwitchError(
                f"the rules of {owner} cannot be rendered ({why}); please report this"
            )
        plans = len(new.sync.planner.services)
        text = f"{plans} ServicePorts, {len(change)} kernel objects to write"
        left = len(change.removed)
        self._say("check", text + (f", {left} of them to remove" if left else ""))
        # Which Findings would be new?
        have = set(self._old.sync.state.findings)
        brought = sorted(set(new.sync.planner.plan.findings) - have)
        errors = [finding for finding in brought if finding.severity is Severity.ERROR]
        for finding in (errors or brought)[:_NAMED]:
            self._say("check", f"new Finding: {finding}", "note")
        if (more := len(errors or brought) - _NAMED) > 0:
            self._say("check", f"{more} more new Findings", "note")
        if errors and not self.request.force:
            raise SwitchError(
                f"{len(errors)} Findings of severity error are new in {new.mode.name} mode: what "
                "they name would not be served; use --force to switch anyway"
            )
        # What answers now?
        await self.canary.prove()
        if self.canary.proven:
            text = f"{len(self.canary.proven)} destinations of Services answer, and are watched"
            self._say("check", text)
        else:
            text = "no TCP destination of a Service answers this node, so no connection is watched"
            self._say("check", text, "note")

    # Forth and back

    async def _go(self, new: Engine) -> None:
        """Serve in the new mode, and leave the old one; raise if it does not work."""
        old = self._old.mode

        async def free_ports(change_of: Callable[[Ruleset], Ruleset]) -> None:
            async with self.daemon.turn:
                have = await old.worker.do(old.read)
                if change := diff(have, change_of(have)):
                    await old.worker.do(old.apply, change)

        if old.free_node_ports is not None:
            await self._tried(partial(free_ports, old.free_node_ports))
        report = await self._serve(new)
        result = report.result
        assert result is not None
        before = self._old.sync.state.result
        if result.refused > (before.refused if before else 0):
            found = [str(f) for f in report.state.findings if f.code == codes.REFUSED]
            why = "; ".join(found[:_NAMED])
            raise SwitchError(f"the kernel refuses {result.refused} ServicePorts: {why}")
        text = f"{new.mode.name} mode serves beside {old.name} mode"
        self._say("serve", f"{text}: {report.state.objects} objects in {result.seconds:.2f} s")
        await self._leave(old, new.mode, "leave")
        await self._compare("compare")
        await self._watch()

    async def _back(self, new: Engine) -> SwitchResult:
        # The new mode may have touched objects of the old one, so the kernel is read again; and a
        # new Engine keeps the destinations that Services hold now.
        old, now = self._old, self.daemon.engine
        again = Engine(old.mode, old.config, old.node, old.sync.store, before=now)
        again.spared = frozenset({new.mode.name})
        try:
            await self._serve(again)
        except Exception as error:  # the sync loop of the engine that serves tries again
            text = f"{old.mode.name} mode cannot be synced either: {error}"
            self._say("back", text, "failed")
            now.sync.distrust()
            # The other one may have written something, and nobody else removes it.
            left, drain = new.mode, 0.0
            if now.mode is new.mode:
                left, drain = old.mode, self.request.drain_seconds
            self.retire(left, now.mode, drain, lambda: not now.sync.owes)
            return self._result("stuck", f"{text}; {now.mode.name} mode tries again")
        try:
            await self._leave(new.mode, again.mode, "back")
            await self._compare("back")
        except _EXPECTED as error:  # the background removes it, and the sync loop repairs
            self._say("back", f"not everything is as before yet, and tried again: {error}", "note")
        self.retire(new.mode, again.mode, 0.0)
        return self._result("back", f"{old.mode.name} mode serves again")

    async def _serve(self, engine: Engine) -> SyncReport:
        """Make the first sync of an engine, and let it serve.

        Raises:
            SwitchError: it takes too long.
            ApplyError, BusyError, OSError: the kernel does not accept it.
        """
        self.daemon.prepare_machine(engine)
        limit = asyncio.timeout(_FIRST_SYNC)
        try:
            async with self.daemon.turn, limit:
                report = await self._tried(engine.sync.run)
                assert report is not None
                await self.daemon.install(engine, report)
        except TimeoutError:
            if not limit.expired():  # a program did not answer
                raise
            text = f"the first sync of {engine.mode.name} mode takes more than {_FIRST_SYNC:g} s"
            raise SwitchError(text) from None
        return report

    async def _leave(self, old: Mode, new: Mode, step: str) -> None:
        """Let a mode take no new connections, beside another one that serves."""

        async def leave() -> int:
            have, carried = await old.worker.do(old.read), 0
            keep: Ruleset = {}
            if new.nat_hooks is not None:
                await new.worker.do(new.nat_hooks.create)
            if old.carrier is not None and (
                carried := await old.worker.do(old.carrier.connections)
            ):
                keep = old.carrier.without_new_connections(have)
            await old.worker.do(old.apply, diff(have, keep))
            if old.carrier is not None and carried:
                await old.worker.do(old.carrier.hold_ports)
            return carried

        carried = await self._tried(leave)
        if not carried and (proxy := (await old.worker.do(old.totals)).proxy) is not None:
            carried = proxy.open_connections
        text = f"{old.name} mode takes no new connections"
        if carried:
            self._say(step, f"{text}; {carried} go on through it")
        else:
            self._say(step, f"{text} and is removed")

    async def _compare(self, step: str) -> None:
        """Compare the kernel with the plan now that only one mode is in it."""
        report = await self._tried(partial(self.daemon.compare, whole=True))
        written = len(report.written) if report else 0
        if written:  # both modes may have had a part in it, or changes of the cluster
            drifts = self.daemon.drift  # a sync beside this may be the one that finds it
            repaired = drifts.repaired
            await self._tried(partial(self.daemon.compare, whole=False))
            if drifts.repaired > repaired:
                what = drifts.repairs[-1].what
                raise SwitchError(f"{what} differed again: another program writes them")
            text = f"{written} objects were missing or have changed since, and are written"
            self._say(step, text, "note")
        self._say(step, "the kernel is as planned")

    async def _watch(self) -> None:
        """Watch new connections; raise SwitchError if some destination fails again and again."""
        canary, daemon = self.canary, self.daemon
        canary.forget()
        end = time.monotonic() + self.request.watch_seconds
        before, dials = canary.failed, canary.dials
        while time.monotonic() < end or (canary.proven and canary.dials == dials):
            if failing := canary.failing:
                names = ", ".join(map(str, failing[:_NAMED]))
                raise SwitchError(f"new connections fail to {names}: {canary.failures[-1]}")
            if daemon.engine.sync.failed and time.monotonic() > end:
                raise SwitchError("syncs fail; see the log")
            await asyncio.sleep(_POLL)  # the canary dials meanwhile
        if canary.proven:
            count, failed = canary.dials - dials, canary.failed - before
            text = f"{count} new connections, {failed} failed"
            self._say("watch", text, "note" if failed else "ok")

    async def _tried(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something that the kernel may be too busy for, several times if need be."""
        for _ in range(_TRIES - 1):
            with suppress(BusyError):
                return await work()
            await asyncio.sleep(_PAUSE)
        return await work()
