"""Everything that a scrape can show, line by line; `--update` writes scrape.txt."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path

from steersman.model.node_state import Condition, NodeState
from steersman.model.plan import ServicePlan
from steersman.model.stats import (
    ConnectionStats,
    DialCounters,
    NodeTotals,
    ProxyTotals,
    TrafficCounters,
)
from steersman.modes.specs import SPECS
from steersman.run.observe.metrics import OF_SOME_MODES, Metrics
from steersman.run.observe.mode_metrics import ModeMetrics
from steersman.run.observe.prometheus import Rows, exposition
from steersman.run.observe.scraped import (
    conntrack_usage,
    feature_gates,
    nfacct_packets,
    process_state,
    source_state,
)
from steersman.run.process.event_loop import MeasuringSelector
from steersman.source.stats import SourceStats
from tests.support.builders.plans import cluster_ip, endpoints, plan
from tests.support.modes.bare import BareMode

EXPECTED = Path(__file__).with_name("scrape.txt")
PLAN = plan("shop/web:http", cluster_ip("10.96.0.1"), cluster=endpoints("10.244.0.1"))
PACKETS = ("ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts")


OF_SYNCS = (
    Metrics.last_sync_time,
    Metrics.last_queued_time,
    Metrics.endpoint_changes,
    Metrics.endpoint_changes_pending,
    Metrics.service_changes,
    Metrics.service_changes_pending,
    Metrics.no_local_endpoints,
    Metrics.without_endpoints,
    Metrics.findings,
)
CONDITION = Condition("Synced", "True", "UpToDate", "", 5.0)


class Counting(BareMode):
    """A mode in which everything has counted, by a proxy or in the kernel."""

    def __init__(self, proxy: bool) -> None:
        self._proxy = proxy

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        yield
        end, front = (PLAN.key.name, str(PLAN.reachable[0])), (PLAN.key.name, "10.96.0.1:80")
        moved = TrafficCounters(1, 2, 3, 4)
        dials = {end: DialCounters(5, 0.5)} if self._proxy else None
        return ConnectionStats({front: 9}, {end: 3}, {front: moved}, {end: moved}, dials)

    def totals(self) -> NodeTotals:
        proxy = ProxyTotals(1, 2.0, ((0.5, 3), (float("inf"), 4)), 5, 6)
        moved = TrafficCounters(1, 2, 3, 4)
        if self._proxy:
            return NodeTotals(9, moved, proxy=proxy)
        return NodeTotals(9, moved, {"flows_made": 7}, tables={"flows": (5, 262144)})


async def lines(mode: str) -> list[str]:
    """Return the lines of a scrape in which every metric of a mode has a value."""
    metrics = Metrics(mode, families=())
    for metric in metrics.by_name.values():
        for values in (("x",), ("x", "y")):
            with suppress(ValueError):  # it has another number of labels
                metric(*values)
    for shown in OF_SYNCS:
        rows: Rows = [(("x", "y")[: len(shown.labels)], 0)]
        metrics.show(shown, partial(list, rows))
    stats = SourceStats()
    stats.kind("Node").errors["http_403"] += 2
    stats.kind("Node").received(b"{}", 90.0)
    stats.requests.count("200", "GET", "api:6443")
    stats.requests.took(0.5, "GET", "api:6443")
    status = NodeState(conditions=(CONDITION,), service_ports=4)
    holds = MeasuringSelector(lambda: 1.0, lambda: 1.0)
    metrics.on_scrape(lambda: conntrack_usage(lambda: (1, 10)))
    metrics.on_scrape(lambda: nfacct_packets(dict.fromkeys(PACKETS, 5)))
    metrics.on_scrape(lambda: source_state(stats, 100.0))
    metrics.on_scrape(lambda: process_state(status, 2.5))
    metrics.on_scrape(lambda: feature_gates({"AllBeta": False}))
    metrics.on_scrape(holds.collect)
    more = [
        each
        for proxy in (False, True)
        for each in await ModeMetrics(Counting(proxy), lambda: [PLAN], lambda: True).default()
    ]
    # The reference page says "all modes" of a metric that no mode's row names.
    assert {each.name for each in more} <= OF_SOME_MODES
    text = b"".join(exposition([*metrics.collect(), *more])).decode()
    # These differ from process to process.
    text = re.sub(r"^(process_\w+) .*$", r"\1 0", text, flags=re.MULTILINE)
    return re.sub(r'git_version="[^"]*"', 'git_version=""', text).splitlines()


async def test_every_line_of_a_scrape(update: bool) -> None:
    modes = defaultdict[str, list[str]](list)
    for mode in SPECS:
        for line in dict.fromkeys(await lines(mode)):
            modes[line].append(mode)
    text = "".join(f"{line}  [{', '.join(modes[line])}]\n" for line in sorted(modes))
    text = text.replace(f"  [{', '.join(SPECS)}]\n", "\n")
    if update:
        EXPECTED.write_text(text)
    else:
        assert text == EXPECTED.read_text()
