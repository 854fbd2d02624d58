"""The World of the running process as bytes, for the local socket.

msgpack documents one after another, each behind its length (4 bytes, big-endian):

    version     of the process, and how many documents of the next three kinds follow
    World       without the objects below
    services    lists of Services
    slices      lists of EndpointSlices, as the Store keeps them
    unserved    lists of Services that are not served
    plans       lists of ServicePlans

The process only copies references and encodes; the client, a process of its own, builds the World
(operate/world_reader.py) and computes the answer.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec.structs import replace

from steersman.model.findings import Finding
from steersman.model.world import World

LENGTH = struct.Struct(">I")
"""Of a document."""
_TOGETHER = 200
"""Objects in one document, a millisecond's work."""


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
    return (LENGTH.pack(len(body)) + body for body in encoded)


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
