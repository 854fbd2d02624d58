"""A command that a page asks a node to run, and the lines of the answer: `POST /run`."""

from __future__ import annotations

from typing import Any

import msgspec


class RunRequest(msgspec.Struct, frozen=True):
    """A command that a page asks a node to run."""

    command: str
    """doctor, dump, explain or trace."""
    arguments: tuple[str, ...] = ()
    """Its names and flags, such as `shop/web` and `--from=outside`."""


class RunLine(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A line of the answer to a RunRequest. The last one has an exit code."""

    running: float = 0.0
    """Seconds that the command has run so far."""
    exit_code: int | None = None
    """0 fine, 1 something is wrong, 2 the question could not be answered."""
    answer: Any = None
    """What the command prints with `-o json`."""
    error: str = ""
    """Why there is no answer; "" if there is one."""
