"""Judge a run of `make test`: run the few tests that failed again, alone, and remember them.

Tests run in more processes than there are cores. If the machine stands still for longer than a
test can wait, one of thousands fails, and that says nothing about the change under test. So each
one that failed has to pass TIMES times with nothing beside it. It is named as flaky even then: a
race of the program would look the same. The names are kept in RECORD with those of the last runs. A
test that is flaky for the second time in RUNS runs fails.

    python scripts/rerun.py STATUS      STATUS is the exit status of pytest

The exit status is 0 if all of them passed each time, and none of them was flaky before. It is that
of pytest if anything else went wrong, or if more than MOST tests failed. With STRICT=1 nothing is
run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
MOST = 6
TIMES = 3
RUNS = 10
RECORD = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "steersman/flaky.json")
"""The flaky tests of each of the last runs on this machine, the newest last."""


def reason_against(status: int, failed: Sequence[str]) -> str:
    """Return why pytest's verdict stands; "" if the failed tests may run again."""
    if os.environ.get("STRICT"):
        return "STRICT is set"
    if status != 1 or not failed:
        return "something else than a test failed"
    if len(failed) > MOST:
        return f"{len(failed)} tests failed, more than {MOST}"
    modules = [test for test in failed if "::" not in test]
    return f"{', '.join(modules)}: could not be imported" if modules else ""


def remember(flaky: Sequence[str]) -> list[str]:
    """Add the flaky tests of this run to the record; return those that it had already."""
    runs: list[list[str]] = json.loads(RECORD.read_text()) if RECORD.exists() else []
    runs = runs[-(RUNS - 1) :]
    known = {test for run in runs for test in run}
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps([*runs, list(flaky)], indent=1) + "\n")
    return [test for test in flaky if test in known]


def main(status: int) -> int:
    """Run failed tests again; return the exit status of `make test`."""
    if status == 0:
        remember([])
        return 0
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if why := reason_against(status, failed):
        print(f"no test is run again: {why}")
        return status
    # A test that failed in the middle has not reached all that it covers.
    coverage = ["--cov", "--cov-append", "--cov-report="]
    command = ["pytest", "-q", "-p", "no:randomly", *coverage, *failed]
    for number in range(TIMES):
        print(f"{len(failed)} failed; they run alone, {number + 1} of {TIMES}", flush=True)
        if again := subprocess.run(command, check=False).returncode:
            return again
    for test in failed:
        print(f"FLAKY: {test} failed beside other tests and passed {TIMES} times alone")
    flaky_again = remember(failed)
    for test in flaky_again:
        print(f"FLAKY AGAIN: {test} was flaky before in the last {RUNS} runs, see {RECORD}")
    return status if flaky_again else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
