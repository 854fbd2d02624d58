"""No thread, descriptor, task or memory is left behind by events, however many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EVENTS = int(os.environ.get("STEERSMAN_LEAK_EVENTS", "30000"))


@pytest.mark.slow
def test_events_leave_nothing_behind() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.processes.leaks", str(EVENTS)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    early, late = json.loads(run.stdout)["figures"]
    assert late["events"] >= EVENTS
    assert late["threads"] == early["threads"]
    # A connection more or less: one that was cut may not be closed on both sides yet.
    assert late["descriptors"] <= early["descriptors"] + 4
    assert late["tasks"] <= early["tasks"] + 4
    assert late["objects"] <= early["objects"] * 1.05
    assert late["megabytes"] <= early["megabytes"] + 10
