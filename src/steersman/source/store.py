"""The Store: the present cluster and machine, and a log of the names that changed.

An update counts as a change only if it differs in the fields that plans depend on (`sync_fields`).
Nothing is decided here. All calls come from the event loop, so there are no locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from sys import intern
from typing import NamedTuple

import msgspec

from steersman.model.addresses import canonical_cidr
from steersman.model.change_log import ChangeLog
from steersman.model.failover import Ejection
from steersman.model.findings import Finding, safe
from steersman.model.inputs import HostFacts, Snapshot
from steersman.model.kube import (
    Annotations,
    EndpointSlice,
    KubeObject,
    Node,
    Service,
    ServiceCIDR,
)
from steersman.model.names import ObjectName
from steersman.source.last_node import LastNode
from steersman.source.packed import PackedSlices
from steersman.source.trimmed import trimmed_node, trimmed_service, trimmed_unserved

_MOST_TRIGGERS = 16
"""Trigger times kept for a Service between two syncs; more add nothing to the latency metric."""


class Change(NamedTuple):
    """A name in the log of the Store: something changed that plans depend on."""

    kind: str
    """Kind of the object; of an EndpointSlice and of ejected endpoints, `name` is the Service."""
    name: ObjectName

    @property
    def of_service(self) -> bool:
        """Whether it is about a Service."""
        return self.kind in KINDS_OF_SERVICE


EJECTIONS = "failover"
"""Kind of a change of a Service's ejected endpoints."""
CONFIGURATION = Change("configuration", ObjectName("", ""))
_LISTS = Change("the first lists", ObjectName("", ""))
_FACTS = Change("machine", ObjectName("", ""))
KINDS_OF_SERVICE = frozenset({"Service", "EndpointSlice", EJECTIONS})
_COUNTED = frozenset({"Service", "EndpointSlice"})


class Arrivals(msgspec.Struct, frozen=True):
    """When changes came that are in force now."""

    received: float | None = None
    """When the first of them was received, by the clock of the Store; None if it has none."""
    trigger_times: tuple[str, ...] = ()
    """Trigger-time annotations of the slice updates that were changes."""


class _Arrival(msgspec.Struct, frozen=True, gc=False):  # a NamedTuple takes three times as long
    revision: int
    received: float | None
    trigger_time: str


_NO_ANNOTATIONS = Annotations()


def service_sync_fields(service: Service) -> object:
    """Return the fields of a Service that plans depend on; None if we do not serve it.

    See behaviour 2 and 3.
    """
    if not service.is_served:
        return None
    spec = service.spec
    annotations = service.metadata.annotations
    if annotations == _NO_ANNOTATIONS:  # the Service has some, but none that is read
        annotations = None
    if spec.selector is not None or spec.external_name is not None:  # for answers to people
        spec = msgspec.structs.replace(spec, selector=None, external_name=None)
    return spec, service.ingress, service.metadata.creation_timestamp, annotations


def _node_sync_fields(node: Node | None) -> object:
    if node is None:
        return None
    return node.metadata.name, node.zone, node.spec.pod_cidr, node.spec.pod_cidrs, node.addresses


