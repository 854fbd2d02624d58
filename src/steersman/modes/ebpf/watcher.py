"""Work between syncs: devices that come and go, connections that end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeAlias, TypeVar

from steersman.host.netlink import AnswersLostError, DumpInterruptedError, Subscription
from steersman.host.nlmsg import Message
from steersman.host.worker import Pause, finish
from steersman.model.errors import BusyError
from steersman.modes.ebpf.datapath import Datapath
from steersman.modes.ebpf.nat_hooks import NatHookGuard

T = TypeVar("T")
Steps: TypeAlias = Generator[Pause | None, None, None]
log = logging.getLogger("steersman.ebpf")
_SETTLE = 0.02  # seconds; a new device brings several notifications
_COLLECT = 30.0  # seconds between two passes over all connections
_RETRY = 1.0  # seconds before failed work is repeated
_ATTEMPTS = 5  # at once, if a list changes while the kernel sends it


class DeviceWatcher:
    """Follows devices and connections in the worker's thread, while the maps are open."""

    def __init__(self, datapath: Datapath, guard: NatHookGuard) -> None:
        """Do nothing yet."""
        self._datapath = datapath
        self._guard = guard
        self.running = False
        self._news: list[Message] = []
        """Notifications to carry out."""
        self._lists_all = True
        """Whether to list all devices instead: at first, after a failure or lost notifications."""
        self._failure = ""
        """The last failure that was logged; the same one is not logged again."""
        self._holds_ports = False

    def run(self) -> Steps:
        """Watch until everything is removed, whatever goes wrong."""
        self.running = True
        try:
            while self._datapath.tables is not None:
                try:
                    yield from self._watch()
                except Exception as error:
                    self._log(error)
                    yield Pause(until=time.monotonic() + _RETRY)
        finally:
            self.running = False

    def _watch(self) -> Steps:
        clock = time.monotonic
        with closing(self._datapath.device_changes()) as changes:
            self._lists_all = True  # devices may have come before we subscribed
            collect_at, retry_at = clock() + _COLLECT, -math.inf
            while self._datapath.tables is not None:
                # An answer that is due is not waited for, but neither hurried.
                until = min(collect_at, retry_at) if self._lists_all else collect_at
                if not self._news and clock() < until:
                    yield Pause(changes.fileno(), until)
                    # A new device brings several messages: wait for the rest of them.
                    yield Pause(until=min(clock() + _SETTLE, until))
                else:
                    yield None  # calls go first
                self._take(changes)
                if (self._news or self._lists_all) and clock() >= retry_at:
                    done = yield from self._try(self._update_devices())
                    retry_at = -math.inf if done else clock() + _RETRY
                    self._lists_all |= not done
                # Every 30 s, however restless the devices are.
                if clock() >= collect_at:
                    yield from self._try(
                        self._datapath.while_open(lambda tracking: tracking.expire())
                    )
                    self._guard.remove()
                    if self._holds_ports:
                        yield from self._try(self._hold_ports())
                    collect_at = clock() + _COLLECT

    def _take(self, changes: Subscription) -> None:
        """Take the notifications that have arrived."""
        try:
            self._news += changes.waiting()
        except AnswersLostError:
            self._lists_all = True

    def _update_devices(self) -> Steps:
        """Carry out notifications, or list all devices; attach programs while syncs may go on."""
        if self._datapath.tables is None:  # closed meanwhile: do not open them again
            return
        news, self._news = self._news, []
        known = None if self._lists_all else news
        fresh = until_consistent(lambda: self._datapath.write_devices(known))
        self._lists_all = False
        yield from self._datapath.attach_devices(fresh)

    def hold_ports(self) -> None:
        """Keep netfilter from choosing the ports of masqueraded connections, from now on."""
        self._holds_ports = True
        finish(self._try(self._hold_ports()))

    def _hold_ports(self) -> Generator[None, None, None]:
        return self._datapath.while_open(lambda tracking: tracking.hold_ports())

    def _try(
        self, work: Generator[Pause | None, None, object]
    ) -> Generator[Pause | None, None, bool]:
        """Do something; log a failure and return False."""
        try:
            yield from work
        except DumpInterruptedError as error:
            log.debug("ebpf: %s (%d times); retrying in %gs", error, _ATTEMPTS, _RETRY)
            return False
        except (OSError, BusyError) as error:
            self._log(error)
            return False
        self._failure = ""
        return True

    def _log(self, error: Exception) -> None:
        if str(error) != self._failure:
            expected = isinstance(error, OSError | BusyError)
            log.warning("ebpf: %s; retrying", error, exc_info=None if expected else error)
        self._failure = str(error)


def until_consistent(work: Callable[[], T]) -> T:
    """Repeat what lists something as long as the list changes while the kernel sends it."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return work()
        except DumpInterruptedError as error:
            log.debug("ebpf: %s; retrying at once", error)
    return work()
