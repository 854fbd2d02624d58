"""The Store: the cluster's objects as last seen, and which Services changed since the last sync.

An update counts as a change only if it differs in the fields that plans depend on (`sync_fields`).
Nothing is decided here. All calls come from the event loop, so there are no locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from sys import intern

import msgspec

from steersman.model.addresses import canonical_cidr, canonical_ip, family_of
from steersman.model.failover import Ejection
from steersman.model.findings import Finding
from steersman.model.inputs import Snapshot
from steersman.model.kube import (
    Annotations,
    EndpointSlice,
    KubeObject,
    Labels,
    Node,
    NodeAddress,
    NodeStatus,
    Service,
    ServiceCIDR,
)
from steersman.model.names import Family, ObjectName
from steersman.source.packed import (
    PackedSlices,
    trimmed_node,
    trimmed_service,
    trimmed_unserved,
)

# -- This node -------------------------------------------------------------------------------------
#
# This node's object, with lost fields filled in from its last good version.
#
# A Node can be deleted by mistake, and a kubelet that registers it again does so without addresses,
# pod CIDRs and zone: those come seconds later, from the cloud controller. Programming the node by
# such an object would open node ports on every address and masquerade the traffic of its pods. So a
# field that a Node has lost keeps its last value until it has a new one.

_HOST_TYPES = ("InternalIP", "ExternalIP")


class LastNode:
    """This node's object as plans see it."""

    def __init__(self) -> None:
        """Start without an object."""
        self.node: Node | None = None
        self.deleted = False
        """Whether the API server has deleted the object."""
        self.kept: tuple[str, ...] = ()
        """Names of the fields that the object has lost and keeps, for messages."""
        self._replaced = False  # whether the object was created again and has no zone yet

    def update(self, node: Node | None) -> None:
        """Process the object as the API server has it; None if it was deleted."""
        known = self.node
        # The first object, or a deletion: keep the last object.
        if known is None or node is None:
            self.deleted = node is None and known is not None
            self._replaced |= self.deleted
            self.node = known or node
            return
        self.deleted, kept = False, []
        self._replaced |= known.metadata.uid != node.metadata.uid

        # Addresses are kept by family; those of a family that is still there are replaced.
        addresses = _addresses(node)
        if lost := _addresses(known).keys() - addresses.keys():
            kept += [f"{family.kubernetes} addresses" for family in sorted(lost)]
            ordered = {**_addresses(known), **addresses}
            others = [each for each in _listed(node) if each.type not in _HOST_TYPES]
            status = NodeStatus([*(a for some in ordered.values() for a in some), *others])
            node = msgspec.structs.replace(node, status=status)

        if not _has_pod_cidrs(node) and _has_pod_cidrs(known):
            kept.append("pod CIDRs")
            cidr, cidrs = known.spec.pod_cidr, known.spec.pod_cidrs
            spec = msgspec.structs.replace(node.spec, pod_cidr=cidr, pod_cidrs=cidrs)
            node = msgspec.structs.replace(node, spec=spec)

        # A zone is kept only for a new object: from the same one, somebody has removed the label.
        if _zone(node):
            self._replaced = False
        elif self._replaced and (zone := _zone(known)):
            kept.append("zone")
            labels = msgspec.structs.replace(node.metadata.labels or Labels(), zone=zone)
            meta = msgspec.structs.replace(node.metadata, labels=labels)
            node = msgspec.structs.replace(node, metadata=meta)

        self.node, self.kept = node, tuple(kept)


def _listed(node: Node) -> list[NodeAddress]:
    return (node.status.addresses if node.status else None) or []


def _addresses(node: Node) -> dict[Family, list[NodeAddress]]:
    """Return the valid addresses of a Node's host by family, in order."""
    found: dict[Family, list[NodeAddress]] = {}
    for each in _listed(node):
        address = canonical_ip(each.address)
        if each.type in _HOST_TYPES and address is not None:
            found.setdefault(family_of(address), []).append(each)
    return found


def _has_pod_cidrs(node: Node) -> bool:
    return bool(node.spec.pod_cidrs or node.spec.pod_cidr)


def _zone(node: Node) -> str | None:
    return node.metadata.labels.zone if node.metadata.labels else None


# -- The Store -------------------------------------------------------------------------------------

MOST_TRIGGERS = 16
"""Trigger times kept for a Service between two syncs; more add nothing to the latency metric."""