class Store:
    """Holds objects, and touches the names of those that change.

    Sources feed it: their calls are cheap, and never fail.
    """

    def __init__(
        self,
        node_name: str = "",
        on_change: Callable[[], None] = lambda: None,
        sync_fields: Callable[[Service], object] = service_sync_fields,
        on_report: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float | None] = lambda: None,
        facts: HostFacts = HostFacts(),  # noqa: B008 - immutable
    ) -> None:
        """Make an empty Store.

        Args:
            node_name: the Node of this name is this node; others are ignored.
            sync_fields: returns the part of a Service to compare (falsy: not served).
            on_report: called after each report that changed the Findings.
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
        self._look()
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._malformed: set[str] = set()  # objects that could not be read, by scope
        self._listed: set[str] = set()  # kinds with a complete initial list
        self.synced = False
        """Whether the initial lists of Services and EndpointSlices are complete (behaviour 2)."""
        self._arrivals: dict[ObjectName, list[_Arrival]] = {}
        """Of changes that are not in force yet."""
        self.log: ChangeLog[Change] = ChangeLog()
        """What changed, for everybody who follows it."""
        self.log.touch(_FACTS)  # an empty cluster is a plan, too
        self.facts = facts
        """This machine, as of the last `use_facts`."""
        self.seen: Counter[str] = Counter()
        """Changes so far, by kind."""

    def listen(self, on_change: Callable[[], None], on_report: Callable[[], None]) -> None:
        """Call these from now on; see the constructor."""
        self._on_change, self._on_report = on_change, on_report

    @property
    def detailed_snapshot(self) -> Snapshot:
        """Like `snapshot`, with the slices as of now and their targetRefs: to answer people."""
        return msgspec.structs.replace(self.snapshot, slices=self._slices.with_targets())

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

    def _look(self) -> None:
        """Replace `snapshot`: all of it is live but the node and the ServiceCIDRs."""
        # Malformed CIDRs are skipped; those of several ServiceCIDRs may be the same.
        cidrs = {
            canonical
            for cidr in self._cidrs.values()
            for text in cidr.spec.cidrs or ()
            if (canonical := canonical_cidr(text))
        }
        node = self.own_node.node
        self.snapshot = Snapshot(
            self._services, self._slices, node, tuple(sorted(cidrs)), self._ejected
        )
        """A live, read-only view of all objects, without the pods behind endpoints."""

    @property
    def slices(self) -> int:
        """Number of EndpointSlices."""
        return self._slices.count

    def packed_slices(self, services: Iterable[ObjectName] | None = None) -> list[bytes]:
        """Return all EndpointSlices, or those of some Services; `packed.unpacked` reads each."""
        return self._slices.packed(services)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The Findings that sources reported, ordered by scope."""
        return tuple(f for scope in sorted(self._findings) for f in self._findings[scope])

    def take_arrivals(self, revision: int) -> Arrivals:
        """Return when the changes up to a revision of the log came, and forget it."""
        received, times = None, list[str]()
        for name, arrivals in [*self._arrivals.items()]:
            later = [arrival for arrival in arrivals if arrival.revision > revision]
            for arrival in arrivals[: len(arrivals) - len(later)]:
                if received is None or (arrival.received or received) < received:
                    received = arrival.received
                if arrival.trigger_time:
                    times.append(arrival.trigger_time)
            if later:
                self._arrivals[name] = later
            else:
                del self._arrivals[name]
        return Arrivals(received, tuple(times))

    def use_facts(self, facts: HostFacts) -> bool:
        """Use new facts of this machine; return whether they differ (then a run is due)."""
        changed, self.facts = facts != self.facts, facts
        if changed:
            self.log.touch(_FACTS)
        return changed

    def eject(self, service: ObjectName, ejections: tuple[Ejection, ...]) -> None:
        """Take endpoints of a Service out; the ejections replace those of the last call."""
        before = self._ejected.pop(service, ())
        if ejections:
            self._ejected[service] = ejections
        if {each.backend for each in before} != {each.backend for each in ejections}:
            self._touch(Change(EJECTIONS, service))
            self._on_change()

    # What sources call

    def retain(self, kind: str, names: Container[ObjectName], keep: Container[str] = ()) -> None:
        """End a complete list of a kind, after `upsert` of each of its objects.

        Objects of other names are removed, except for those with a scope (`Service shop/cart`) in
        `keep`: they cannot be read now, so their last good version stays. The first call for a kind
        completes its initial list, see `synced`.
        """
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
        changed = kind not in self._listed  # an empty initial list is a change, too
        for name in [name for name in known if name not in names]:
            if f"{kind} {name}" not in keep:
                changed |= self._remove(kind, name)
        self._listed.add(kind)
        self.synced = self._listed >= {"Service", "EndpointSlice"}
        self._notify(changed)
        for scope in tuple(self._malformed):
            if scope.partition(" ")[0] == kind and scope not in keep:
                self._resolve(scope)

    def reject(self, finding: Finding) -> None:
        """Report that an object cannot be read: its last good version stays."""
        self._malformed.add(finding.object)
        self.report(finding.object, (finding,))

    def upsert(self, obj: KubeObject) -> bool:
        """Add or replace an object; return the `changed` flag of behaviour 3 and 4."""
        if self._malformed:
            self._resolve(f"{type(obj).__name__} {obj.metadata.object_name}")
        return self._notify(self._put(obj))

    def delete(self, kind: str, name: ObjectName) -> bool:
        """Remove an object; return the `changed` flag of behaviour 3 and 4."""
        self._resolve(f"{kind} {name}")
        return self._notify(self._remove(kind, name))

    def report(self, scope: str, findings: Sequence[Finding]) -> None:
        """Replace the Findings of a scope; their text may come from anywhere, like file names."""
        before, now = self._findings.pop(scope, ()), tuple(map(safe, findings))
        if now:
            self._findings[scope] = now
        if before != now:
            self._on_report()

    def _resolve(self, scope: str) -> None:
        """Withdraw the Finding about an object that could not be read."""
        if scope in self._malformed:
            self._malformed.remove(scope)
            self.report(scope, ())

    def _notify(self, changed: bool) -> bool:
        if changed:
            self._on_change()
        return changed

    def _touch(self, change: Change, trigger_time: str = "") -> None:
        """Record a change, of a slice with its annotation."""
        if change.kind in _COUNTED:
            self.seen[change.kind] += 1
        if not self.synced:  # the first lists are one change: nobody can have planned before
            self.log.touch(_LISTS)
            return
        self.log.touch(change)
        arrivals = self._arrivals.setdefault(change.name, [])
        if len(arrivals) < _MOST_TRIGGERS:
            arrivals.append(_Arrival(self.log.revision, self._clock(), trigger_time))

    # By kind; each method returns the `changed` flag

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
        if was != now:
            self._touch(Change("Service", name))
        if service is None or now is None:
            self._services.pop(name, None)
        else:
            self._services[name] = trimmed_service(service)
        if service is None or now is not None:
            self._unserved.pop(name, None)
        else:
            self._unserved[name] = trimmed_unserved(service)
        return was != now

    def _put_slice(self, slice_: EndpointSlice) -> bool:
        # Slices without a Service, without a name or of a headless Service are ignored
        # (behaviour 2, 4), so a slice that becomes one of these is removed.
        meta, labels = slice_.metadata, slice_.metadata.labels
        owner, moved = None, False
        if (
            labels
            and labels.service_name
            and labels.headless is None
            and meta.name
            and meta.namespace
        ):
            owner = ObjectName(intern(meta.namespace), labels.service_name)
        before = self._slices.owner(meta.object_name)
        if owner == before:
            owner = before  # made of strings that are kept anyway
        else:
            # A slice can move to another Service: both have changed.
            moved = before is not None and self._remove_slice(meta.object_name)
            if owner is not None and (service := self._services.get(owner)):
                owner = service.metadata.object_name
        if owner is None or not self._slices.put(owner, slice_):
            return moved
        annotations = meta.annotations  # for the metric network_programming_duration_seconds
        trigger_time = (annotations.trigger_time if annotations is not None else None) or ""
        self._touch(Change("EndpointSlice", owner), trigger_time)
        return True

    def _remove_slice(self, name: ObjectName) -> bool:
        owner = self._slices.remove(name)
        if owner is None:
            return False
        if arrivals := self._arrivals.get(owner):  # as upstream: nothing measures a removal
            self._arrivals[owner] = [
                _Arrival(each.revision, each.received, "") for each in arrivals
            ]
        self._touch(Change("EndpointSlice", owner))
        return True

    def _put_node(self, node: Node | None) -> bool:
        own = self.own_node
        before, state = own.node, (own.deleted, own.kept)
        own.update(node)
        self._look()
        changed = _node_sync_fields(before) != _node_sync_fields(own.node)
        if changed and own.node is not None:
            self._touch(Change("Node", own.node.metadata.object_name))
        return changed or state != (own.deleted, own.kept)

    def _put_cidr(self, name: ObjectName, obj: ServiceCIDR | None) -> bool:
        old = self._cidrs.pop(name, None)
        if obj is not None:
            self._cidrs[name] = obj
        changed = (old.spec if old else None) != (obj.spec if obj else None)
        if changed:
            self._look()
            self._touch(Change("ServiceCIDR", name))
        return changed
