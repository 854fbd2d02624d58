"""Userspace modes in a lab's node: their loop is a thread there.

A proxy forwards only while its loop runs, and tests come and go: so each node has one loop and one
mode for as long as this process lives.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from steersman.host.exec import Exec
from steersman.host.netns import enter
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.base import Mode, Support, release
from steersman.modes.specs import ModeOptions
from steersman.modes.userspace.core import UserspaceMode
from steersman.modes.userspace.mode import linux_portals
from steersman.proxy import tcp
from tests.support.ending import ENDING
from tests.support.lab.inside import Inside
from tests.support.modes.inline import Inline
from tests.support.waiting import PATIENCE

P = ParamSpec("P")
T = TypeVar("T")


class LoopThread:
    """An event loop in a thread that is in a network namespace."""

    def __init__(self, netns: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(enter, netns)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def close(self, last: Coroutine[Any, Any, Any]) -> None:
        self.call(last)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class ThreadedMode(Mode):
    """A mode whose impure half runs in a loop of its own."""

    worker = Inline()

    def __init__(self, mode: UserspaceMode, netns: Path) -> None:
        self.inner = mode
        self.name, self.traits = mode.name, mode.traits
        self._thread = LoopThread(netns)

    def _do(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.call(self.inner.worker.do(call, *args, **kwargs))

    def probe(self) -> Support:
        return self._do(self.inner.probe)

    def render_node(self, settings: NodeSettings) -> Ruleset:
        return self.inner.render_node(settings)

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        return self.inner.render_service(plan, settings)

    def read(self) -> Ruleset:
        return self._do(self.inner.read)

    def apply(self, change: Diff) -> None:
        self._do(self.inner.apply, change)

    def close(self) -> None:
        self._thread.close(release(self.inner))


def userspace_mode(
    execute: Exec,
    variant: str = "",
    options: ModeOptions | None = None,
    *,
    handoff: str = "",
) -> UserspaceMode:
    """The mode with rules of a variant (`nft`, `legacy`, `nftables`) or other portals."""
    tool = variant if variant in {"nft", "legacy"} else ""
    kind = "" if tool else variant
    portals = linux_portals(execute, kind, iptables_variant=tool)
    return UserspaceMode("userspace", portals, options, handoff)


@contextmanager
def patient_dials() -> Iterator[None]:
    """Let the proxies of this process wait a minute for each endpoint.

    On a machine under load a connection may take longer than the first 0.25 s, and the endpoint
    would then be tried last for ten seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp, "DIAL_TIMEOUTS", (PATIENCE,) * len(tcp.DIAL_TIMEOUTS))
        yield


_running: dict[str, ThreadedMode] = {}


def userspace_behind(execute: Exec, variant: str) -> Mode:
    """The mode in the namespace in which an Exec runs programs, the same one each time."""
    if not isinstance(execute, Inside):
        return userspace_mode(execute, variant)
    path = str(execute.netns)
    for other in [other for other in _running if not os.path.exists(other)]:
        _running.pop(other).close()
    if path not in _running:
        _running[path] = ThreadedMode(userspace_mode(execute, variant), execute.netns)
    return _running[path]


def _close() -> None:
    for mode in _running.values():
        mode.close()


ENDING.callback(_close)
