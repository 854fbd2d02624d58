"""Services and EndpointSlices in little memory: a node holds those of the whole cluster.

Both are stripped of fields that no plan depends on (uid, resourceVersion and so on). Equal parts of
Services are shared. EndpointSlices are kept as msgpack bytes, a third of the size of the objects:
few of them are looked at between two syncs, and unpacking one takes a microsecond and half a
microsecond for each endpoint.

    length of the plan's part | the plan's part: EndpointSlice without targetRefs | targets
    | name | length of the name

The names of the pods behind endpoints are kept for answers to people. They are a part of their own,
so that plans are made without decoding them, and a change of nothing else is no change.

Objects are stripped with `structs.replace`, so that a new field of a struct is kept by default.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from sys import intern
from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple, replace

from steersman.model.kube import (
    Annotations,
    EndpointHints,
    EndpointSlice,
    ForZone,
    Labels,
    Node,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    ObjectReference,
    Selector,
    Service,
    ServicePort,
    ServiceSpec,
    SliceEndpoint,
    SlicePort,
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
        NodeSpec(pod_cidr=spec.pod_cidr, pod_cidrs=spec.pod_cidrs),
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

    A pod of the slice's namespace is its name without the part up to the last hyphen, if that is
    the same as in the first name, as in a Deployment; all others are kind, namespace and name.
    """
    prefix: str | None = None
    short: list[str | list[str] | None] = []
    namespace = slice_.metadata.namespace
    for each in slice_.endpoints or ():
        ref = each.target_ref
        if ref is None:
            short.append(None)
            continue
        name = ref.name
        if prefix is None:
            prefix = name[: name.rfind("-") + 1]
        if ref.kind != "Pod" or (ref.namespace or namespace) != namespace:
            short.append([ref.kind, ref.namespace, name])
        elif name.startswith(prefix):
            short.append(name[len(prefix) :])
        else:
            short.append([ref.kind, namespace, name])
    return b"" if prefix is None else _ENCODER.encode([prefix, *short])


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


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Slice)
_TARGETS_DECODER = msgspec.msgpack.Decoder(list[str | list[str] | None])
_LENGTH = 4  # bytes


def _plan_part(packed: bytes) -> bytes:
    """Return the bytes of a packed slice that plans depend on."""
    # Copying these few hundred bytes takes a third of the time of making a memoryview of them.
    return packed[_LENGTH : _LENGTH + int.from_bytes(packed[:_LENGTH])]


def _unpacked_plan_part(packed: bytes) -> EndpointSlice:
    return _DECODER.decode(_plan_part(packed))


def _tail(name: str) -> bytes:
    """Return the end of the packed slice of this name, and of no other."""
    encoded = name.encode()
    return encoded + len(encoded).to_bytes(_LENGTH)


def _name(packed: bytes) -> bytes:
    """Return the name of a packed slice in UTF-8, which sorts as the text does."""
    return packed[-_LENGTH - int.from_bytes(packed[-_LENGTH:]) : -_LENGTH]


def unpacked(packed: bytes) -> EndpointSlice:
    """Return an EndpointSlice of `PackedSlices.packed`, with the targetRefs of its endpoints."""
    part = _plan_part(packed)
    targets = memoryview(packed)[_LENGTH + len(part) : -_LENGTH - len(_name(packed))]
    found: EndpointSlice = plain(_DECODER.decode(part))
    return _with_targets(found, targets)


