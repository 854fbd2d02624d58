"""Facts of this machine, by the means that its system has; only those are imported."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    from steersman.host.windows import read_facts, watch_addresses
else:
    from steersman.host.facts import read_facts, watch_addresses

__all__ = ["read_facts", "watch_addresses"]