class Changes(msgspec.Struct, frozen=True):
    """The changes between two syncs."""

    services: frozenset[ObjectName] = frozenset()
    """Services that changed themselves, or whose endpoints changed in either way."""
    service_objects: frozenset[ObjectName] = frozenset()
    """Services that changed themselves, and did not change back (behaviour 3)."""
    endpoints: frozenset[ObjectName] = frozenset()
    """Services with a changed EndpointSlice (behaviour 4)."""
    ejections: frozenset[ObjectName] = frozenset()
    """Services of which other endpoints are ejected than before."""
    node: bool = False
    """Whether this node's object or the ServiceCIDRs changed in a relevant field."""
    trigger_times: Mapping[ObjectName, tuple[str, ...]] = {}
    """Trigger-time annotations of the slice updates that were changes, by Service."""
    received: float | None = None
    """When the first of them was received, by the clock of the Store; None if it has none."""

    def __bool__(self) -> bool:
        return bool(self.services or self.node)


_NO_ANNOTATIONS = Annotations()


def service_sync_fields(service: Service) -> object:
    """Return the fields of a Service that plans depend on; None if we do not serve it.

    See behaviour 2 and 3.
    """
    spec = service.spec
    labels = service.metadata.labels
    if labels is not None and labels.proxy_name is not None:
        return None
    if not spec.cluster_ip or spec.cluster_ip == "None" or spec.type == "ExternalName":
        return None
    lb = service.status.load_balancer if service.status else None
    ingress = (lb.ingress if lb else None) or None
    annotations = service.metadata.annotations
    if annotations == _NO_ANNOTATIONS:  # the Service has some, but none that is read
        annotations = None
    if spec.selector is not None or spec.external_name is not None:  # for answers to people
        spec = msgspec.structs.replace(spec, selector=None, external_name=None)
    return spec, ingress, service.metadata.creation_timestamp, annotations


def _node_sync_fields(node: Node | None) -> object:
    if node is None:
        return None
    zone = node.metadata.labels.zone if node.metadata.labels else None
    addresses = node.status.addresses if node.status else None
    return node.metadata.name, zone, node.spec.pod_cidr, node.spec.pod_cidrs, addresses


