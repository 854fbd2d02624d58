"""Events about this node and about Services, in events.k8s.io/v1 (behaviour 13).

Recording never waits and never fails. A task of its own posts the Events in order, each after a
random delay, since what one node reports all nodes of a cluster may report at once. One that cannot
be posted is only logged: nothing depends on them. The same Event is recorded once in ten minutes,
and an object has a limit of different ones, as in client-go's EventCorrelator.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from steersman.model.findings import printable
from steersman.model.names import ObjectName
from steersman.model.times import rfc3339

log = logging.getLogger(__name__)

CONTROLLER = "kube-proxy"
_QUEUE = 100
_NOTE_BYTES = 1024  # the API server's limit
_REPEAT_SECONDS = 600.0
_PER_OBJECT = 25
"""Events about one object in that time, as the burst of client-go's spam filter."""
_REMEMBERED = 1000


Event: TypeAlias = dict[str, Any]
"""An events.k8s.io/v1 Event as JSON."""


class EventPoster(Protocol):
    """Creates Events at the API server."""

    async def post_event(self, namespace: str, event: Event) -> None:
        """Create an Event. Any Exception is logged by the caller."""
        ...


class Regarding(msgspec.Struct, frozen=True, omit_defaults=True):
    """The object that an Event is about."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""

    def reference(self) -> dict[str, str]:
        """Return it as an ObjectReference."""
        return {"apiVersion": "v1", **msgspec.to_builtins(self)}


class Recorder:
    """Records Events from anywhere in the process, and posts them."""

    def __init__(
        self,
        poster: EventPoster,
        node_name: str,
        *,
        hostname: str = "",
        clock: Callable[[], int] = time.time_ns,
        spread: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Create a recorder.

        Args:
            spread: the longest delay of an Event, in seconds; the nodes' Events are spread over it.
        """
        self._poster = poster
        self._node = Regarding("Node", node_name)
        self._instance = f"{CONTROLLER}-{hostname or node_name}"
        self._clock = clock
        self._spread = spread
        self._hurry = asyncio.Event()
        self._queue: asyncio.Queue[tuple[str, Event]] = asyncio.Queue(_QUEUE)
        self._recorded: dict[tuple[Regarding, str, str], int] = {}
        """Time of each recent Event, oldest first."""
        self._counts: Counter[Regarding] = Counter()

    def starting(self) -> None:
        """Record that the proxy starts."""
        self.node("Normal", "Starting", "StartKubeProxy", "")

    def node(self, kind: Literal["Normal", "Warning"], reason: str, action: str, note: str) -> None:
        """Record an Event about this node."""
        self.record(self._node, kind, reason, action, note)

    def health_check_failed(self, service: ObjectName, port: int, error: str) -> None:
        """Record that a Service's health check node port cannot be listened on."""
        note = f'node {self._node.name} failed to start healthcheck "{service}" on port {port}'
        about = Regarding("Service", service.name, service.namespace)
        reason = "FailedToStartServiceHealthcheck"
        self.record(about, "Warning", reason, "Listen", f"{note}: {error}")

    def record(
        self,
        regarding: Regarding,
        kind: Literal["Normal", "Warning"],
        reason: str,
        action: str,
        note: str,
    ) -> None:
        """Record an Event, unless it repeats a recent one or its object has too many.

        Args:
            reason: a word in CamelCase.
            action: the action that was taken or failed, a word in CamelCase.
            note: the message; long ones are cut off.
        """
        now = self._clock()
        # Forget Events that are old enough to be repeated, or too many to remember.
        while self._recorded:
            key, when = next(iter(self._recorded.items()))
            if now - when < _REPEAT_SECONDS * 1e9 and len(self._recorded) < _REMEMBERED:
                break
            del self._recorded[key]
            self._counts[key[0]] -= 1
            if not self._counts[key[0]]:
                del self._counts[key[0]]
        key = (regarding, reason, note)
        if key in self._recorded or self._counts[regarding] >= _PER_OBJECT:
            return
        namespace = regarding.namespace or "default"
        try:
            event = self._event(regarding, now, kind=kind, reason=reason, action=action, note=note)
            self._queue.put_nowait((namespace, event))
        except asyncio.QueueFull:
            log.warning("event queue is full: dropped %s about %s", reason, regarding.name)
            return
        self._recorded[key] = now
        self._counts[regarding] += 1

    def _event(
        self, regarding: Regarding, now: int, *, kind: str, reason: str, action: str, note: str
    ) -> Event:
        text = printable(note[:_NOTE_BYTES])
        text = text.encode()[:_NOTE_BYTES].decode(errors="ignore")
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{regarding.name}.{now:x}",
                "namespace": regarding.namespace or "default",
            },
            "eventTime": rfc3339(now, 6),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance[:128],
            "action": action,
            "reason": reason,
            "regarding": regarding.reference(),
            "type": kind,
            **({"note": text} if note else {}),
        }

    async def run(self) -> None:
        """Post recorded Events until cancelled."""
        while True:
            namespace, event = await self._queue.get()
            try:
                delay = self._spread() * random.random()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), delay)
                await self._poster.post_event(namespace, event)
            except Exception as error:
                log.warning("event %s could not be posted: %s", event["reason"], error)
            finally:
                self._queue.task_done()

    async def flush(self) -> None:
        """Post every Event recorded so far without delays; wait until that is done, or failed."""
        self._hurry.set()
        try:
            await self._queue.join()
        finally:
            self._hurry.clear()
