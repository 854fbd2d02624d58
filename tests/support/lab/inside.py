"""Programs that run in a network namespace, for a mode whose thread is in it, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steersman.host.exec import Result, SubprocessExec


class Inside(SubprocessExec):
    """Runs every program in a network namespace."""

    def __init__(self, netns: str | Path) -> None:
        """Run programs in the namespace of a path."""
        super().__init__()
        self.netns = Path(netns)

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        """Run a program there."""
        return super().run_tool(["nsenter", f"--net={self.netns}", *argv], stdin, timeout=timeout)
