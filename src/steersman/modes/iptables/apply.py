"""The door to the kernel: iptables-save and iptables-restore, and what their failures mean."""

from __future__ import annotations

import os
import re
from pathlib import Path

from steersman.host.exec import Exec, Result
from steersman.host.files import lock_holder
from steersman.model.errors import ApplyError, BusyError
from steersman.modes import programs
from steersman.modes.iptables.names import CANARY, MANGLE
from steersman.modes.iptables.script import Run
from steersman.modes.iptables.variant import Tool

_LINE = re.compile(r"line:? (\d+)")
_LOCK = "/run/xtables.lock"
_RESOURCE_PROBLEM = 4
_OBJECT_REFUSED = re.compile(r"[A-Z]+_[A-Z_]+ failed \((?!Resource temp|Cannot alloc|No buffer)")
"""iptables-nft also ends with 4 where the kernel refused an object, and then names the step."""


class Iptables:
    """The iptables of this machine."""

    def __init__(self, execute: Exec, tool: Tool, lock_wait: int) -> None:
        """Take what to run; lock_wait: seconds to wait for the lock of iptables-legacy."""
        self.tool = tool
        self._execute = execute
        self._wait = ("-w", str(lock_wait))
        self._timeout = lock_wait + 120.0

    async def save(self, family: int) -> str:
        """Return all tables as iptables-save prints them.

        Raises:
            BusyError: they cannot be read.
        """
        result = await self._run([f"{self.tool.of(family)}-save"])
        if result.returncode:
            raise BusyError(f"{self.tool.of(family)}-save: {_said(result)}")
        return result.stdout.decode(errors="replace")

    async def restore(self, run: Run) -> None:
        """Write rules without touching others.

        Raises:
            ApplyError: a line of it was refused.
            BusyError: the lock, or memory, was not to be had.
        """
        command = f"{self.tool.of(run.family)}-restore"
        argv = [command, *self._wait, "--noflush", "--counters"]
        result = await self._run(argv, run.text.encode())
        if result.returncode:
            raise _failure(command, result, run.text)

    async def knows_nfacct(self, family: int) -> bool:
        """Return whether iptables has `-m nfacct`; asking for its help touches no table."""
        return not (await self._run([self.tool.of(family), "-m", "nfacct", "-h"])).returncode

    async def has_canary(self, family: int) -> bool:
        """Whether our chain in the mangle table is still there (behaviour 8.5)."""
        command = self.tool.of(family)
        result = await self._run([command, *self._wait, "-S", CANARY, "-t", MANGLE])
        return result.returncode in (0, _RESOURCE_PROBLEM)

    async def _run(self, argv: list[str], stdin: bytes = b"") -> Result:
        return await programs.run(
            self._execute, argv, stdin, package="iptables", timeout=self._timeout
        )


def _said(result: Result) -> str:
    return result.message or f"exit status {result.returncode}"


def _failure(command: str, result: Result, text: str) -> Exception:
    message = _said(result)
    if "xtables lock" in message:
        path = os.environ.get("XTABLES_LOCKFILE", _LOCK)
        return BusyError(f"{command}: the xtables lock {path} is held{lock_holder(Path(path))}")
    if result.returncode == _RESOURCE_PROBLEM and not _OBJECT_REFUSED.search(message):
        return BusyError(f"{command}: {message}")
    where = _LINE.search(message)
    return ApplyError(f"{command}: {message}{_refused_line(text, int(where[1])) if where else ''}")


def _refused_line(text: str, number: int) -> str:
    """Quote the line that was refused, where iptables names one."""
    lines = text.split("\n")
    if not 0 < number <= len(lines) or lines[number - 1] == "COMMIT":
        return ""  # iptables-legacy names the COMMIT, whichever line the kernel refused
    return f": {lines[number - 1]}"
