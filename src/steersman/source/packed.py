"""EndpointSlices in little memory: a node holds those of the whole cluster.

They are kept as msgpack bytes, a third of the size of the objects. Few of them are looked at
between two syncs, and unpacking one takes a microsecond and half a microsecond for each endpoint.

    array of two: the EndpointSlice without targetRefs, the targets

The names of the pods behind endpoints are kept for answers to people. They are a part of their own,
so that plans are made without decoding them, and a change of nothing else is no change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from steersman.model.kube import (
    Annotations,
    EndpointHints,
    EndpointSlice,
    ForZone,
    Labels,
    ObjectMeta,
    ObjectReference,
    SliceEndpoint,
    SlicePort,
)
from steersman.model.names import ObjectName

# EndpointSlices as they are packed: arrays, which have no names of fields, take half of the bytes.


class _Labels(Labels, frozen=True, array_like=True):
    pass


class _Meta(ObjectMeta, frozen=True, array_like=True):
    labels: _Labels | None = None


class _Zone(ForZone, frozen=True, array_like=True):
    pass


class _Hints(EndpointHints, frozen=True, array_like=True):
    for_zones: list[_Zone] | None = None  # type: ignore[assignment] # no list is ever changed
    for_nodes: list[_Zone] | None = None  # type: ignore[assignment]


class _Endpoint(SliceEndpoint, frozen=True, array_like=True):
    hints: _Hints | None = None


class _Port(SlicePort, frozen=True, array_like=True):
    pass


class _Slice(EndpointSlice, frozen=True, array_like=True):
    metadata: _Meta
    endpoints: list[_Endpoint] | None = None  # type: ignore[assignment]
    ports: list[_Port] | None = None  # type: ignore[assignment]


def trimmed_slice(slice_: EndpointSlice) -> EndpointSlice:
    """Return an EndpointSlice without the fields that no plan depends on, targetRefs included.

    Conditions that mean the same as none (behaviour 4) are left out, too, and so are annotations
    except for the weight. The result is made of structs that are encoded as arrays.
    """
    meta, labels, annotations = slice_.metadata, slice_.metadata.labels, slice_.metadata.annotations
    weight = annotations.weight if annotations is not None else None
    endpoints, ports = slice_.endpoints, slice_.ports
    if labels is not None:
        labels = _Labels(labels.service_name, labels.headless, labels.proxy_name, labels.zone)
    if endpoints is not None:
        endpoints = [
            _Endpoint(
                each.addresses,
                None
                if (state := each.conditions) is None
                or (
                    state.ready is not False
                    and state.serving is not False
                    and state.terminating is not True
                )
                else state,
                each.node_name,
                each.zone,
                _packed_hints(each.hints) if each.hints is not None else None,
            )
            for each in endpoints
        ]
    if ports is not None:
        ports = [_Port(each.name, each.protocol, each.port) for each in ports]
    kept = Annotations(weight=weight) if weight is not None else None
    return _Slice(
        metadata=_Meta(name=meta.name, namespace=meta.namespace, labels=labels, annotations=kept),
        address_type=slice_.address_type,
        endpoints=endpoints,  # type: ignore[arg-type]
        ports=ports,  # type: ignore[arg-type]
    )


def _packed_hints(hints: EndpointHints) -> _Hints:
    zones, nodes = (
        [_Zone(name=each.name) for each in names] if names is not None else None
        for names in (hints.for_zones, hints.for_nodes)
    )
    return _Hints(for_zones=zones, for_nodes=nodes)


def _targets(slice_: EndpointSlice) -> bytes:
    """Return the targetRefs of the endpoints in order, packed.

    A pod of the slice's namespace is its name alone, all others are kind, namespace and name.
    """
    namespace = slice_.metadata.namespace
    refs = [each.target_ref for each in slice_.endpoints or ()]
    if not any(refs):
        return _NO_TARGETS
    return _ENCODER.encode(
        [
            ref.name
            if ref and ref.kind == "Pod" and (ref.namespace or namespace) == namespace
            else ref and (ref.kind, ref.namespace, ref.name)
            for ref in refs
        ]
    )


class _PlanPart(msgspec.Struct, array_like=True, gc=False):
    """A packed slice as plans read it; the decoder skips the targets."""

    slice: _Slice


class _Whole(_PlanPart):
    targets: list[str | tuple[str, str, str] | None]


# Here, as threads unpack: msgspec crashes if two of them are the first to meet a type.
msgspec.msgpack.Decoder(EndpointSlice)
_ENCODER = msgspec.msgpack.Encoder()
_PLAN_PART, _WHOLE = msgspec.msgpack.Decoder(_PlanPart), msgspec.msgpack.Decoder(_Whole)
_PAIR = b"\x92"
"""Begins an array of two in msgpack."""
_NO_TARGETS = _ENCODER.encode([])


def unpacked(packed: bytes) -> EndpointSlice:
    """Return an EndpointSlice of `PackedSlices.packed`, with the targetRefs of its endpoints."""
    whole = _WHOLE.decode(packed)
    slice_ = plain(whole.slice)
    if not whole.targets:
        return slice_
    namespace = slice_.metadata.namespace
    endpoints = [
        replace(
            each,
            target_ref=ObjectReference("Pod", namespace, target)
            if isinstance(target, str)
            else target and ObjectReference(*target),
        )
        for each, target in zip(slice_.endpoints or (), whole.targets, strict=True)
    ]
    return replace(slice_, endpoints=endpoints)


def plain(slice_: EndpointSlice) -> EndpointSlice:
    """Return a slice with the structs of `model.kube` in place of those that are packed."""
    return msgspec.convert(slice_, EndpointSlice, from_attributes=True)


class PackedSlices(Mapping[ObjectName, Iterable[EndpointSlice]]):
    """EndpointSlices by the Service they belong to, in order of name; unpacked when read."""

    def __init__(self) -> None:
        self._owners: dict[ObjectName, ObjectName] = {}
        """The Service of each slice."""
        self._slices: dict[ObjectName, tuple[Any, ...]] = {}
        """The slices of each Service in order of name: name, bytes, name, bytes and so on."""

    def __getitem__(self, service: ObjectName) -> Iterable[EndpointSlice]:
        return _ServiceSlices(self._slices[service][1::2])

    def __iter__(self) -> Iterator[ObjectName]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    @property
    def count(self) -> int:
        """Number of slices."""
        return len(self._owners)

    def names(self) -> Iterator[ObjectName]:
        """Yield the names of all slices."""
        return iter(self._owners)

    def packed(self, services: Iterable[ObjectName] | None = None) -> list[bytes]:
        """Return the slices of some Services, or all, as of this call; `unpacked` reads each."""
        owners = self._slices if services is None else services
        return [part for owner in owners for part in self._slices.get(owner, ())[1::2]]

    def with_targets(self) -> dict[ObjectName, list[EndpointSlice]]:
        """Return all slices as of this call, with the targetRefs of their endpoints."""
        return {owner: [*map(unpacked, self.packed([owner]))] for owner in self}

    def owner(self, name: ObjectName) -> ObjectName | None:
        """Return the Service that a slice belongs to; None if there is no such slice."""
        return self._owners.get(name)

    def put(self, owner: ObjectName, slice_: EndpointSlice) -> bool:
        """Add or replace a slice of a Service; return whether it is new or different to plans.

        No other Service may have one of this name.
        """
        name, slices = slice_.metadata.name, self._slices.get(owner, ())
        plan_part = _PAIR + _ENCODER.encode(trimmed_slice(slice_))
        packed = plan_part + _targets(slice_)
        if name in slices:
            at = slices.index(name) + 1
            self._slices[owner] = (*slices[:at], packed, *slices[at + 1 :])
            return not slices[at].startswith(plan_part)
        at = 2 * bisect_left(slices[::2], name)
        self._slices[owner] = (*slices[:at], name, packed, *slices[at:])
        self._owners[ObjectName(owner.namespace, name)] = owner
        return True

    def remove(self, name: ObjectName) -> ObjectName | None:
        """Remove a slice; return the Service that it belonged to, None if there is no such one."""
        owner = self._owners.pop(name, None)
        if owner is None:
            return None
        slices = self._slices[owner]
        at = slices.index(name.name)
        if left := (*slices[:at], *slices[at + 2 :]):
            self._slices[owner] = left
        else:
            del self._slices[owner]
        return owner


class _ServiceSlices:
    """The slices of one Service, each unpacked when it is read."""

    __slots__ = ("_packed",)

    def __init__(self, packed: Sequence[bytes]) -> None:
        self._packed = packed

    def __iter__(self) -> Iterator[EndpointSlice]:
        return (_PLAN_PART.decode(each).slice for each in self._packed)
