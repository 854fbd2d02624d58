"""EndpointSlices as bytes: a node holds those of the whole cluster and looks at few of them.

As objects they would be most of what the Store takes; packed they are a third of that. Unpacking
one costs a microsecond and half a microsecond for each endpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from steersman.model.kube import (
    Annotations,
    EndpointConditions,
    EndpointSlice,
    Labels,
    Lean,
    ObjectMeta,
    SliceEndpoint,
)
from steersman.model.names import ObjectName


class _Labelled(Lean, frozen=True):
    labels: Labels = Labels()


class _Outline(Lean, frozen=True):
    metadata: _Labelled


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EndpointSlice)
_OUTLINE = msgspec.msgpack.Decoder(_Outline)


class Slices(Mapping[ObjectName, Mapping[str, EndpointSlice]]):
    """EndpointSlices by the Service they belong to, then by their own name.

    What nothing depends on is gone: uid, resourceVersion, most annotations, usual conditions.
    """

    def __init__(self) -> None:
        self._packed: dict[ObjectName, bytes] = {}
        self._of: dict[ObjectName, tuple[ObjectName, ...]] = {}
        self._udp: set[ObjectName] = set()
        """Slices with a UDP port."""
        self._udp_of: Counter[ObjectName] = Counter()
        """How many of them a Service has; those with none are not in it."""

    def __getitem__(self, service: ObjectName) -> Mapping[str, EndpointSlice]:
        return _OfService(self._packed, self._of[service])

    def __contains__(self, service: object) -> bool:
        return service in self._of

    def __iter__(self) -> Iterator[ObjectName]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    @property
    def names(self) -> Mapping[ObjectName, object]:
        """The names of all slices, as keys."""
        return self._packed

    def owner(self, name: ObjectName) -> ObjectName | None:
        """The Service that a slice belongs to; None where there is no such slice."""
        packed = self._packed.get(name)
        if packed is None:
            return None
        return ObjectName(
            name.namespace, _OUTLINE.decode(packed).metadata.labels.service_name or ""
        )

    def belongs(self, name: ObjectName, service: ObjectName | None) -> bool:
        """Whether a slice is held, as one of this Service; `owner` says whose, but costs more."""
        if service is None or name not in self._packed:
            return False
        return name in self._of.get(service, ())

    def has_udp(self, service: ObjectName) -> bool:
        """Whether some slice of a Service has a UDP port."""
        return service in self._udp_of

    def put(self, name: ObjectName, owner: ObjectName, slice_: EndpointSlice) -> bool:
        """Take a slice of a Service; return whether it differs from what is held.

        A slice that belonged to another Service must have been removed.
        """
        packed = _pack(slice_)
        old = self._packed.get(name)
        if old == packed:
            return False
        if old is None:
            name = ObjectName(owner.namespace, name.name)
            self._of[owner] = (*self._of.get(owner, ()), name)
        self._packed[name] = packed
        self._note_udp(name, owner, "UDP" in [port.protocol for port in slice_.ports or ()])
        return True

    def remove(self, name: ObjectName, owner: ObjectName) -> None:
        """Drop a slice of a Service; it must be there."""
        del self._packed[name]
        self._note_udp(name, owner, has_udp=False)
        left = tuple(other for other in self._of.pop(owner) if other != name)
        if left:
            self._of[owner] = left

    def _note_udp(self, name: ObjectName, owner: ObjectName, has_udp: bool) -> None:
        if has_udp == (name in self._udp):
            return
        if has_udp:
            self._udp.add(name)
            self._udp_of[owner] += 1
            return
        self._udp.discard(name)
        self._udp_of[owner] -= 1
        if not self._udp_of[owner]:
            del self._udp_of[owner]


class _OfService(Mapping[str, EndpointSlice]):
    """The slices of one Service in order of name, each unpacked when it is looked at."""

    def __init__(self, packed: Mapping[ObjectName, bytes], names: tuple[ObjectName, ...]) -> None:
        self._packed = packed
        self._names = {name.name: name for name in sorted(names)}

    def __getitem__(self, name: str) -> EndpointSlice:
        return _DECODER.decode(self._packed[self._names[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _pack(slice_: EndpointSlice) -> bytes:
    meta = slice_.metadata
    notes = meta.annotations
    if notes is not None:
        notes = Annotations(weight=notes.weight) if notes.weight is not None else None
    lean = ObjectMeta(meta.name, meta.namespace, labels=meta.labels, annotations=notes)
    endpoints = slice_.endpoints
    if endpoints is not None:
        endpoints = [_usual(each) if _is_usual(each.conditions) else each for each in endpoints]
    return _ENCODER.encode(EndpointSlice(lean, slice_.address_type, endpoints, slice_.ports))


def _is_usual(conditions: EndpointConditions | None) -> bool:
    """Whether conditions say what none would say (behaviour 4), so that they can be left out."""
    return (
        conditions is not None
        and conditions.ready is not False
        and conditions.serving is not False
        and conditions.terminating is not True
    )


def _usual(endpoint: SliceEndpoint) -> SliceEndpoint:
    return SliceEndpoint(
        endpoint.addresses, None, endpoint.node_name, endpoint.zone, endpoint.hints
    )