def plain(value: Any) -> Any:
    """Return a value with the structs of `model.kube` in place of those that are packed."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    kind = _PLAIN.get(type(value))
    return value if kind is None else kind(*map(plain, astuple(value)))


class PackedSlices(Mapping[ObjectName, Mapping[str, EndpointSlice]]):
    """EndpointSlices by the Service they belong to, then by their own name.

    An index by name would take as much memory as the slices. It is not needed, since the name of a
    slice is that of its Service and a suffix, as controllers generate it; others are listed.
    """

    def __init__(self) -> None:
        self._held: dict[ObjectName, bytes | tuple[bytes, ...]] = {}
        """A single slice is stored as itself; several in order of their names."""
        self._elsewhere: dict[ObjectName, ObjectName] = {}
        """The Services of slices whose names do not tell them."""
        self._count = 0
        self._decode: Callable[[bytes], EndpointSlice] = _unpacked_plan_part

    @property
    def with_targets(self) -> PackedSlices:
        """A live view of the same slices, with the targetRefs of their endpoints."""
        view = PackedSlices()
        view._held, view._decode = self._held, unpacked
        return view

    def __getitem__(self, service: ObjectName) -> Mapping[str, EndpointSlice]:
        held = self._held[service]
        return _ServiceSlices((held,) if isinstance(held, bytes) else held, self._decode)

    def get(self, service: ObjectName, default: Any = None) -> Any:
        """Return the slices of a Service; the inherited method takes twice as long."""
        held = self._held.get(service)
        if held is None:
            return default
        return _ServiceSlices((held,) if isinstance(held, bytes) else held, self._decode)

    def __contains__(self, service: object) -> bool:
        return service in self._held

    def __iter__(self) -> Iterator[ObjectName]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def share(self, services: Iterable[ObjectName]) -> None:
        """Hold the slices of Services by these equal names, their own: another takes 130 bytes."""
        held = self._held
        shared = {name: held.pop(name) for name in services if name in held}
        if held:  # slices that no Service has yet
            shared.update(held)
            held.clear()
        held.update(shared)

    @property
    def count(self) -> int:
        """Number of slices."""
        return self._count

    def names(self) -> Iterator[ObjectName]:
        """Yield the names of all slices."""
        for service in self._held:
            for packed in self._of(service):
                yield ObjectName(service.namespace, _name(packed).decode())

    @property
    def packed(self) -> list[bytes]:
        """All slices as of this call; the bytes are no msgpack, but input of `unpacked`."""
        return self.packed_of(self._held)

    def packed_of(self, services: Iterable[ObjectName]) -> list[bytes]:
        """Return the slices of some Services as of this call, in the form of `packed`."""
        return [packed for service in services for packed in self._of(service)]

    def _of(self, service: ObjectName) -> tuple[bytes, ...]:
        held = self._held.get(service, ())
        return (held,) if isinstance(held, bytes) else held

    def owner(self, name: ObjectName) -> ObjectName | None:
        """Return the Service that a slice belongs to; None if there is no such slice."""
        likely = self._elsewhere.get(name) or _likely_owner(name)
        return likely if self.find(name.name, likely) is not None else None

    def find(self, name: str, service: ObjectName) -> bytes | None:
        """Return a slice of a Service as it is held; None if it has no slice of this name."""
        held, tail = self._held.get(service), _tail(name)
        if isinstance(held, tuple):
            at = _place(held, name)
            held = held[at] if at < len(held) else None
        return held if held is not None and held.endswith(tail) else None

    def put(self, owner: ObjectName, slice_: EndpointSlice, old: bytes | None) -> bool:
        """Add or replace a slice of a Service; return whether it is new or different to plans.

        Args:
            owner: the Service.
            slice_: the slice; no other Service may have one of this name.
            old: what `find` returns for it.
        """
        part, name = _ENCODER.encode(trimmed_slice(slice_)), slice_.metadata.name
        start = len(part).to_bytes(_LENGTH) + part
        packed = b"".join((start, _targets(slice_), _tail(name)))
        if old == packed:
            return False
        if old is None:
            self._count += 1
            if owner != _likely_owner(key := slice_.metadata.object_name):
                self._elsewhere[key] = owner
        held = self._held.get(owner)
        if held is old:  # it has no other slice
            self._held[owner] = packed
        else:
            held = self._of(owner)
            at = _place(held, name)
            self._held[owner] = (*held[:at], packed, *held[at + (old is not None) :])
        return old is None or not old.startswith(start)

    def remove(self, name: ObjectName, owner: ObjectName) -> None:
        """Remove a slice of a Service; it must exist."""
        held = self._of(owner)
        at = _place(held, name.name)
        left = held[:at] + held[at + 1 :]
        if left:
            self._held[owner] = left if len(left) > 1 else left[0]
        else:
            del self._held[owner]
        self._elsewhere.pop(name, None)
        self._count -= 1


def _place(held: tuple[bytes, ...], name: str) -> int:
    """Return the index of a Service's slice, or the one that it would have."""
    return bisect_left(held, name.encode(), key=_name)


def _likely_owner(name: ObjectName) -> ObjectName:
    """Return the Service whose controller generates slices of such a name."""
    return ObjectName(name.namespace, name.name.rpartition("-")[0])


class _ServiceSlices(Mapping[str, EndpointSlice]):
    """The slices of one Service in order of name, each unpacked when it is read."""

    __slots__ = ("_decode", "_held")

    def __init__(self, held: tuple[bytes, ...], decode: Callable[[bytes], EndpointSlice]) -> None:
        self._held = held
        self._decode = decode

    def values(self) -> _SliceValues:
        """Return a view of the slices, which needs no look-up by name."""
        return _SliceValues(self)

    def _unpacked(self) -> Iterator[EndpointSlice]:
        return map(self._decode, self._held)

    def __getitem__(self, name: str) -> EndpointSlice:
        at = _place(self._held, name)
        if at == len(self._held) or not self._held[at].endswith(_tail(name)):
            raise KeyError(name)
        return self._decode(self._held[at])

    def __iter__(self) -> Iterator[str]:
        return (_name(packed).decode() for packed in self._held)

    def __len__(self) -> int:
        return len(self._held)


class _SliceValues(ValuesView[EndpointSlice]):
    """A view of the slices of one Service."""

    _mapping: _ServiceSlices

    def __iter__(self) -> Iterator[EndpointSlice]:
        return self._mapping._unpacked()
