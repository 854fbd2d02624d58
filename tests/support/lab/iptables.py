"""A network namespace of its own for each test of the iptables mode."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from steersman.host.exec import Result
from tests.support.lab.inside import Inside
from tests.support.modes.scripted import InThread

_numbers = itertools.count()


class Namespace:
    """A network namespace and how to run commands in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix = ("ip", "netns", "exec", name)
        self.execute = Inside(f"/run/netns/{name}")

    def sh(self, *argv: str, stdin: str = "") -> str:
        """Run a command that has to succeed; return its output."""
        result = subprocess.run(
            [*self.prefix, *argv], input=stdin, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{argv}: {result.stderr}"
        return result.stdout


@contextmanager
def namespace() -> Iterator[Namespace]:
    """Make a namespace, and remove it after failures too."""
    name = f"sm-ipt-{os.getpid()}-{next(_numbers)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield Namespace(name)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


class Recorder(InThread):
    """Runs commands in a namespace, records them, and fails from a given one on."""

    def __init__(self, inside: Namespace) -> None:
        self._execute = inside.execute
        self.restores: list[str] = []
        self.allowed: int | None = None
        """How many more iptables-restore runs succeed; None for all."""

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        if argv[0].endswith("-restore") and stdin:
            if self.allowed is not None:
                if self.allowed == 0:
                    raise KilledError
                self.allowed -= 1
            self.restores.append(stdin.decode())
        return self._execute.run_tool(argv, stdin, timeout=timeout)


class KilledError(Exception):
    """The process was killed here."""
