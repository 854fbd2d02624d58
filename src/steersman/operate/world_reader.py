"""The World of a running process, from the bytes that run/pages/world_wire.py makes of it.

Both sides are the same version, or the client says that they are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, repeat, takewhile

import msgspec
from msgspec.structs import replace

from steersman import __version__
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import ServicePlan
from steersman.model.world import Origin, World
from steersman.operate.answer import QuestionError
from steersman.run.pages.world_wire import LENGTH
from steersman.source.packed import unpacked

# Made here, as threads decode: msgspec crashes if two of them are the first to decode a type.
_HEAD = msgspec.msgpack.Decoder(tuple[str, int, int, int])
_WORLD = msgspec.msgpack.Decoder(World)
_SERVICES = msgspec.msgpack.Decoder(list[Service])
_SLICES = msgspec.msgpack.Decoder(list[bytes])
_PLANS = msgspec.msgpack.Decoder(list[ServicePlan])


def decode_world(data: bytes, origin: Origin) -> World:
    """Return the World of its bytes.

    Raises:
        QuestionError: they are of another version of this program.
        msgspec.DecodeError: they are no World.
    """
    documents = chain(_split(data), repeat(b""))  # a missing one cannot be decoded
    version, count_services, count_slices, count_unserved = _HEAD.decode(next(documents))
    if version != __version__:
        raise QuestionError(
            f"the running process is steersman {version}, this command is {__version__}: "
            "use the command of the running version"
        )
    small = _WORLD.decode(next(documents))

    def services(count: int) -> dict[ObjectName, Service]:
        return {
            service.metadata.object_name: service
            for _ in range(count)
            for service in _SERVICES.decode(next(documents))
        }

    served = services(count_services)
    by_service: defaultdict[ObjectName, list[EndpointSlice]] = defaultdict(list)
    for _ in range(count_slices):
        for slice_ in map(unpacked, _SLICES.decode(next(documents))):
            labels, meta = slice_.metadata.labels, slice_.metadata
            owner = ObjectName(meta.namespace, (labels and labels.service_name) or "")
            by_service[owner].append(slice_)
    unserved = services(count_unserved)
    plans: dict[PlanKey, ServicePlan] = {
        plan.key: plan
        for document in takewhile(bool, documents)
        for plan in _PLANS.decode(document)
    }
    snapshot = replace(small.snapshot, services=served, slices=dict(by_service))
    plan = replace(small.plan, services=plans)
    return replace(small, origin=origin, snapshot=snapshot, plan=plan, unserved=unserved)


def _split(data: bytes) -> Iterator[bytes]:
    view, at = memoryview(data), 0
    while at < len(data):
        (length,) = LENGTH.unpack_from(view, at)
        at += LENGTH.size
        yield bytes(view[at : at + length])
        at += length
