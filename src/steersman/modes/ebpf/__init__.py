"""The ebpf mode: connections are balanced when they are made, packets on devices for the rest."""

from __future__ import annotations

import os
from pathlib import Path

from steersman.modes.specs import ModeOptions

PINS = Path("/sys/fs/bpf/steersman")
"""Directory of everything that outlives the process."""


def left_at(pins: Path) -> str:
    """Say that a directory of pins is left, or cannot be looked at; "" if there is none."""
    try:
        os.stat(pins)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{pins} cannot be looked at: {error.strerror}"
    return f"{pins} is left"


def may_have_left(options: ModeOptions) -> bool:
    """Return whether there are pins, or may be. See `registry.may_have_left`."""
    del options
    return bool(left_at(PINS))
