"""`steersman cleanup`: remove everything that steersman wrote from the kernel."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steersman import __version__
from steersman.cli.command import Command, Example

if TYPE_CHECKING:
    from steersman.config import ProxyConfig


def remove(config: ProxyConfig, *, dry_run: bool = False) -> int:
    """Remove everything that steersman wrote from the kernel; return 1 if something is left.

    With `dry_run`, print the objects instead, and return 1 if there are any.
    """
    from steersman.config import to_mode_options  # noqa: PLC0415
    from steersman.host.exec import SubprocessExec  # noqa: PLC0415
    from steersman.run.process.instance import running  # noqa: PLC0415
    from steersman.run.process.mode_transition import clean_up  # noqa: PLC0415

    execute, options = SubprocessExec(), to_mode_options(config)
    done = asyncio.run(clean_up(execute, options, running, dry_run=dry_run))
    for problem in done.problems:
        print(f"{'not certain' if dry_run else 'not removed'}: {problem}", file=sys.stderr)
    if dry_run:
        print(*done.lines, sep="\n", end="\n" if done.lines else "")
        for mode, count in done.removed.items():
            print(f"{mode}: {count} kernel objects would be removed")
        if not done.removed:
            print("nothing would be removed")
        return int(bool(done.removed or done.problems))
    for mode, removed in done.removed.items():
        print(f"{mode}: {removed} kernel objects removed")
    if sys.platform == "linux":
        from steersman.operate.connectivity.node import remove_leftovers  # noqa: PLC0415

        for path in remove_leftovers(map(Path, config.steersman.manifests)):
            print(f"{path} of a test of connectivity that was killed: removed")
    return int(bool(done.problems))


def _main(argv: Sequence[str]) -> int:
    from steersman.config import parse_command_line  # noqa: PLC0415

    parsed = parse_command_line(argv)
    if parsed.version:
        print(f"steersman {__version__}")
        return 0
    return remove(parsed.config, dry_run=parsed.dry_run)


COMMAND = Command(
    name="cleanup",
    summary="remove everything that steersman wrote from the kernel",
    description=(
        "Remove the kernel objects of every mode, not only of the one in use, and nothing else.\n"
        "Stop the running process first: it would write its rules again.\n\n"
        "The exit status is 1 if something is left; it is named then. With --dry-run, nothing is\n"
        "removed: the objects are listed, and the exit status is 1 if there are any. All flags of\n"
        "`steersman run` are accepted, so that the command line of a running process can be reused."
    ),
    group="Run",
    examples=(
        Example("steersman cleanup --dry-run", "what would be removed"),
        Example("steersman cleanup", "remove everything, in every mode"),
    ),
    main=_main,
)
