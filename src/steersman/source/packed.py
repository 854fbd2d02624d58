"""EndpointSlices in little memory: a node holds those of the whole cluster.

They are kept as msgpack bytes, a third of the size of the objects. Few of them are looked at
between two syncs, and unpacking one takes a microsecond and half a microsecond for each endpoint.

    length of the plan's part | the plan's part: EndpointSlice without targetRefs | targets

The names of the pods behind endpoints are kept for answers to people. They are a part of their own,
so that plans are made without decoding them, and a change of nothing else is no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import astuple, replace

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
        labels = _Labels(
            service_name=labels.service_name,
            headless=labels.headless,
            proxy_name=labels.proxy_name,
            zone=labels.zone,
        )
    if endpoints is not None:
        endpoints = [
            _Endpoint(
                addresses=each.addresses,
                conditions=None
                if (state := each.conditions) is None
                or (
                    state.ready is not False
                    and state.serving is not False
                    and state.terminating is not True
                )
                else state,
                node_name=each.node_name,
                zone=each.zone,
                hints=_packed_hints(each.hints) if each.hints is not None else None,
            )
            for each in endpoints
        ]
    if ports is not None:
        ports = [_Port(name=each.name, protocol=each.protocol, port=each.port) for each in ports]
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


_PLAIN = {
    packed: packed.__base__ for packed in (_Labels, _Meta, _Zone, _Hints, _Endpoint, _Port, _Slice)
}
"""What the structs are outside of this module."""


def _targets(slice_: EndpointSlice) -> bytes:
    """Return the targetRefs of the endpoints in order, packed; b"" if there are none.

    A pod of the slice's namespace is its name alone, all others are kind, namespace and name.
    """
    namespace = slice_.metadata.namespace
    refs = [each.target_ref for each in slice_.endpoints or ()]
    if not any(refs):
        return b""
    return _ENCODER.encode(
        [
            ref.name
            if ref and (ref.kind, ref.namespace or namespace) == ("Pod", namespace)
            else ref and (ref.kind, ref.namespace, ref.name)
            for ref in refs
        ]
    )


def _with_targets(slice_: EndpointSlice, targets: memoryview) -> EndpointSlice:
    """Return a slice with the targetRefs that `_targets` packed."""
    if not targets:
        return slice_
    namespace = slice_.metadata.namespace
    endpoints = [
        replace(
            each,
            target_ref=ObjectReference("Pod", namespace, target)
            if isinstance(target, str)
            else target and ObjectReference(*target),
        )
        for each, target in zip(
            slice_.endpoints or (), _TARGETS_DECODER.decode(targets), strict=True
        )
    ]
    return replace(slice_, endpoints=endpoints)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Slice)
_TARGETS_DECODER = msgspec.msgpack.Decoder(list[str | tuple[str, str, str] | None])
_LENGTH = 4  # bytes


def _plan_part(packed: bytes) -> bytes:
    """Return the bytes of a packed slice that plans depend on."""
    # Copying these few hundred bytes takes a third of the time of making a memoryview of them.
    return packed[_LENGTH : _LENGTH + int.from_bytes(packed[:_LENGTH])]


def _unpacked_plan_part(packed: bytes) -> EndpointSlice:
    return _DECODER.decode(_plan_part(packed))


def unpacked(packed: bytes) -> EndpointSlice:
    """Return an EndpointSlice of `PackedSlices.packed`, with the targetRefs of its endpoints."""
    part = _plan_part(packed)
    found: EndpointSlice = plain(_DECODER.decode(part))
    return _with_targets(found, memoryview(packed)[_LENGTH + len(part) :])


def plain(value: Any) -> Any:
    """Return a value with the structs of `model.kube` in place of those that are packed."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    kind = _PLAIN.get(type(value))
    return value if kind is None else kind(*map(plain, astuple(value)))


class PackedSlices(Mapping[ObjectName, Mapping[str, EndpointSlice]]):
    """EndpointSlices by the Service they belong to, then by their own name."""

    def __init__(self) -> None:
        self._slices: dict[ObjectName, tuple[ObjectName, bytes]] = {}
        """The Service of each slice, and the slice."""
        self._names: dict[ObjectName, tuple[str, ...]] = {}
        """The names of each Service's slices, sorted."""
        self._unpack: Callable[[bytes], EndpointSlice] = _unpacked_plan_part

    @property
    def with_targets(self) -> PackedSlices:
        """A live view of the same slices, with the targetRefs of their endpoints."""
        view = PackedSlices()
        view._slices, view._names, view._unpack = self._slices, self._names, unpacked
        return view

    def __getitem__(self, service: ObjectName) -> Mapping[str, EndpointSlice]:
        return self._of(service, self._names[service])

    def get(self, service: ObjectName, default: Any = None) -> Any:
        """Return the slices of a Service; the inherited method takes twice as long."""
        names = self._names.get(service)
        return default if names is None else self._of(service, names)

    def _of(self, service: ObjectName, names: tuple[str, ...]) -> _ServiceSlices:
        held = {name: self._slices[ObjectName(service.namespace, name)][1] for name in names}
        return _ServiceSlices(held, self._unpack)

    def __contains__(self, service: object) -> bool:
        return service in self._names

    def __iter__(self) -> Iterator[ObjectName]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def count(self) -> int:
        """Number of slices."""
        return len(self._slices)

    def names(self) -> Iterator[ObjectName]:
        """Yield the names of all slices."""
        return iter(self._slices)

    @property
    def packed(self) -> list[bytes]:
        """All slices as of this call; the bytes are no msgpack, but input of `unpacked`."""
        return self.packed_of(self._names)

    def packed_of(self, services: Iterable[ObjectName]) -> list[bytes]:
        """Return the slices of some Services as of this call, in the form of `packed`."""
        return [
            self._slices[ObjectName(service.namespace, name)][1]
            for service in services
            for name in self._names.get(service, ())
        ]

    def owner(self, name: ObjectName) -> ObjectName | None:
        """Return the Service that a slice belongs to; None if there is no such slice."""
        found = self._slices.get(name)
        return found[0] if found is not None else None

    def put(self, owner: ObjectName, slice_: EndpointSlice) -> bool:
        """Add or replace a slice of a Service; return whether it is new or different to plans.

        No other Service may have one of this name.
        """
        name = ObjectName(owner.namespace, slice_.metadata.name)
        part = _ENCODER.encode(trimmed_slice(slice_))
        start = len(part).to_bytes(_LENGTH) + part
        old = self._slices.get(name)
        self._slices[name] = (owner if old is None else old[0], start + _targets(slice_))
        if old is None:
            self._names[owner] = tuple(sorted((*self._names.get(owner, ()), name.name)))
        return old is None or not old[1].startswith(start)

    def remove(self, name: ObjectName) -> ObjectName | None:
        """Remove a slice; return the Service that it belonged to, None if there is no such one."""
        if (found := self._slices.pop(name, None)) is None:
            return None
        owner = found[0]
        if names := tuple(each for each in self._names[owner] if each != name.name):
            self._names[owner] = names
        else:
            del self._names[owner]
        return owner


class _ServiceSlices(Mapping[str, EndpointSlice]):
    """The slices of one Service in order of name, each unpacked when it is read."""

    __slots__ = ("_held", "_unpack")

    def __init__(self, held: Mapping[str, bytes], unpack: Callable[[bytes], EndpointSlice]) -> None:
        self._held = held
        self._unpack = unpack

    def __getitem__(self, name: str) -> EndpointSlice:
        return self._unpack(self._held[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
