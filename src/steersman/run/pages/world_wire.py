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
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from steersman import __version__
from steersman.model.failover import Ejection
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import EndpointSlice, Node, Service
from steersman.model.names import ObjectName, PlanKey
from steersman.model.node_state import NodeState
from steersman.model.plan import NodePlan, NodeSettings, ServicePlan
from steersman.model.world import Origin, World
from steersman.source.packed import unpacked

_LENGTH = struct.Struct(">I")
_TOGETHER = 200
"""Objects in one document, a millisecond's work."""


class Head(msgspec.Struct, frozen=True):
    """The small part of a World, and how many documents of each kind follow."""

    config: NodeConfig
    facts: HostFacts
    node: Node | None
    service_cidrs: tuple[str, ...]
    settings: NodeSettings
    plan_findings: tuple[Finding, ...]
    unlisted: Mapping[Severity, int]
    findings: tuple[Finding, ...]
    nodes: tuple[Node, ...]
    process: NodeState
    """With the version, the mode and its variant."""
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
    fields = msgspec.msgpack.decode(first, type=dict[str, Any], strict=False)
    version = str(fields["process"]["version"])
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
        head.process.mode,
        head.process.variant,
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
