"""Run the few tests that failed in `make test` again, alone, and judge by that.

Tests with packets, programs and browsers run in more processes than there are cores. If the machine
stands still for longer than such a test can wait, one of thousands fails, and that says nothing
about the change under test. So each one that failed has to pass TIMES times with nothing beside it.
It is named as flaky even then: a race of the program would look the same.

    python scripts/rerun.py STATUS      STATUS is the exit status of pytest

The exit status is 0 if all of them passed each time. It is that of pytest if anything else went
wrong, if more than MOST tests failed, or if one of them depends on nothing but our code. With
STRICT=1 nothing is run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
WAITING = tuple(f"tests/{part}/" for part in ("browser", "e2e", "kernel", "upgrade", "vm"))
"""Tests that wait for a kernel, for processes or for a browser."""
MOST = 3
TIMES = 3


def reason_against(status: int, failed: Sequence[str]) -> str:
    """Return why pytest's verdict stands; "" if the failed tests may run again."""
    if os.environ.get("STRICT"):
        return "STRICT is set"
    if status != 1 or not failed:
        return "something else than a test failed"
    if len(failed) > MOST:
        return f"{len(failed)} tests failed, more than {MOST}"
    ours = [test for test in failed if not test.startswith(WAITING) or "::" not in test]
    return f"{', '.join(ours)}: waits for nothing, so it fails for a reason" if ours else ""


def main(status: int) -> int:
    """Run them again; return the exit status of `make test`."""
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if why := reason_against(status, failed):
        print(f"no test is run again: {why}")
        return status
    command = ["pytest", "-q", "-p", "no:randomly", *failed]
    for number in range(TIMES):
        print(f"{len(failed)} failed; they run alone, {number + 1} of {TIMES}", flush=True)
        if again := subprocess.run(command, check=False).returncode:
            return again
    for test in failed:
        print(f"FLAKY: {test} failed beside other tests and passed {TIMES} times alone")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
