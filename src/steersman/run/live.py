"""The configuration file of a running process: read again when it changes, applied where it can be.

A bad file is a Finding, and the configuration of before stays in force (upstream's
process ends instead: behaviour 1.1, step 8).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from steersman.config import ConfigError, Parsed, ProxyConfig, applied, reload_file, reload_plan
from steersman.config import findings as config_findings
from steersman.host.sysctl import SysctlError
from steersman.model.plan import Traits
from steersman.run.machine import Machine
from steersman.source.store import Store

log = logging.getLogger(__name__)


class LiveConfiguration:
    """The configuration in force, and what changes it."""

    def __init__(
        self,
        parsed: Parsed,
        store: Store,
        traits: Traits,
        apply: Callable[[ProxyConfig], None],
        machine: Machine,
    ) -> None:
        """Take what the process started with, and whom to tell.

        Args:
            parsed: the command line.
            store: where Findings go.
            traits: of the mode.
            apply: called with a new configuration.
            machine: tells of changes of the file, and has conntrack's settings.
        """
        self.current = parsed.config
        self._parsed = parsed
        self._file = parsed.config_file
        self._store = store
        self._traits = traits
        self._apply = apply
        self._machine = machine

    async def follow(self) -> None:
        """Read the file whenever it becomes another one, until cancelled."""
        if not self._file:
            return
        try:
            async for _ in self._machine.file_changes(Path(self._file)):
                self.reload()
        except OSError as error:
            log.warning("%s is not watched: %s; SIGHUP reads it again", self._file, error)

    def reload(self) -> None:
        """Read the file now, and apply what can be applied; the rest is named in the log."""
        if not self._file:
            log.info("there is no configuration file to read again")
            return
        try:
            fresh = reload_file(self._parsed).config
        except ConfigError as error:
            self._store.report(self._file, config_findings(error, self._file))
            log.error("%s; the configuration of before stays in force", error)
            return
        self._store.report(self._file, ())
        plan = reload_plan(self.current, fresh)
        if fresh.mode != self.current.mode:
            log.warning("takes effect after a restart: mode, and all else that the file changes")
        elif plan.needs_restart:
            log.warning("takes effect after a restart: %s", ", ".join(plan.needs_restart))
        if plan.applied_live:
            log.info("applied: %s", ", ".join(plan.applied_live))
            self._take(applied(self.current, fresh))

    def _take(self, config: ProxyConfig) -> None:
        self.current = config
        try:
            self._machine.set_conntrack(config, self._traits)
        except SysctlError as error:
            log.error("conntrack settings are not all applied: %s", error.strerror)
        self._apply(config)
