"""The configuration file of a running process: reload it if it changes, apply it if possible.

An invalid file is a Finding, and the process keeps its configuration (upstream's process ends
instead: behaviour 1.1, step 8).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from steersman.config import ConfigError, Parsed, ProxyConfig, reload_file, reload_plan
from steersman.config import findings as config_findings
from steersman.host.directories import Inotify, Polling
from steersman.host.sysctl import SysctlError
from steersman.model import codes
from steersman.model.findings import Finding
from steersman.model.plan import Traits
from steersman.source.store import Store

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0  # without inotify
_WRITER_SECONDS = 2.0  # that a writer gets to close the file
_RESCAN_SECONDS = 60.0
"""A file behind links (a ConfigMap's `..data`) may change without an event in its directory."""


class ConfigReloader:
    """The configuration in force, and its changes."""

    def __init__(
        self,
        parsed: Parsed,
        store: Store,
        traits: Traits,
        file_changes: Callable[[Path], AsyncIterator[None]],
        set_conntrack: Callable[[ProxyConfig, Traits], None],
    ) -> None:
        """Start with the configuration of the command line; the Store gets Findings of the file."""
        self.current = parsed.config
        self._parsed = parsed
        self._file = parsed.config_file
        self._store = store
        self._traits = traits
        self._file_changes = file_changes
        self._set_conntrack = set_conntrack
        self._switched_to = ""
        """The mode that serves, if it is not the configured one."""

    def in_mode(self, mode: str) -> ProxyConfig:
        """Return the configuration that this command line gives in another mode.

        Raises:
            ConfigError: it is invalid in that mode.
        """
        return reload_file(self._parsed, mode=mode).config

    @property
    def configured_mode(self) -> str:
        """The mode that a restart would run."""
        try:
            return reload_file(self._parsed).config.mode
        except ConfigError:  # reported when the file is reloaded
            return self._parsed.config.mode

    def use_mode(self, config: ProxyConfig, traits: Traits) -> None:
        """Go on with the configuration of a mode that serves now."""
        self.current, self._traits = config, traits
        self._switched_to = "" if config.mode == self._parsed.config.mode else config.mode
        self._report_switch()

    def _report_switch(self) -> None:
        """Report for as long as the mode that serves is not the configured one."""
        used, configured = self._switched_to, self.configured_mode
        text = f"{used} serves since a switch; a restart brings {configured} back, as configured"
        differs = used and used != configured
        found = (Finding("the node", "mode", text, code=codes.MODE_OF_A_SWITCH),) if differs else ()
        self._store.report("switch", found)

    async def changes(self) -> AsyncIterator[ProxyConfig]:
        """Reload the file whenever it changes; yield each configuration to apply."""
        if not self._file:
            return
        try:
            async for _ in self._file_changes(Path(self._file)):
                if (config := self.reload()) is not None:
                    yield config
        except OSError as error:
            log.warning("%s cannot be watched: %s; send SIGHUP to reload it", self._file, error)

    def reload(self) -> ProxyConfig | None:
        """Reload the file now.

        Returns:
            The configuration to apply: `current` with all changes that need no restart; None if
            there are none.
        """
        if not self._file:
            log.info("there is no configuration file to reload")
            return None
        try:
            fresh = reload_file(self._parsed, mode=self._switched_to).config
        except ConfigError as error:
            self._store.report(self._file, config_findings(error, self._file))
            log.error("%s; keeping the previous configuration", error)
            return None
        self._store.report(self._file, ())
        if self._switched_to:
            self._report_switch()
        plan = reload_plan(self.current, fresh)
        if fresh.mode != self.current.mode:
            log.warning(
                "takes effect after a restart: the mode, and everything else that the file changes"
            )
        elif plan.needs_restart:
            log.warning("takes effect after a restart: %s", ", ".join(plan.needs_restart))
        if not plan.applied_live:
            return None
        log.info("applied: %s", ", ".join(plan.applied_live))
        self.current = plan.config
        try:
            self._set_conntrack(self.current, self._traits)
        except SysctlError as error:
            log.error("conntrack settings are not all applied: %s", error.strerror)
        return self.current


async def file_changes(path: Path) -> AsyncIterator[None]:
    """Yield now, and each time that a file has other contents; never while it is missing.

    The first time is for a change since the process read the file: it may have waited long for the
    instance before it. Waits a moment for a writer that has the file open, but not for ever.

    Raises:
        OSError: the directory of the file cannot be watched.
    """
    clock = asyncio.get_running_loop().time
    watch = Polling(_POLL_SECONDS) if sys.platform == "win32" else Inotify()
    try:
        seen: tuple[int, int, int] | None = None
        watch.watch([path.parent])
        wait_until = 0.0  # for a writer
        while True:
            now = _identity(path)
            for event in watch.read():  # after _identity: events up to here are about it
                if event.name == path.name:
                    wait_until = (wait_until or clock() + _WRITER_SECONDS) if event.writing else 0.0
                    now = _identity(path)
            if wait_until <= clock():
                wait_until = 0.0
            if now is not None and now != seen and not wait_until:
                seen = now
                yield
            await watch.wait(wait_until - clock() if wait_until else _RESCAN_SECONDS)
    finally:
        watch.close()


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return inode, time and size of a file, which differ if it was written or replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
