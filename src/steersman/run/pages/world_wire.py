"""The World of the running process as bytes, for the local socket.

msgpack documents one after another, each behind its length (4 bytes, big-endian):

    version     of the process, and how many documents of the next three kinds follow
    World       without the objects below
    services    lists of Services
    slices      lists of EndpointSlices, as the Store keeps them
    unserved    lists of Services that are not served
    plans       lists of ServicePlans

The process only copies references and encodes; the client, a process of its own, builds the World
and computes the answer. Both sides are the same version, or the client says that they are not.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec.structs import replace

from steersman import __version__
from steersman.model.findings import Finding
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import ServicePlan
from steersman.model.world import Origin, World
from steersman.source.packed import unpacked

_LENGTH = struct.Struct(">I")
_TOGETHER = 200
"""Objects in one document, a millisecond's work."""
# Made here, as threads decode: msgspec crashes if two of them are the first to decode a type.
_HEAD = msgspec.msgpack.Decoder(tuple[str, int, int, int])
_WORLD = msgspec.msgpack.Decoder(World)
_SERVICES = msgspec.msgpack.Decoder(list[Service])
_SLICES = msgspec.msgpack.Decoder(list[bytes])
_PLANS = msgspec.msgpack.Decoder(list[ServicePlan])


class VersionError(Exception):
    """The running process is another version, whose World cannot be read."""


def encode_world(world: World, packed_slices: Sequence[bytes]) -> Iterator[bytes]:
    """Return a World in pieces made on demand, so that a thread may make them.

    Args:
        world: of a process; it is copied now. Its EndpointSlices are not read.
        packed_slices: these, as the Store keeps them.
    """
    assert world.process is not None
    snapshot, plan = world.snapshot, world.plan
    groups: tuple[Sequence[Any], ...] = (
        [*snapshot.services.values()],
        packed_slices,
        [*world.unserved.values()],
        [*plan.services.values()],
    )
    small = replace(
        world,
        snapshot=replace(snapshot, services={}, slices={}, ejected=dict(snapshot.ejected)),
        plan=replace(plan, services={}),
        unserved={},
    )
    counts = [-(-len(group) // _TOGETHER) for group in groups[:3]]
    parts = (
        group[start : start + _TOGETHER]
        for group in groups
        for start in range(0, len(group), _TOGETHER)
    )
    documents = chain(((world.process.version, *counts), small), parts)
    encoded = map(msgspec.msgpack.Encoder().encode, documents)
    return (_LENGTH.pack(len(body)) + body for body in encoded)


def concerning(objects: Container[str], findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the Findings about some Services and EndpointSlices, and about everything else.

    Args:
        objects: the Services and EndpointSlices, as in `Service shop/cart`.
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
    version, count_services, count_slices, count_unserved = _HEAD.decode(next(documents, b""))
    if version != __version__:
        raise VersionError(
            f"the running process is steersman {version}, this command is {__version__}: "
            "use the command of the running version"
        )
    small = _WORLD.decode(next(documents, b""))

    def services(count: int) -> dict[ObjectName, Service]:
        return {
            service.metadata.object_name: service
            for _ in range(count)
            for service in _SERVICES.decode(next(documents))
        }

    served = services(count_services)
    by_service: defaultdict[ObjectName, dict[str, EndpointSlice]] = defaultdict(dict)
    for _ in range(count_slices):
        for slice_ in map(unpacked, _SLICES.decode(next(documents))):
            labels, meta = slice_.metadata.labels, slice_.metadata
            owner = ObjectName(meta.namespace, (labels and labels.service_name) or "")
            by_service[owner][meta.name] = slice_
    unserved = services(count_unserved)
    plans: dict[PlanKey, ServicePlan] = {
        plan.key: plan for document in documents for plan in _PLANS.decode(document)
    }
    snapshot = replace(small.snapshot, services=served, slices=dict(by_service))
    plan = replace(small.plan, services=plans)
    return replace(small, origin=origin, snapshot=snapshot, plan=plan, unserved=unserved)


def _split(data: bytes) -> Iterator[bytes]:
    view, at = memoryview(data), 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(view, at)
        at += _LENGTH.size
        yield bytes(view[at : at + length])
        at += length
