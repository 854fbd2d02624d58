"""The World of the running process as bytes, for the local socket.

msgpack documents one after another, each behind its length (4 bytes, big-endian):

    head        everything that is small
    services    lists of Services
    slices      lists of EndpointSlices, as the Store keeps them
    plans       lists of ServicePlans

The process only copies references and encodes; the client, a process of its own, builds the World
and computes the answer. Both sides are the same version, or the client says that they are not.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from steersman import __version__
from steersman.model.failover import Ejection
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import EndpointSlice, Node, Service
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import NodePlan, NodeSettings, ServicePlan
from steersman.model.stats import ConnectionStats, DialCounters, StatsKey, TrafficCounters
from steersman.model.world import Origin, ProcessStatus, World
from steersman.source.packed import unpacked

# -- The World -------------------------------------------------------------------------------------

_LENGTH = struct.Struct(">I")
_TOGETHER = 200
"""Objects in one document, a millisecond's work."""


class Head(msgspec.Struct, frozen=True):
    """The small part of a World, and how many documents of each kind follow."""

    version: str
    mode: str
    variant: str
    config: NodeConfig
    facts: HostFacts
    node: Node | None
    service_cidrs: tuple[str, ...]
    settings: NodeSettings
    plan_findings: tuple[Finding, ...]
    unlisted: Mapping[Severity, int]
    findings: tuple[Finding, ...]
    nodes: tuple[Node, ...]
    process: ProcessStatus
    ejected: tuple[tuple[ObjectName, tuple[Ejection, ...]], ...] = ()
    documents: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Of Services, EndpointSlices, unserved Services and plans."""


class VersionError(Exception):
    """The running process is another version, whose World cannot be read."""


def encode_world(
    head: Head,
    services: Sequence[Service],
    packed_slices: Sequence[bytes],
    unserved: Sequence[Service],
    plans: Sequence[ServicePlan],
) -> Iterator[bytes]:
    """Yield a World in pieces made on demand, so that a thread may make them.

    Args:
        head: its `documents` are filled in here.
        services: those that are served.
        packed_slices: EndpointSlices as the Store keeps them.
        unserved: Services that are not served here.
        plans: the plans in force.
    """
    groups: tuple[Sequence[Any], ...] = (services, packed_slices, unserved, plans)
    counts = [-(-len(group) // _TOGETHER) for group in groups]
    encoder = msgspec.msgpack.Encoder()
    for document in (
        msgspec.structs.replace(head, documents=tuple(counts)),
        *(
            group[start : start + _TOGETHER]
            for group in groups
            for start in range(0, len(group), _TOGETHER)
        ),
    ):
        body = encoder.encode(document)
        yield _LENGTH.pack(len(body)) + body


def concerning(objects: Container[str], findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the Findings about some Services and EndpointSlices, and about everything else.

    Args:
        objects: the Services and EndpointSlices, as in `Service shop/cart`.
        findings: of everything.
    """
    return tuple(
        each
        for each in findings
        if not each.object.startswith(("Service ", "EndpointSlice ")) or each.object in objects
    )


def decode_world(data: bytes, origin: Origin) -> World:
    """Return the World of its bytes.

    Raises:
        VersionError: they are of another version of this program.
        msgspec.DecodeError: they are no World.
    """
    documents = _split(data)
    first = next(documents, b"")
    version = str(msgspec.msgpack.decode(first, type=dict[str, Any], strict=False)["version"])
    if version != __version__:
        raise VersionError(
            f"the running process is steersman {version}, this command is {__version__}: "
            "use the command of the running version"
        )
    head = msgspec.msgpack.decode(first, type=Head)
    count_services, count_slices, count_unserved, _ = head.documents
    many_services = msgspec.msgpack.Decoder(list[Service])
    many_slices = msgspec.msgpack.Decoder(list[bytes])
    many_plans = msgspec.msgpack.Decoder(list[ServicePlan])

    def services(count: int) -> dict[ObjectName, Service]:
        return {
            service.metadata.object_name: service
            for _ in range(count)
            for service in many_services.decode(next(documents))
        }

    served = services(count_services)
    by_service: defaultdict[ObjectName, dict[str, EndpointSlice]] = defaultdict(dict)
    for _ in range(count_slices):
        for slice_ in map(unpacked, many_slices.decode(next(documents))):
            labels, meta = slice_.metadata.labels, slice_.metadata
            owner = ObjectName(meta.namespace, (labels and labels.service_name) or "")
            by_service[owner][meta.name] = slice_
    unserved = services(count_unserved)
    plans: dict[PlanKey, ServicePlan] = {
        plan.key: plan for document in documents for plan in many_plans.decode(document)
    }
    return World(
        origin,
        Snapshot(served, dict(by_service), head.node, head.service_cidrs, dict(head.ejected)),
        NodePlan(head.settings, plans, head.plan_findings, head.unlisted),
        head.mode,
        head.variant,
        head.config,
        head.facts,
        head.findings,
        head.nodes,
        unserved,
        head.process,
    )


