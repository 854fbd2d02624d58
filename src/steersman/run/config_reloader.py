"""The configuration file of a running process: reload it if it changes, apply what is possible.

An invalid file is a Finding, and the process keeps its configuration (upstream's process ends
instead: behaviour 1.1, step 8).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

from steersman.config import ConfigError, Parsed, ProxyConfig, applied, reload_file, reload_plan
from steersman.config import findings as config_findings
from steersman.host.sysctl import SysctlError
from steersman.model.plan import Traits
from steersman.run.machine import Machine
from steersman.source.store import Store

log = logging.getLogger(__name__)


class ConfigReloader:
    """The configuration in force, and its changes."""

    def __init__(self, parsed: Parsed, store: Store, traits: Traits, machine: Machine) -> None:
        """Start with the configuration of the command line.

        Args:
            parsed: the command line.
            store: receives Findings about the file.
            traits: traits of the mode.
            machine: reports changes of the file, and has conntrack's settings.
        """
        self.current = parsed.config
        self._parsed = parsed
        self._file = parsed.config_file
        self._store = store
        self._traits = traits
        self._machine = machine

    async def changes(self) -> AsyncIterator[ProxyConfig]:
        """Reload the file whenever it changes; yield each configuration to apply."""
        if not self._file:
            return
        try:
            async for _ in self._machine.file_changes(Path(self._file)):
                if (config := self.reload()) is not None:
                    yield config
        except OSError as error:
            log.warning("%s is not watched: %s; SIGHUP reloads it", self._file, error)

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
            fresh = reload_file(self._parsed).config
        except ConfigError as error:
            self._store.report(self._file, config_findings(error, self._file))
            log.error("%s; keeping the previous configuration", error)
            return None
        self._store.report(self._file, ())
        plan = reload_plan(self.current, fresh)
        if fresh.mode != self.current.mode:
            log.warning("takes effect after a restart: mode, and all else that the file changes")
        elif plan.needs_restart:
            log.warning("takes effect after a restart: %s", ", ".join(plan.needs_restart))
        if not plan.applied_live:
            return None
        log.info("applied: %s", ", ".join(plan.applied_live))
        self.current = applied(self.current, fresh)
        try:
            self._machine.set_conntrack(self.current, self._traits)
        except SysctlError as error:
            log.error("conntrack settings are not all applied: %s", error.strerror)
        return self.current
