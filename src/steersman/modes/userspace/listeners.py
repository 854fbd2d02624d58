"""Change the proxy's listeners from the mode's thread.

They live on the event loop. Only this thread asks for changes, and waits for the end of each: so it
may read them without a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple

from steersman.model.ruleset import Diff
from steersman.modes.userspace.render import (
    left_without_endpoints,
    listeners_of,
    removed_listeners,
)
from steersman.proxy.engine import Proxy, RunningListener
from steersman.proxy.listeners import FrontendKey, ListenerPlan


class Started(NamedTuple):
    """The listeners that `start` has started or changed."""

    wanted: Mapping[FrontendKey, ListenerPlan]
    before: Mapping[FrontendKey, ListenerPlan]
    """The plans until then of those that existed."""
    replaced: Mapping[FrontendKey, RunningListener]
    """Listeners that others take the place of; they still accept."""

    @property
    def opened(self) -> set[FrontendKey]:
        """The listeners that are new, or have another port now."""
        return {key for key in self.wanted if key not in self.before or key in self.replaced}


class Listeners:
    """The listeners of a proxy. A change begins with `start`, and ends with one of the others."""

    def __init__(self, proxy: Proxy, on_loop: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        """Change the listeners of a proxy; on_loop: runs a coroutine where they are."""
        self._proxy = proxy
        self._on_loop = on_loop

    @property
    def keys(self) -> Iterable[FrontendKey]:
        """The keys of all listeners."""
        return self._proxy.listeners

    def port(self, key: FrontendKey) -> int:
        """Return the port of a listener; 0 for an unknown one."""
        return self._proxy.port(key)

    def start(self, change: Diff) -> Started:
        """Start the listeners that a Diff adds, and change plans; replaced ones still accept.

        Raises:
            ApplyError: one cannot be started; then nothing has changed.
        """
        wanted = listeners_of(change)
        before = self._proxy.plans(wanted)
        return Started(wanted, before, self._on_loop(self._proxy.start(wanted)))

    def go_back(self, started: Started) -> None:
        """Use the listeners and plans from before `start` again."""

        async def back() -> None:
            self._proxy.put_back(started.replaced)
            # The predecessor's rules may lead to the sockets that it handed over.
            fresh = [
                key
                for key, plan in started.wanted.items()
                if key not in started.before and not self._proxy.inherits(key, plan)
            ]
            self._proxy.stop(self._proxy.take(fresh))
            await self._proxy.start(started.before)

        self._on_loop(back())

    def finish(self, started: Started, change: Diff) -> None:
        """Stop the listeners that a Diff removes or replaces: nothing leads to them any more."""

        async def stop() -> None:
            self._proxy.reset_connections(left_without_endpoints(change))
            gone = self._proxy.take(removed_listeners(change))
            self._proxy.stop([*started.replaced.values(), *gone])

        self._on_loop(stop())