class Store:
    """Holds objects and collects changes. Implements `source.base.EventHandler`."""

    def __init__(
        self,
        node_name: str = "",
        on_change: Callable[[], None] = lambda: None,
        sync_fields: Callable[[Service], object] = service_sync_fields,
        on_report: Callable[[], None] = lambda: None,
        clock: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Make an empty Store.

        Args:
            node_name: the Node of this name is this node; others are ignored.
            on_change: called after each call that left something to be synced.
            sync_fields: returns the part of a Service to compare (falsy: not served).
            on_report: called after each report that changed the Findings.
            clock: tells when changes are received.
        """
        self._node_name = node_name
        self._on_change = on_change
        self._on_report = on_report
        self._sync_fields = sync_fields
        self._clock = clock
        self._services: dict[ObjectName, Service] = {}
        self._unserved: dict[ObjectName, Service] = {}
        self._nodes: dict[ObjectName, Node] = {}
        self._slices = PackedSlices()
        self._cidrs: dict[ObjectName, ServiceCIDR] = {}
        self._ejected: dict[ObjectName, tuple[Ejection, ...]] = {}
        self.own_node = LastNode()
        """This node's object, with fields that it has lost since."""
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._synced: set[str] = set()  # kinds with a complete initial list
        self._before: dict[ObjectName, object] = {}  # sync_fields at the last take, if different
        self._endpoints: set[ObjectName] = set()
        self._ejections: set[ObjectName] = set()
        self._triggers: dict[ObjectName, list[str]] = {}
        self._node_changed = False
        self._received: float | None = None  # when the first change since the last take came
        self.seen: Counter[str] = Counter()
        """Changes so far, by kind."""

    def listen(self, on_change: Callable[[], None], on_report: Callable[[], None]) -> None:
        """Call these from now on; see the constructor."""
        self._on_change, self._on_report = on_change, on_report

    @property
    def snapshot(self) -> Snapshot:
        """A live, read-only view of all objects, without the pods behind endpoints."""
        return self._view(self._slices)

    @property
    def detailed_snapshot(self) -> Snapshot:
        """Like `snapshot`, with the targetRefs of endpoints: for answers to people."""
        return self._view(self._slices.with_targets)

    @property
    def unserved(self) -> Mapping[ObjectName, Service]:
        """The Services that the source sends and we do not serve, a live view.

        They are headless, of type ExternalName, or another proxy's. An API server that is watched
        is asked only for those of type ExternalName, and for what it takes to serve the others.
        """
        return self._unserved

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All Nodes that the source sends, ordered by name; from a watch only this node's."""
        return tuple(self._nodes[name] for name in sorted(self._nodes))

    def _view(self, slices: PackedSlices) -> Snapshot:
        # Malformed CIDRs are skipped; those of several ServiceCIDRs may be the same.
        cidrs = {
            canonical
            for cidr in self._cidrs.values()
            for text in cidr.spec.cidrs or ()
            if (canonical := canonical_cidr(text))
        }
        node = self.own_node.node
        return Snapshot(self._services, slices, node, tuple(sorted(cidrs)), self._ejected)

    @property
    def slices(self) -> int:
        """Number of EndpointSlices."""
        return self._slices.count

    def packed_slices(self, services: Iterable[ObjectName] | None = None) -> list[bytes]:
        """Return all EndpointSlices, or those of some Services; `packed.unpacked` reads each."""
        return self._slices.packed if services is None else self._slices.packed_of(services)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The Findings that sources reported, ordered by scope."""
        return tuple(f for scope in sorted(self._findings) for f in self._findings[scope])

    @property
    def synced(self) -> bool:
        """Whether the initial lists of Services and EndpointSlices are complete (behaviour 2)."""
        return {"Service", "EndpointSlice"} <= self._synced

    def take(self) -> Changes:
        """Return the changes since the last call, and forget them."""
        services = frozenset(self._before)
        endpoints, ejections = frozenset(self._endpoints), frozenset(self._ejections)
        if 2 * len(endpoints) > len(self._services):  # after a list of all
            self._slices.share(self._services)
        changes = Changes(
            services=services | endpoints | ejections,
            service_objects=services,
            endpoints=endpoints,
            ejections=ejections,
            node=self._node_changed,
            trigger_times={name: tuple(times) for name, times in self._triggers.items()},
            received=self._received,
        )
        self._before = {}
        self._endpoints = set()
        self._ejections = set()
        self._triggers = {}
        self._node_changed = False
        self._received = None
        return changes

    def eject(self, service: ObjectName, ejections: tuple[Ejection, ...]) -> None:
        """Take endpoints of a Service out; the ejections replace those of the last call."""
        before = self._ejected.pop(service, ())
        if ejections:
            self._ejected[service] = ejections
        if {each.backend for each in before} != {each.backend for each in ejections}:
            self._ejections.add(service)
            self._on_change()

    # The interface of EventHandler

    def replace(self, kind: str, objects: Iterable[KubeObject], keep: Container[str] = ()) -> None:
        """Replace all objects of a kind at once; see `retain`."""
        listed: set[ObjectName] = set()
        changed = False
        for obj in objects:
            listed.add(obj.metadata.object_name)
            changed |= self._put(obj)
        self._notify(self._retain(kind, listed, keep) or changed)

    def retain(self, kind: str, names: Container[ObjectName], keep: Container[str] = ()) -> None:
        """Remove objects of a kind with other names, unless their scope is in `keep`.

        The first call for a kind completes its initial list, see `synced`.
        """
        self._notify(self._retain(kind, names, keep))

    def upsert(self, obj: KubeObject) -> bool:
        """Add or replace an object; return the `changed` flag of behaviour 3 and 4."""
        return self._notify(self._put(obj))

    def delete(self, kind: str, name: ObjectName) -> bool:
        """Remove an object; return the `changed` flag of behaviour 3 and 4."""
        return self._notify(self._remove(kind, name))

    def report(self, scope: str, findings: Sequence[Finding]) -> None:
        """Replace the Findings of a scope."""
        before = self._findings.pop(scope, ())
        if findings:
            self._findings[scope] = tuple(findings)
        if before != tuple(findings):
            self._on_report()

    def _notify(self, changed: bool) -> bool:
        if changed:
            if self._received is None:
                self._received = self._clock()
            self._on_change()
        return changed

    # By kind; each method returns the `changed` flag

    def _retain(self, kind: str, names: Container[ObjectName], keep: Container[str]) -> bool:
        known: Iterable[ObjectName]
        match kind:
            case "Service":
                known = [*self._services, *self._unserved]
            case "EndpointSlice":
                known = self._slices.names()
            case "ServiceCIDR":
                known = self._cidrs
            case _:
                node = self.own_node.node
                known = {*self._nodes, *([node.metadata.object_name] if node else ())}
        changed = kind not in self._synced  # an empty initial list is a change, too
        for name in [name for name in known if name not in names]:
            if f"{kind} {name}" not in keep:
                changed |= self._remove(kind, name)
        self._synced.add(kind)
        return changed

    def _put(self, obj: KubeObject) -> bool:
        match obj:
            case Service():
                meta = obj.metadata
                name = ObjectName(intern(meta.namespace), meta.name)  # it is a key of many places
                return self._put_service(name, obj)
            case EndpointSlice():
                return self._put_slice(obj)
            case Node():
                self._nodes[obj.metadata.object_name] = trimmed_node(obj)
                return obj.metadata.name == self._node_name and self._put_node(obj)
            case _:
                return self._put_cidr(obj.metadata.object_name, obj)

    def _remove(self, kind: str, name: ObjectName) -> bool:
        match kind:
            case "Service":
                return self._put_service(name, None)
            case "EndpointSlice":
                return self._remove_slice(name)
            case "Node":
                self._nodes.pop(name, None)
                return name.name == self._node_name and self._put_node(None)
            case _:
                return self._put_cidr(name, None)

    def _put_service(self, name: ObjectName, service: Service | None) -> bool:
        old = self._services.get(name)  # trimmed, which keeps sync_fields
        was = (self._sync_fields(old) if old else None) or None
        now = (self._sync_fields(service) if service else None) or None
        self.seen["Service"] += was != now
        # A Service that changed back since the last take is no change: nothing is left to sync.
        before = self._before.setdefault(name, was)
        if before == now:
            del self._before[name]
        if service is None or now is None:
            self._services.pop(name, None)
        else:
            self._services[name] = trimmed_service(service)
        if service is None or now is not None:
            self._unserved.pop(name, None)
        else:
            self._unserved[name] = trimmed_unserved(service)
        return bool(self._before)

    def _put_slice(self, slice_: EndpointSlice) -> bool:
        # Slices without a Service, without a name or of a headless Service are ignored
        # (behaviour 2, 4), so a slice that becomes one of these is removed.
        meta, labels = slice_.metadata, slice_.metadata.labels or Labels()
        owner = None
        if meta.name and meta.namespace and labels.service_name and labels.headless is None:
            owner = ObjectName(intern(meta.namespace), labels.service_name)
        # A slice can move to another Service: both have changed.
        old = self._slices.find(meta.name, owner) if owner is not None else None
        moved = old is None and self._remove_slice(meta.object_name)
        if owner is not None and old is None and (service := self._services.get(owner)):
            owner = service.metadata.object_name  # made of strings that are kept anyway
        if owner is None or not self._slices.put(owner, slice_, old):
            return moved
        self._endpoints.add(owner)
        self.seen["EndpointSlice"] += 1
        if meta.annotations is not None and meta.annotations.trigger_time:
            # For the metric network_programming_duration_seconds.
            times = self._triggers.setdefault(owner, [])
            if len(times) < MOST_TRIGGERS:
                times.append(meta.annotations.trigger_time)
        return True

    def _remove_slice(self, name: ObjectName) -> bool:
        owner = self._slices.owner(name)
        if owner is None:
            return False
        self._endpoints.add(owner)
        self.seen["EndpointSlice"] += 1
        self._slices.remove(name, owner)
        self._triggers.pop(owner, None)
        return True

    def _put_node(self, node: Node | None) -> bool:
        own = self.own_node
        before, state = own.node, (own.deleted, own.kept)
        own.update(node)
        changed = _node_sync_fields(before) != _node_sync_fields(own.node)
        self._node_changed |= changed
        return changed or state != (own.deleted, own.kept)

    def _put_cidr(self, name: ObjectName, obj: ServiceCIDR | None) -> bool:
        old = self._cidrs.pop(name, None)
        if obj is not None:
            self._cidrs[name] = obj
        changed = (old.spec if old else None) != (obj.spec if obj else None)
        self._node_changed |= changed
        return changed
