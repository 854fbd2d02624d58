"""These tests run inside the virtual machine only (tests/vm/machine.py says so)."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("STEERSMAN_VM") else ["test_*.py"]
