"""What the programs have counted, in per-CPU maps: by frontend, by endpoint, by event."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from steersman.model.addresses import join_host_port
from steersman.model.names import ServicePortName
from steersman.model.plan import Frontend, ServicePlan
from steersman.modes.base import Made, Moved
from steersman.modes.ebpf import layout, render
from steersman.modes.ebpf.maps import HashMap, SumMap, possible_cpus
from steersman.modes.ebpf.services import endpoints_of, number_key
from steersman.modes.ebpf.tables import Tables

_NOTHING = (0, 0, 0, 0, 0)


class Flows(NamedTuple):
    """What the last look for connections that are over has found."""

    entries: int = 0
    evicted: int = 0
    """Entries that the kernel has dropped since the map was made, because it was full."""


class Counts:
    """The maps that programs count in."""

    def __init__(self, maps: Mapping[str, int]) -> None:
        """Take descriptors by name; they stay with their owner."""
        self._events = HashMap(maps["counters"])
        self._reached = SumMap(maps["reached"])
        self._used = SumMap(maps["used"])
        self._capacity = HashMap(maps["flows"]).capacity

    def event(self, name: str) -> int:
        """How often something happened (layout.COUNTERS)."""
        cpus = possible_cpus()
        value = self._events.get(_event_key(name), 8 * cpus) or bytes(8 * cpus)
        return sum(memoryview(value).cast("Q"))

    def add_expired(self, entries: int) -> None:
        """Note flows that flows.py has deleted; no program writes that counter."""
        total = self.event("flows_expired") + entries
        rest = bytes(8 * (possible_cpus() - 1))
        self._events.put(_event_key("flows_expired"), total.to_bytes(8, layout.BYTE_ORDER) + rest)

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

    def endpoints(self) -> dict[bytes, tuple[int, ...]]:
        """Connections, packets and bytes by member_key, as struct tally has them."""
        return dict(self._used.sums())

    def frontends(self) -> dict[bytes, int]:
        """Connections by frontend_key."""
        return {key: values[0] for key, values in self._reached.sums()}

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

    def made(self, plans: Collection[ServicePlan], tables: Tables, flows: Flows) -> Made:
        """All of it in the words of the plans."""
        ends = self.endpoints()
        by_endpoint = {
            (plan.key.name, str(endpoint)): ends.get(
                layout.MEMBER_KEY.pack(record.number, layout.pack_endpoint(endpoint)), _NOTHING
            )
            for plan in plans
            if (record := tables.services.records.get(layout.service_name(plan.key)))
            for endpoint in plan.reachable
        }
        return Made(
            _by_frontend(plans, self.frontends()),
            {name: tally[0] for name, tally in by_endpoint.items()},
            moved_by_endpoint={name: Moved(*tally[1:]) for name, tally in by_endpoint.items()},
            events={name: self.event(name) for name in layout.COUNTERS}
            | {"flows_evicted": flows.evicted},
            tables={"flows": (flows.entries, self._capacity)},
        )


def _by_frontend(
    plans: Iterable[ServicePlan], counted: Mapping[bytes, int]
) -> dict[tuple[ServicePortName, str], int]:
    """A node port has a frontend for each family, and one name."""
    out: dict[tuple[ServicePortName, str], int] = {}
    for plan in plans:
        for frontend in plan.frontends:
            name = (plan.key.name, _label(frontend))
            out[name] = out.get(name, 0) + counted.get(render.frontend_key(plan, frontend), 0)
    return out


def _label(frontend: Frontend) -> str:
    if not frontend.address:
        return f"nodePort:{frontend.port}"
    return join_host_port(frontend.address, frontend.port)


def _event_key(name: str) -> bytes:
    return number_key(layout.COUNTERS.index(name))
