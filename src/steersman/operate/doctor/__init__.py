"""The checks of `steersman doctor`, and the run of all that apply to a question."""

from __future__ import annotations

from typing import Final

from steersman.operate.doctor.check import Check

CHECKS: Final[tuple[Check, ...]] = ()
"""Every check. Order does not matter: they run together."""
