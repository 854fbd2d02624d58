"""The numbers of failover that nobody has to set, and why they are what they are.

Those that depend on the cluster are settings (model/failover.Settings). benchmarks/failover_policy
compares some of these with others. Times are in seconds.
"""

from __future__ import annotations

from typing import Final

PROBE_INTERVAL: Final = 0.3
"""Between two probes of a silent endpoint: three take less than a client's first retransmission."""
MOST_PROBES: Final = 20
"""Probes that must fail at most. If every second one is lost, 20 in a row are one in a million."""
WRONG: Final = 1e-6
"""Probability with which a living endpoint may fail all probes of a series."""
REFUSED_PROBES: Final = 2
"""Probes that must be refused: more let more clients fail for hardly fewer ejections."""
REFUSED_INTERVAL: Final = 0.1
"""Between two of them: a process that restarts at once is back by then."""
DOUBT: Final = 60.0
"""Time after a suspicion that was wrong in which more probes must fail."""
REST: Final = 0.5
"""Between two suspicions of one endpoint; doubled while they lead to nothing."""
LONGEST_REST: Final = 8.0
"""The most that it is doubled to, as a dead endpoint may wait for a witness that answers."""
PATIENCE: Final = 10.0
"""Time that a state waits for reports of probes that are overdue, before these count as lost. The
probe of a witness may take as long as 20 probes of a suspect, and a process may be late."""

SILENT_CONNECTS: Final = 3
"""Silent connects for an ejection without confirmation, if successes are counted."""
SILENT_WINDOW: Final = 3.0
"""Time within which they count together: with these two, a loss of 5 % ejects nobody."""
QUIET: Final = 1.5
"""Time without any answer that such an ejection takes: longer than a retransmission."""
UNCONFIRMED_SHARE: Final = 0.5
"""Share of a pool that is ejected without confirmation at most: half, as this may be wrong."""

FORGIVENESS: Final = 120.0
"""Time without an ejection after which the next one counts as the first: an endpoint that fails
every two minutes is held longer each time, one that fails every four is not."""
RETURN_INTERVAL: Final = 1.0
"""Between two probes after the hold, and the timeout of each: as long as a SYN is waited for."""

MOST_SUSPECTS: Final = 256
"""Endpoints that are confirmed at the same time: these need some 1,000 sockets at most."""
MOST_ASKED: Final = 200
"""Members of a pool whose last probes are looked at: they say as much as all of a larger one."""
FIRST_PROBES: Final = 10
"""New endpoints that are probed together: 50 a second, so that a start costs little CPU."""
FIRST_INTERVAL: Final = 0.2
"""Between two such groups."""
FIRST_TIMEOUT: Final = 1.0
"""Of the first probe."""

MOST_CHECKS: Final = 64
"""Checks that run at the same time: with timeouts of 1 s, 640 dead endpoints in 10 s."""
