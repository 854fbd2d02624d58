"""A switch of the mode of the running process: the request, the steps, the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

StepState: TypeAlias = Literal["ok", "note", "failed"]
Outcome: TypeAlias = Literal["switched", "checked", "unchanged", "refused", "back", "stuck"]


class SwitchRequest(msgspec.Struct, frozen=True, rename="camel"):
    """What an operator asks for."""

    to: str
    """Name of the mode."""
    dry_run: bool = False
    """Only check."""
    force: bool = False
    """Switch although the new mode brings Findings of severity error."""
    watch_seconds: float = 5.0
    """How long new connections are watched."""
    drain_seconds: float = 3600.0
    """How long connections that the old mode carries may continue."""


class SwitchStep(msgspec.Struct, frozen=True, rename="camel"):
    """Something that was done, or found out."""

    name: str
    """`check`, `serve`, `leave`, `compare`, `watch`, `drain` or `back`."""
    text: str
    state: StepState = "ok"
    at: float = 0.0
    """Seconds since the switch began."""


class SwitchResult(msgspec.Struct, frozen=True, rename="camel"):
    """The end of a switch."""

    outcome: Outcome
    mode: str
    """The mode that serves now."""
    before: str
    """The mode that served before."""
    text: str
    """The outcome as a sentence."""
    configured: str = ""
    """The mode that a restart brings back."""
    seconds: float = 0.0
    dials: int = 0
    """Connections that the canary opened."""
    failed_dials: int = 0


Tell: TypeAlias = Callable[[SwitchStep], None]
"""Called with each step as soon as it is done."""
