"""The Store holds the cluster's objects as last seen and knows what changed since the last sync.

It compares; it does not decide. Everything runs on the event loop, so nothing here locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from sys import intern
from typing import Any

import msgspec

from steersman.model.addresses import canonical_cidr
from steersman.model.findings import Finding
from steersman.model.inputs import Snapshot
from steersman.model.kube import Annotations, EndpointSlice, KubeObject, Node, Service, ServiceCIDR
from steersman.model.names import ObjectName
from steersman.source.last_node import LastNode
from steersman.source.lean import lean_service
from steersman.source.slices import Slices

MOST_TRIGGERS = 16
"""Trigger times kept for a Service between two syncs; more say nothing new about the delay."""


class Changes(msgspec.Struct, frozen=True):
    """What changed between two syncs."""

    services: frozenset[ObjectName] = frozenset()
    """Services of which the Service itself or one of its slices changed."""
    service_objects: frozenset[ObjectName] = frozenset()
    """Those of which the Service itself changed (and stayed changed, behaviour 3)."""
    endpoints: frozenset[ObjectName] = frozenset()
    """Those of which an EndpointSlice changed (behaviour 4)."""
    node: bool = False
    """This node's object or the ServiceCIDRs changed in a way that matters."""
    udp: bool = False
    """A changed Service had or has a UDP port: conntrack is to be looked at (behaviour 4, 12)."""
    trigger_times: Mapping[ObjectName, tuple[str, ...]] = {}
    """Trigger-time annotations of the slice updates that changed something, by Service."""

    def __bool__(self) -> bool:
        return bool(self.services or self.node)


_NO_NOTES = Annotations()


def service_essence(service: Service) -> object:
    """What of a Service makes a difference; None where it is not ours to serve (behaviour 2, 3)."""
    spec = service.spec
    labels = service.metadata.labels
    if labels is not None and labels.proxy_name is not None:
        return None
    if not spec.cluster_ip or spec.cluster_ip == "None" or spec.type == "ExternalName":
        return None
    lb = service.status.load_balancer if service.status else None
    ingress = (lb.ingress if lb else None) or None
    notes = service.metadata.annotations
    if notes == _NO_NOTES:  # there are some, but none that is read
        notes = None
    return spec, ingress, service.metadata.creation_timestamp, notes


def _slice_owner(slice_: EndpointSlice) -> ObjectName | None:
    """The Service of a slice; None where the slice is to be ignored (behaviour 2, 4)."""
    labels = slice_.metadata.labels
    meta = slice_.metadata
    if labels is None or not labels.service_name or labels.headless is not None:
        return None
    if not meta.name or not meta.namespace:
        return None
    return ObjectName(intern(meta.namespace), labels.service_name)


def _node_essence(node: Node | None) -> object:
    if node is None:
        return None
    zone = node.metadata.labels.zone if node.metadata.labels else None
    addresses = node.status.addresses if node.status else None
    return node.metadata.name, zone, node.spec.pod_cidr, node.spec.pod_cidrs, addresses


