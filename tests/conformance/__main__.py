"""Check files of conformance cases: `python -m tests.conformance FILE... --mode M --how H`.

Prints a line for each failed check, then `N passed, M failed`; exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from tests.conformance.runner import Runner, Tally
from tests.support.modes.registry import MODES


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    out.add_argument("files", nargs="+", type=Path, metavar="FILE")
    out.add_argument("--mode", choices=sorted(MODES), default="iptables")
    out.add_argument(
        "--how",
        choices=("trace", "rules", "packets"),
        default="trace",
        help="how flows are checked; packets needs root",
    )
    out.add_argument("--variant", default="", help="what the mode runs on, as nft or legacy")
    out.add_argument("--filter", default="", metavar="TEXT", help="only ids that contain TEXT")
    return out


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    command_line = parser()
    options = command_line.parse_args(argv)
    mode = MODES[options.mode]
    if options.variant and options.variant not in mode.variants:
        command_line.error(f"mode {mode.name} runs on {' or '.join(mode.variants)}")
    tally = Tally()
    runner = Runner(mode, options.how, options.variant or mode.variants[0])
    try:
        for path in options.files:
            runner.run(path, tally, options.filter)
    finally:
        runner.pool.close()
    for line in tally.failures:
        print(f"FAILED {line}")
    for line in tally.skips:
        print(f"skipped {line}")
    skipped = f", {len(tally.skips)} skipped" if tally.skips else ""
    print(f"{tally.passed} passed, {len(tally.failures)} failed{skipped}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    logging.disable()  # what the code under test says about errors that cases ask for
    sys.exit(main())
