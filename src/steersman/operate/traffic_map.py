"""The map of a cluster: connections from nodes through Services to endpoints. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import quote

import msgspec

from steersman.model.top import TopSample
from steersman.operate.answer import View
from steersman.operate.traffic import Rate

PointKind: TypeAlias = Literal["node", "service", "endpoint"]


class Point(msgspec.Struct, frozen=True, rename="camel"):
    """A node, a Service or an endpoint on the map."""

    id: str
    kind: PointKind
    label: str
    href: str = ""
    """The page about it; "" if there is none."""


class Stream(msgspec.Struct, frozen=True, rename="camel"):
    """Connections from one point to the next."""

    source: str
    target: str
    rate: float
    """New connections per second."""
    failures: float = 0.0
    """Failed ones per second."""


class Graph(msgspec.Struct, frozen=True, rename="camel"):
    """Points and streams, as pages draw them."""

    points: tuple[Point, ...] = ()
    streams: tuple[Stream, ...] = ()


class TrafficMap(View, frozen=True, kw_only=True):
    """Which nodes send connections through which Services to which endpoints."""

    node: str = ""
    """The only node that is shown; "" for the busiest ones."""
    nodes: tuple[str, ...] = ()
    """All nodes that can be chosen."""
    shown: tuple[str, ...] = ()
    """The nodes that were asked."""
    graph: Graph = Graph()
    problems: tuple[str, ...] = ()
    """Nodes that tell nothing, and why."""


class Passing(NamedTuple):
    """Connections to a Service through a node."""

    node: str
    service: str
    rate: Rate


def busiest(samples: Mapping[str, TopSample], most: int) -> list[Passing]:
    """Return the busiest pairs of a node and a Service.

    Args:
        samples: of each node; their rows are ServicePorts.
        most: number of pairs.
    """
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for node, sample in samples.items():
        for row in sample.rows:
            if row.rate or row.failure_rate:
                key = node, row.name.partition(":")[0]
                rate, failures = found.get(key, (0.0, 0.0))
                found[key] = rate + (row.rate or 0.0), failures + (row.failure_rate or 0.0)
    ranked = sorted(found.items(), key=lambda each: (-sum(each[1]), each[0]))
    return [Passing(*key, Rate(*rates)) for key, rates in ranked[:most]]


def traffic_graph(
    passing: Sequence[Passing], details: Mapping[tuple[str, str], TopSample], most: int
) -> Graph:
    """Return the map of some connections.

    Args:
        passing: connections through nodes to Services.
        details: the counts of endpoints, by node and Service, as far as they are known.
        most: endpoints of each Service that are shown; one point stands for all others.
    """
    points: dict[str, Point] = {}
    streams: list[Stream] = []
    ends: dict[str, dict[str, tuple[float, float]]] = {}
    for node, service, rate in passing:
        points[f"node {node}"] = Point(f"node {node}", "node", node, f"/map?node={quote(node)}")
        href = f"/services/{quote(service)}?node={quote(node)}"
        points.setdefault(
            f"service {service}", Point(f"service {service}", "service", service, href)
        )
        streams.append(_stream(f"node {node}", f"service {service}", rate))
        sums = ends.setdefault(service, {})
        for row in details[node, service].rows if (node, service) in details else ():
            known = sums.get(row.name, (0.0, 0.0))
            sums[row.name] = known[0] + (row.rate or 0.0), known[1] + (row.failure_rate or 0.0)
    for service, sums in ends.items():
        ranked = sorted(sums.items(), key=lambda each: (-sum(each[1]), each[0]))
        ranked = [each for each in ranked if sum(each[1])]
        for name, rates in ranked[:most]:
            id_ = f"endpoint {service} {name}"
            points[id_] = Point(id_, "endpoint", name)
            streams.append(_stream(f"service {service}", id_, Rate(*rates)))
        if others := ranked[most:]:
            id_ = f"endpoint {service} others"
            points[id_] = Point(
                id_, "endpoint", f"{len(others)} more endpoint{'s' * (len(others) > 1)}"
            )
            rest = Rate(sum(each[0] for _, each in others), sum(each[1] for _, each in others))
            streams.append(_stream(f"service {service}", id_, rest))
    return Graph(tuple(points.values()), tuple(streams))


def _stream(source: str, target: str, rate: Rate) -> Stream:
    return Stream(source, target, round(rate.connections or 0.0, 2), round(rate.failures or 0.0, 2))
