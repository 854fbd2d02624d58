"""`steersman version`: print the version."""

from __future__ import annotations

from collections.abc import Sequence

from steersman import __version__
from steersman.cli.command import Command


def _main(_: Sequence[str]) -> int:
    print(f"steersman {__version__}")
    return 0


COMMAND = Command(
    name="version",
    summary="print the version",
    description="Print the version.",
    group="Tools",
    main=_main,
)
