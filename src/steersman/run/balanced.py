"""What went through the kernel's virtual servers, as metrics per endpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from steersman.model.addresses import join_host_port
from steersman.model.names import PlanKey
from steersman.model.plan import NodePlan
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.names import ServerKey, Target
from steersman.modes.ipvs.wire import Stats

log = logging.getLogger(__name__)
_LABELS = ("namespace", "service", "port", "protocol", "endpoint")


def balanced(mode: IpvsMode, plan: Callable[[], NodePlan]) -> Iterator[Metric]:
    """Collect connections, packets and bytes; an endpoint that returns starts at 0 again."""
    made = CounterMetricFamily(
        "steersman_connections_total", "Connections made to an endpoint", labels=_LABELS
    )
    packets = CounterMetricFamily(
        "steersman_proxied_packets_total", "Packets passed on", labels=(*_LABELS, "direction")
    )
    moved = CounterMetricFamily(
        "steersman_proxied_bytes_total", "Bytes passed on", labels=(*_LABELS, "direction")
    )
    for (owner, target), stats in _totals(mode, plan()).items():
        name = owner.name
        endpoint = join_host_port(*target)
        labels = (name.namespace, name.service, name.port, str(name.protocol), endpoint)
        made.add_metric(labels, stats.connections)
        packets.add_metric((*labels, "to_endpoint"), stats.packets_in)
        packets.add_metric((*labels, "to_client"), stats.packets_out)
        moved.add_metric((*labels, "to_endpoint"), stats.bytes_in)
        moved.add_metric((*labels, "to_client"), stats.bytes_out)
    yield from (made, packets, moved)


def _totals(mode: IpvsMode, plan: NodePlan) -> dict[tuple[PlanKey, Target], Stats]:
    """Counters by ServicePort and endpoint, whichever of its addresses clients used."""
    owners = {
        key: service.key
        for service in tuple(plan.services.values())
        for key in mode.render_service(service, plan.settings)
        if isinstance(key, ServerKey)
    }
    totals: dict[tuple[PlanKey, Target], Stats] = {}
    try:
        for key, target, stats in mode.traffic(owners):
            place = owners[key], target
            before = totals.get(place, (0, 0, 0, 0, 0))
            totals[place] = Stats(*map(sum, zip(before, stats, strict=True)))
    except OSError as error:
        log.warning("the counters of IPVS cannot be read: %s", error)
    return totals