def _split(data: bytes) -> Iterator[bytes]:
    view, at = memoryview(data), 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(view, at)
        at += _LENGTH.size
        yield bytes(view[at : at + length])
        at += length


# -- Counts ----------------------------------------------------------------------------------------
#
# The connections so far as bytes, for the local socket (run/serve/control.py).

_Rows = list[tuple[StatsKey, list[float]]]


class _Document(msgspec.Struct, frozen=True):
    """All counts as lists: keys of maps have to be text."""

    at: float
    counted: bool
    frontends: _Rows = []
    endpoints: _Rows = []
    traffic_by_frontend: _Rows = []
    traffic_by_endpoint: _Rows = []
    dials: _Rows | None = None


def encode_stats(at: float, stats: ConnectionStats | None) -> bytes:
    """Return counts as bytes.

    Args:
        at: when they were read, in seconds of a clock that only goes forward.
        stats: the counts; None if the mode does not count connections.
    """
    # Not counted is another answer than no connections so far.
    if stats is None:
        return msgspec.msgpack.encode(_Document(at, False))
    return msgspec.msgpack.encode(
        _Document(
            at,
            True,
            [(key, [count]) for key, count in stats.frontends.items()],
            [(key, [count]) for key, count in stats.endpoints.items()],
            [(key, list(counts)) for key, counts in stats.traffic_by_frontend.items()],
            [(key, list(counts)) for key, counts in stats.traffic_by_endpoint.items()],
            None
            if stats.dials is None
            else [(key, list(counts)) for key, counts in stats.dials.items()],
        )
    )


def decode_stats(data: bytes) -> tuple[float, ConnectionStats | None]:
    """Return what `encode_stats` was given.

    Raises:
        msgspec.DecodeError: the bytes are something else.
    """
    found = msgspec.msgpack.decode(data, type=_Document)
    if not found.counted:
        return found.at, None
    return found.at, ConnectionStats(
        _numbers(found.frontends),
        _numbers(found.endpoints),
        _traffic(found.traffic_by_frontend),
        _traffic(found.traffic_by_endpoint),
        None
        if found.dials is None
        else {key: DialCounters(int(failed), seconds) for key, (failed, seconds) in found.dials},
    )


def _numbers(rows: _Rows) -> Mapping[StatsKey, int]:
    return {key: int(count) for key, (count,) in rows}


def _traffic(rows: _Rows) -> Mapping[StatsKey, TrafficCounters]:
    return {key: TrafficCounters(*map(int, counts)) for key, counts in rows}


# -- Names -----------------------------------------------------------------------------------------
#
# The names of objects, for shell completion by commands on this node.

KINDS = ("service", "endpoint", "pod", "node", "namespace")


def names(
    kind: str,
    services: Iterable[ObjectName],
    slices: Iterable[EndpointSlice],
    nodes: Iterable[Node],
    plans: Collection[ServicePlan],
) -> list[str]:
    """Return the names of a kind, sorted.

    Args:
        kind: one of KINDS; any other has no names.
        services: all Services.
        slices: all EndpointSlices, with the targets of their endpoints.
        nodes: the known Nodes.
        plans: the plans in force.
    """
    found: set[str] = set()
    match kind:
        case "service":
            found = {str(name) for name in services}
        case "namespace":
            found = {name.namespace for name in services}
        case "endpoint":
            found = {str(endpoint) for plan in plans for endpoint in plan.reachable}
        case "node":
            found = {node.metadata.name for node in nodes}
            found.update(
                each.node_name or "" for slice_ in slices for each in slice_.endpoints or ()
            )
        case "pod":
            targets = (each.target_ref for slice_ in slices for each in slice_.endpoints or ())
            found = {f"{ref.namespace}/{ref.name}" for ref in targets if ref and ref.kind == "Pod"}
    return sorted(found - {""})