class Store:
    """Holds objects; tells what changed. Implements `source.base.Sink`."""

    def __init__(
        self,
        node_name: str = "",
        on_change: Callable[[], None] = lambda: None,
        essence: Callable[[Service], object] = service_essence,
        on_report: Callable[[], None] = lambda: None,
    ) -> None:
        """Make an empty Store.

        Args:
            node_name: the Node of this name is this node; others are ignored.
            on_change: called after each call that left something to be synced.
            essence: what of a Service makes a difference (falsy: not served).
            on_report: called after each report that left other Findings.
        """
        self._node_name = node_name
        self._on_change = on_change
        self._on_report = on_report
        self._essence = essence
        self._services: dict[ObjectName, Service] = {}
        self._slices = Slices()
        self._cidrs: dict[ObjectName, ServiceCIDR] = {}
        self.own_node = LastNode()
        """This node's object, and what of it is kept although the API server lost it."""
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._synced: set[str] = set()
        self._before: dict[ObjectName, object] = {}  # essence at the last take, where it differs
        self._endpoints: set[ObjectName] = set()
        self._udp: set[ObjectName] = set()
        self._triggers: dict[ObjectName, list[str]] = {}
        self._node_changed = False
        self.seen: Counter[str] = Counter()
        """Changes seen so far that made a difference, by kind."""

    # What is known

    @property
    def snapshot(self) -> Snapshot:
        """A live, read-only view of everything."""
        cidrs = {
            canonical
            for cidr in self._cidrs.values()
            for text in cidr.spec.cidrs or ()
            if (canonical := canonical_cidr(text))
        }
        return Snapshot(self._services, self._slices, self.own_node.node, tuple(sorted(cidrs)))

    @property
    def slices(self) -> int:
        """How many EndpointSlices there are."""
        return len(self._slices.names)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What sources reported, in order of scope."""
        return tuple(f for scope in sorted(self._findings) for f in self._findings[scope])

    @property
    def synced(self) -> bool:
        """Whether the initial lists of Services and of EndpointSlices are in (behaviour 2)."""
        return {"Service", "EndpointSlice"} <= self._synced

    def take(self) -> Changes:
        """Return what changed since the last call, and start afresh."""
        services = frozenset(self._before)
        endpoints = frozenset(self._endpoints)
        changes = Changes(
            services=services | endpoints,
            service_objects=services,
            endpoints=endpoints,
            node=self._node_changed,
            udp=any(name in self._udp or self._slices.has_udp(name) for name in endpoints),
            trigger_times={name: tuple(times) for name, times in self._triggers.items()},
        )
        self._before = {}
        self._endpoints = set()
        self._udp = set()
        self._triggers = {}
        self._node_changed = False
        return changes

    # Sink

    def replace(self, kind: str, objects: Iterable[KubeObject], keep: Container[str] = ()) -> None:
        """Take the complete list of a kind at once; see `retain`."""
        listed: set[ObjectName] = set()
        changed = False
        for obj in objects:
            listed.add(obj.metadata.object_name)
            changed |= self._put(obj)
        self._told(self._retain(kind, listed, keep) or changed)

    def retain(self, kind: str, names: Container[ObjectName], keep: Container[str] = ()) -> None:
        """Drop objects of a kind with other names, except where the scope is in `keep`.

        The first call for a kind says that its initial list is in.
        """
        self._told(self._retain(kind, names, keep))

    def _retain(self, kind: str, names: Container[ObjectName], keep: Container[str]) -> bool:
        changed = kind not in self._synced
        for name in [name for name in self._names(kind) if name not in names]:
            if f"{kind} {name}" not in keep:
                changed |= self._remove(kind, name)
        self._synced.add(kind)
        return changed

    def upsert(self, obj: KubeObject) -> bool:
        """Take one object; return the `changed` flag of behaviour 3 and 4."""
        return self._told(self._put(obj))

    def delete(self, kind: str, name: ObjectName) -> bool:
        """Drop one object; return the `changed` flag of behaviour 3 and 4."""
        return self._told(self._remove(kind, name))

    def report(self, scope: str, findings: Sequence[Finding]) -> None:
        """Replace the Findings of a scope."""
        before = self._findings.pop(scope, ())
        if findings:
            self._findings[scope] = tuple(findings)
        if before != tuple(findings):
            self._on_report()

    # How

    def _told(self, changed: bool) -> bool:
        if changed:
            self._on_change()
        return changed

    def _names(self, kind: str) -> Iterable[ObjectName]:
        known: Mapping[ObjectName, Any]
        match kind:
            case "Service":
                known = self._services
            case "EndpointSlice":
                known = self._slices.names
            case "ServiceCIDR":
                known = self._cidrs
            case _:
                node = self.own_node.node
                return [node.metadata.object_name] if node else []
        return known

    def _put(self, obj: KubeObject) -> bool:
        match obj:
            case Service():
                return self._put_service(obj.metadata.object_name, obj)
            case EndpointSlice():
                return self._put_slice(obj.metadata.object_name, obj)
            case Node():
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
                return name.name == self._node_name and self._put_node(None)
            case _:
                return self._put_cidr(name, None)

    def _put_service(self, name: ObjectName, service: Service | None) -> bool:
        old = self._services.get(name)
        was = (self._essence(old) if old else None) or None
        now = (self._essence(service) if service else None) or None
        self.seen["Service"] += was != now
        before = self._before.setdefault(name, was)
        if before == now:
            del self._before[name]
        if service is None or now is None:
            self._services.pop(name, None)
        else:
            self._services[name] = lean_service(service)
        return bool(self._before)

    def _put_slice(self, name: ObjectName, slice_: EndpointSlice) -> bool:
        owner = _slice_owner(slice_)
        moved = not self._slices.belongs(name, owner) and self._remove_slice(name)
        if owner is None:
            return moved
        had_udp = self._slices.has_udp(owner)
        if not self._slices.put(name, owner, slice_):
            return moved
        self._touch(owner, had_udp=had_udp)
        notes = slice_.metadata.annotations
        if notes is not None and notes.trigger_time:
            times = self._triggers.setdefault(owner, [])
            if len(times) < MOST_TRIGGERS:
                times.append(notes.trigger_time)
        return True

    def _remove_slice(self, name: ObjectName) -> bool:
        owner = self._slices.owner(name)
        if owner is None:
            return False
        self._touch(owner, had_udp=self._slices.has_udp(owner))
        self._slices.remove(name, owner)
        self._triggers.pop(owner, None)
        return True

    def _touch(self, owner: ObjectName, *, had_udp: bool) -> None:
        self._endpoints.add(owner)
        self.seen["EndpointSlice"] += 1
        if had_udp:  # what there is now, `take` looks at
            self._udp.add(owner)

    def _put_node(self, node: Node | None) -> bool:
        own = self.own_node
        before, said = own.node, (own.deleted, own.kept)
        own.update(node)
        changed = _node_essence(before) != _node_essence(own.node)
        self._node_changed |= changed
        return changed or said != (own.deleted, own.kept)

    def _put_cidr(self, name: ObjectName, obj: ServiceCIDR | None) -> bool:
        old = self._cidrs.pop(name, None)
        if obj is not None:
            self._cidrs[name] = obj
        changed = (old.spec if old else None) != (obj.spec if obj else None)
        self._node_changed |= changed
        return changed
