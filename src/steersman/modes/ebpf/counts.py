"""What the programs have counted, in per-CPU maps: by frontend, by endpoint, by event."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from steersman.model.names import ServicePortName
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats, NodeTotals, TrafficCounters, frontend_label
from steersman.modes.ebpf import layout, render
from steersman.modes.ebpf.maps import HashMap, SumMap
from steersman.modes.ebpf.services import endpoints_of, number_key
from steersman.modes.ebpf.tables import Tables


class Flows(NamedTuple):
    """What the last look for connections that are over has found."""

    entries: int = 0
    evicted: int = 0
    """Entries that the kernel has dropped since the map was made, because it was full."""


class Counts:
    """The maps that programs count in."""

    def __init__(self, maps: Mapping[str, int]) -> None:
        """Take descriptors by name; they stay with their owner."""
        self._events = SumMap(maps["counters"])
        self._reached = SumMap(maps["reached"])
        self._used = SumMap(maps["used"])
        self._capacity = HashMap(maps["flows"]).capacity

    def event(self, name: str) -> int:
        """How often something happened (layout.COUNTERS)."""
        return self._events.sum(_event_key(name))

    def add_expired(self, entries: int) -> None:
        """Note flows that flows.py has deleted; no program writes that counter."""
        total = self.event("flows_expired") + entries
        value = total.to_bytes(8, layout.BYTE_ORDER).ljust(self._events.value_size, b"\0")
        self._events.put(_event_key("flows_expired"), value)

    def looked(self, entries: int, made: int, before: Flows) -> Flows:
        """What follows from how many flows there are; evicted ones are what is missing.

        Args:
            entries: how many were seen.
            made: how many had been made when the look began: it takes long, so that later ones
                may have been seen or not.
            before: what the last look has found.
        """
        gone = self.event("flows_ended") + self.event("flows_expired")
        return Flows(entries, max(made - gone - entries, before.evicted))

    def sweep(self, tables: Tables) -> None:
        """Forget what counted for endpoints and frontends that are gone."""
        services, names = tables.services, tables.services.number_names()
        used: dict[int, set[bytes]] = {}
        for key, _ in self._used.items():
            number, end = layout.MEMBER_KEY.unpack(key)
            used.setdefault(number, set()).add(end)
        for number, ends in used.items():
            name = names.get(number)
            kept = set(endpoints_of(services.read(services.records[name]))) if name else set()
            self._used.delete_all(layout.MEMBER_KEY.pack(number, end) for end in ends - kept)
        gone = [key for key, _ in self._reached.items() if not tables.frontends.map.get(key)]
        self._reached.delete_all(gone)

    def totals(self, flows: Flows) -> NodeTotals:
        """Return what is counted for the whole node."""
        events = {name: self.event(name) for name in layout.COUNTERS}
        return NodeTotals(
            events=events | {"flows_evicted": flows.evicted},
            tables={"flows": (flows.entries, self._capacity)},
        )


class Reading:
    """One pass over the counts, on descriptors of its own: the mode may write, or close, meanwhile.

    The programs make an entry with the first connection, so this costs what was used.
    """

    def __init__(self, maps: Mapping[str, int], tables: Tables) -> None:
        """Duplicate the descriptors; `close` is to follow."""
        self._reached = SumMap(os.dup(maps["reached"]))
        self._used = SumMap(os.dup(maps["used"]))
        self._services = tables.services

    def close(self) -> None:
        """Close the descriptors."""
        self._reached.close()
        self._used.close()

    def stats(self, plans: Collection[ServicePlan]) -> ConnectionStats:
        """Return the counts by ServicePort, without what has counted nothing."""
        used: dict[int, dict[bytes, tuple[int, ...]]] = {}
        for key, tally in self._used.sums():
            number, end = layout.MEMBER_KEY.unpack(key)
            used.setdefault(number, {})[end] = tally
        reached = {key: values[0] for key, values in self._reached.sums()}
        records = self._services.records if used else {}
        frontends: Counter[tuple[ServicePortName, str]] = Counter()
        endpoints: dict[tuple[ServicePortName, str], tuple[int, ...]] = {}
        for plan in plans if used or reached else ():
            name = plan.key.name
            for frontend in plan.frontends if reached else ():
                if count := reached.get(render.frontend_key(plan, frontend)):
                    frontends[name, frontend_label(frontend)] += count
            record = records.get(layout.service_name(plan.key))
            tallies = used.get(record.number) if record else None
            for endpoint in plan.reachable if tallies else ():
                if tallies and (own := tallies.get(layout.pack_endpoint(endpoint))):
                    endpoints[name, str(endpoint)] = own
        return ConnectionStats(
            frontends,
            {name: tally[0] for name, tally in endpoints.items()},
            traffic_by_endpoint={
                name: TrafficCounters(*tally[1:]) for name, tally in endpoints.items()
            },
        )


def _event_key(name: str) -> bytes:
    return number_key(layout.COUNTERS.index(name))
