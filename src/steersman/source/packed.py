"""Services and EndpointSlices in little memory: a node holds those of the whole cluster.

Both are stripped of fields that no plan depends on (uid, resourceVersion and so on). Equal parts of
Services are shared. EndpointSlices are kept as msgpack bytes, a third of the size of the objects:
few of them are looked at between two syncs, and unpacking one takes a microsecond and half a
microsecond for each endpoint.

    length of the plan's part | the plan's part: EndpointSlice without targetRefs | targets

The names of the pods behind endpoints are kept for answers to people. They are a part of their own,
so that plans are made without decoding them, and a change of nothing else is no change.

Objects are stripped with `structs.replace`, so that a new field of a struct is kept by default.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from sys import intern
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from steersman.model.kube import (
    Annotations,
    EndpointSlice,
    Labels,
    Lean,
    Node,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    ObjectReference,
    Selector,
    Service,
    ServicePort,
    ServiceSpec,
)
from steersman.model.names import ObjectName

T = TypeVar("T")

_MAX_SHARED = 4096  # different values of each sort; later ones are not shared

_ports: dict[tuple[ServicePort, ...], list[ServicePort]] = {}
_families: dict[tuple[str, ...], list[str]] = {}
_SELECTOR = Selector()


def trimmed_service(service: Service) -> Service:
    """Return the Service as it is kept: the same to `sync_fields`, but smaller."""
    meta, spec, status = service.metadata, service.spec, service.status
    cluster_ips = spec.cluster_ips
    if cluster_ips and cluster_ips[0] == spec.cluster_ip:
        cluster_ips = [spec.cluster_ip, *cluster_ips[1:]]  # the first one is the same string
    if status is not None and (lb := status.load_balancer) is not None and not lb.ingress:
        status = None
    return replace(
        service,
        metadata=replace(
            meta,
            namespace=intern(meta.namespace),
            uid="",
            resource_version="",
            creation_timestamp=_interned(meta.creation_timestamp),
            deletion_timestamp=None,
        ),
        spec=replace(
            spec,
            type=_interned(spec.type),
            cluster_ips=cluster_ips,
            ip_families=_shared(_families, spec.ip_families),
            ports=_shared(_ports, spec.ports),
            session_affinity=_interned(spec.session_affinity),
            internal_traffic_policy=_interned(spec.internal_traffic_policy),
            external_traffic_policy=_interned(spec.external_traffic_policy),
            selector=_SELECTOR if spec.selector is not None else None,
        ),
        status=status,
    )


def trimmed_unserved(service: Service) -> Service:
    """Return a Service that we do not serve as it is kept: enough to tell why not."""
    meta, spec = service.metadata, service.spec
    return Service(
        ObjectMeta(meta.name, intern(meta.namespace), labels=meta.labels),
        ServiceSpec(
            type=_interned(spec.type),
            cluster_ip=_interned(spec.cluster_ip),
            ports=_shared(_ports, spec.ports),
            external_name=spec.external_name,
            selector=_SELECTOR if spec.selector is not None else None,
        ),
    )


def trimmed_node(node: Node) -> Node:
    """Return a Node as it is kept: name, zone, pod CIDRs and addresses."""
    meta, spec = node.metadata, node.spec
    return Node(
        ObjectMeta(meta.name, labels=meta.labels),
        NodeSpec(spec.pod_cidr, spec.pod_cidrs),
        NodeStatus(node.status.addresses) if node.status else None,
    )


def _interned(text: str | None) -> str | None:
    return text if text is None else intern(text)


def _shared(known: dict[tuple[T, ...], list[T]], values: list[T] | None) -> list[T] | None:
    """Return an equal list that was seen before, if there is one."""
    if values is None:
        return None
    key = tuple(values)
    if len(known) >= _MAX_SHARED:
        return known.get(key, values)
    return known.setdefault(key, values)


def trimmed_slice(slice_: EndpointSlice) -> EndpointSlice:
    """Return an EndpointSlice without the fields that no plan depends on, targetRefs included.

    Conditions that mean the same as none (behaviour 4) are left out, too, and so are annotations
    except for the weight.
    """
    meta, annotations, endpoints = slice_.metadata, slice_.metadata.annotations, slice_.endpoints
    if annotations is not None:
        annotations = (
            Annotations(weight=annotations.weight) if annotations.weight is not None else None
        )
    if endpoints is not None:
        endpoints = [
            each
            if (state := each.conditions) is None and each.target_ref is None
            else replace(
                each,
                conditions=None
                if state is None
                or (
                    state.ready is not False
                    and state.serving is not False
                    and state.terminating is not True
                )
                else state,
                target_ref=None,
            )
            for each in endpoints
        ]
    meta = replace(
        meta,
        uid="",
        resource_version="",
        annotations=annotations,
        creation_timestamp=None,
        deletion_timestamp=None,
    )
    return replace(slice_, metadata=meta, endpoints=endpoints)


def _targets(slice_: EndpointSlice) -> bytes:
    """Return the targetRefs of the endpoints in order, packed; b"" if there are none.

    A pod of the slice's namespace is its name without the prefix that all of them share, as those
    of a Deployment do; anything else is kind, namespace and name.
    """
    refs = [each.target_ref for each in slice_.endpoints or ()]
    if not any(refs):
        return b""
    namespace = slice_.metadata.namespace
    short = [
        None
        if ref is None
        else ref.name
        if ref.kind == "Pod" and (ref.namespace or namespace) == namespace
        else [ref.kind, ref.namespace, ref.name]
        for ref in refs
    ]
    names = [name for name in short if isinstance(name, str)]
    first, last = (min(names), max(names)) if names else ("", "")
    shared = 0  # letters that the first and the last name share, and so all names between them
    for one, other in zip(first, last, strict=False):
        if one != other:
            break
        shared += 1
    cut = [name[shared:] if isinstance(name, str) else name for name in short]
    return _ENCODER.encode([first[:shared], *cut])


def _with_targets(slice_: EndpointSlice, packed: memoryview) -> EndpointSlice:
    """Return a slice with the targetRefs that `_targets` packed."""
    if not packed:
        return slice_
    prefix, *short = _TARGETS_DECODER.decode(packed)
    namespace = slice_.metadata.namespace
    refs = (
        ObjectReference(*name)
        if isinstance(name, list)
        else None
        if name is None
        else ObjectReference("Pod", namespace, f"{prefix}{name}")
        for name in short
    )
    endpoints = [
        replace(each, target_ref=ref)
        for each, ref in zip(slice_.endpoints or (), refs, strict=True)
    ]
    return replace(slice_, endpoints=endpoints)


class _LabelledMeta(Lean, frozen=True):
    labels: Labels = Labels()


class _Labelled(Lean, frozen=True):
    """The part of a packed EndpointSlice that names its Service."""

    metadata: _LabelledMeta


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EndpointSlice)
_LABELS_DECODER = msgspec.msgpack.Decoder(_Labelled)
_TARGETS_DECODER = msgspec.msgpack.Decoder(list[str | list[str] | None])
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
    return _with_targets(_DECODER.decode(part), memoryview(packed)[_LENGTH + len(part) :])


class PackedSlices(Mapping[ObjectName, Mapping[str, EndpointSlice]]):
    """EndpointSlices by the Service they belong to, then by their own name."""

    def __init__(self) -> None:
        self._packed: dict[ObjectName, bytes] = {}
        self._by_service: dict[ObjectName, tuple[ObjectName, ...]] = {}
        self._decode: Callable[[bytes], EndpointSlice] = _unpacked_plan_part

    @property
    def with_targets(self) -> PackedSlices:
        """A live view of the same slices, with the targetRefs of their endpoints."""
        view = PackedSlices()
        view._packed, view._by_service = self._packed, self._by_service
        view._decode = unpacked
        return view

    def __getitem__(self, service: ObjectName) -> Mapping[str, EndpointSlice]:
        return _ServiceSlices(self._packed, self._by_service[service], self._decode)

    def __contains__(self, service: object) -> bool:
        return service in self._by_service

    def __iter__(self) -> Iterator[ObjectName]:
        return iter(self._by_service)

    def __len__(self) -> int:
        return len(self._by_service)

    @property
    def names(self) -> Mapping[ObjectName, object]:
        """The names of all slices, as keys."""
        return self._packed

    @property
    def packed(self) -> list[bytes]:
        """All slices as of this call; the bytes are no msgpack, but input of `unpacked`."""
        return list(self._packed.values())

    def packed_of(self, services: Iterable[ObjectName]) -> list[bytes]:
        """Return the slices of some Services as of this call, in the form of `packed`."""
        return [self._packed[name] for each in services for name in self._by_service.get(each, ())]

    def owner(self, name: ObjectName) -> ObjectName | None:
        """Return the Service that a slice belongs to; None if there is no such slice."""
        # Decoding the labels is cheap and rare; an index by name would take memory all the time.
        packed = self._packed.get(name)
        if packed is None:
            return None
        labels = _LABELS_DECODER.decode(_plan_part(packed)).metadata.labels
        return ObjectName(name.namespace, labels.service_name or "")

    def belongs(self, name: ObjectName, service: ObjectName | None) -> bool:
        """Whether there is such a slice of this Service. Cheaper than `owner`."""
        if service is None or name not in self._packed:
            return False
        return name in self._by_service.get(service, ())

    def put(self, name: ObjectName, owner: ObjectName, slice_: EndpointSlice) -> bool:
        """Add or replace a slice of a Service; return whether it is new or different to plans.

        A slice that belonged to another Service must have been removed before.
        """
        part = _ENCODER.encode(trimmed_slice(slice_))
        packed = b"".join((len(part).to_bytes(_LENGTH), part, _targets(slice_)))
        old = self._packed.get(name)
        if old == packed:
            return False
        if old is not None and _plan_part(old) == part:
            self._packed[name] = packed
            return False
        if old is None:
            name = ObjectName(owner.namespace, name.name)  # with the interned namespace
            self._by_service[owner] = (*self._by_service.get(owner, ()), name)
        self._packed[name] = packed
        return True

    def remove(self, name: ObjectName, owner: ObjectName) -> None:
        """Remove a slice of a Service; it must exist."""
        del self._packed[name]
        left = tuple(other for other in self._by_service.pop(owner) if other != name)
        if left:
            self._by_service[owner] = left


class _ServiceSlices(Mapping[str, EndpointSlice]):
    """The slices of one Service in order of name, each unpacked when it is read."""

    __slots__ = ("_decode", "_names", "_packed")

    def __init__(
        self,
        packed: Mapping[ObjectName, bytes],
        names: tuple[ObjectName, ...],
        decode: Callable[[bytes], EndpointSlice],
    ) -> None:
        self._packed = packed
        self._names = names if len(names) == 1 else tuple(sorted(names))
        self._decode = decode

    def values(self) -> _SliceValues:
        """Return a view of the slices, which needs no look-up by name."""
        return _SliceValues(self)

    def _unpacked(self) -> Iterator[EndpointSlice]:
        return map(self._decode, map(self._packed.__getitem__, self._names))

    def __getitem__(self, name: str) -> EndpointSlice:
        # The names are sorted, and of one namespace: that of the Service.
        key = ObjectName(self._names[0].namespace, name)
        at = bisect_left(self._names, key)
        if self._names[at : at + 1] != (key,):
            raise KeyError(name)
        return self._decode(self._packed[key])

    def __iter__(self) -> Iterator[str]:
        return (name.name for name in self._names)

    def __len__(self) -> int:
        return len(self._names)


class _SliceValues(ValuesView[EndpointSlice]):
    """A view of the slices of one Service."""

    _mapping: _ServiceSlices

    def __iter__(self) -> Iterator[EndpointSlice]:
        return self._mapping._unpacked()
