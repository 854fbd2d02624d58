"""From the documents of manifest files to objects, and from many files to one world. Pure.

Nothing assigns or defaults anything for these objects but this module: no API server stands
between the file and us. So it does what an API server would where its absence would change what
the object says, and tells by a Finding what it cannot do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from steersman.model.addresses import canonical_ip, family_of
from steersman.model.findings import Finding, Severity
from steersman.model.kube import (
    KINDS,
    ClientIPConfig,
    EndpointSlice,
    KubeObject,
    Service,
    SessionAffinityConfig,
    SlicePort,
)
from steersman.model.names import ObjectName
from steersman.model.yaml_bounds import Budget
from steersman.source.decode import decode_value
from steersman.source.documents import Document, read_documents

_API_VERSIONS = {
    "Service": ("v1",),
    "Node": ("v1",),
    "Endpoints": ("v1",),
    "EndpointSlice": ("discovery.k8s.io/v1",),
    "ServiceCIDR": ("networking.k8s.io/v1", "networking.k8s.io/v1beta1"),
}
_NAMESPACED = frozenset({"Service", "EndpointSlice", "Endpoints"})
_DEEPEST_LIST = 8  # Lists in Lists; an alias may even make a List hold itself
_AFFINITY_SECONDS = 10800  # the API server's default for ClientIP affinity


class Located(NamedTuple):
    """An object and where in its file it starts."""

    kind: str
    obj: KubeObject
    where: str
    """`FILE line N`, for Findings."""

    @property
    def line(self) -> int:
        """The line in its file."""
        return int(self.where.rpartition(" ")[2])


class Manifest(msgspec.Struct, frozen=True):
    """What one file holds."""

    objects: tuple[Located, ...] = ()
    findings: tuple[Finding, ...] = ()
    endpoints: tuple[tuple[ObjectName, str], ...] = ()
    """Names of `Endpoints` objects, which are not read, and where they are."""


class World(NamedTuple):
    """What all files hold together."""

    objects: dict[str, dict[ObjectName, KubeObject]]
    """By kind (every kind that is read has an entry), then by name."""
    findings: dict[str, tuple[Finding, ...]]
    """By file; files without Findings have none."""


def read_manifest(path: str, data: bytes, first: int = 1, bounds: Budget | None = None) -> Manifest:
    """Read one file: several documents, Lists of any kind, what `kubectl get -o yaml` prints.

    Kinds that are not ours are passed over. A malformed object is a Finding, the others count.
    Where `data` is a piece of a file, `first` is the line at which it starts, for Findings, and
    `bounds` is what is left for the whole file.

    Raises:
        BrokenFileError: it is not YAML or JSON.
    """
    objects: list[Located] = []
    findings: list[Finding] = []
    endpoints: list[tuple[ObjectName, str]] = []
    for document in read_documents(data, only_json=path.endswith(".json"), bounds=bounds):
        for value, line in _expand(document):
            where = f"{path} line {line + first - 1}"
            match _read_object(value, where):
                case Finding() as finding:
                    findings.append(finding)
                case Located() as located:
                    objects.append(located)
                    findings.extend(_remarks(located))
                case ObjectName() as name:
                    endpoints.append((name, where))
    return Manifest(tuple(objects), tuple(findings), tuple(endpoints))


def combine(files: Mapping[str, Manifest]) -> World:
    """Unite files. Of an object that is there twice the first counts, by path, then by place."""
    objects: dict[str, dict[ObjectName, KubeObject]] = {kind: {} for kind in KINDS}
    places: dict[tuple[str, ObjectName], str] = {}
    findings = {path: list(files[path].findings) for path in sorted(files)}
    for path, said in findings.items():
        for kind, obj, where in files[path].objects:
            name = obj.metadata.object_name
            first = places.setdefault((kind, name), where)
            if first is where:
                objects[kind][name] = obj
            else:
                said.append(_duplicate(f"{kind} {name}", first, where))
    served = _services_with_slices(objects["EndpointSlice"])
    for path, said in findings.items():
        said.extend(
            _not_slices(name, where) for name, where in files[path].endpoints if name not in served
        )
    return World(objects, {path: tuple(said) for path, said in findings.items() if said})


def _expand(document: Document) -> Iterator[tuple[Any, int]]:
    """Yield the objects of a document, those in Lists included, with their lines."""
    value, line, item_lines = document
    items = _items(value)
    if items is None:
        yield value, line
        return
    for index, item in enumerate(items):
        at = item_lines[index] if index < len(item_lines) else line
        yield from _flatten(_inherit(item, value), at, _DEEPEST_LIST)


def _flatten(value: Any, line: int, depth: int) -> Iterator[tuple[Any, int]]:
    items = _items(value)
    if items is None:
        yield value, line
    elif depth:
        for item in items:
            yield from _flatten(_inherit(item, value), line, depth - 1)


def _items(value: Any) -> Sequence[Any] | None:
    """The items of a List (`items: null` is an empty one), or None where it is not a List."""
    if not isinstance(value, dict):
        return None
    kind = value.get("kind")
    if not (isinstance(kind, str) and kind.endswith("List")):
        return None
    items = value.get("items")
    return items if isinstance(items, list) else []


def _inherit(item: Any, parent: dict[str, Any]) -> Any:
    """Give an item of a `ServiceList` its kind: the API leaves it out there."""
    kind = parent["kind"].removesuffix("List")
    if isinstance(item, dict) and "kind" not in item and kind:
        return {"apiVersion": parent.get("apiVersion"), **item, "kind": kind}
    return item


def _read_object(value: Any, where: str) -> Located | ObjectName | Finding | None:
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return _error(where, "kind", "is missing: this is not a Kubernetes object")
    if not _is_ours(kind, value.get("apiVersion")):
        return _old_version(kind, value, where)
    placed = _with_namespace(kind, value)
    if kind == "Endpoints":
        return _endpoints_name(placed)
    match decode_value(kind, placed):
        case Finding() as finding:
            return msgspec.structs.replace(finding, reason=f"{finding.reason} ({where})")
        case obj:
            return Located(kind, _defaulted(obj), where)


def _is_ours(kind: str, version: Any) -> bool:
    """Whether it is of a group that is read (Knative has a `Service`, too); none is as ours."""
    versions = _API_VERSIONS.get(kind, ())
    return bool(versions) and (version is None or version in versions)


def _old_version(kind: str, value: dict[str, Any], where: str) -> Finding | None:
    """A Finding for another version of our API group; None for what is not ours at all."""
    version = value.get("apiVersion")
    wanted = _API_VERSIONS.get(kind, ("",))[0]
    group, slash, _ = str(version).rpartition("/")
    if not wanted or (group, slash) != wanted.rpartition("/")[:2]:
        return None
    return _error(f"{kind} in {where}", "apiVersion", f"{version} is not read: use {wanted}")


def _with_namespace(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    """Put an object without a namespace into `default`, as kubectl does."""
    meta = value.get("metadata")
    if kind not in _NAMESPACED or not isinstance(meta, dict) or meta.get("namespace"):
        return value
    return {**value, "metadata": {**meta, "namespace": "default"}}


def _endpoints_name(value: dict[str, Any]) -> ObjectName | None:
    """Name of an Endpoints object that has endpoints (leader election used empty ones)."""
    meta = value.get("metadata")
    if not isinstance(meta, dict) or not value.get("subsets"):
        return None
    return ObjectName(str(meta.get("namespace")), str(meta.get("name")))


def _defaulted(obj: KubeObject) -> KubeObject:
    """Fill in what an API server would, where its absence would mean something else."""
    match obj:
        case Service():
            return _defaulted_service(obj)
        case EndpointSlice(ports=ports) if ports:
            return msgspec.structs.replace(obj, ports=[_defaulted_port(port) for port in ports])
        case _:
            return obj


def _defaulted_service(service: Service) -> Service:
    spec = service.spec
    changes: dict[str, Any] = {}
    if spec.cluster_ips and not spec.cluster_ip:
        changes["cluster_ip"] = spec.cluster_ips[0]
    ips = [ip for text in spec.cluster_ips or () if (ip := canonical_ip(text))]
    if ips and not spec.ip_families:
        changes["ip_families"] = [family_of(ip).kubernetes for ip in ips]
    if spec.session_affinity == "ClientIP" and not _affinity_seconds(spec.session_affinity_config):
        config = SessionAffinityConfig(ClientIPConfig(_AFFINITY_SECONDS))
        changes["session_affinity_config"] = config
    if not changes:
        return service
    return msgspec.structs.replace(service, spec=msgspec.structs.replace(spec, **changes))


def _affinity_seconds(config: SessionAffinityConfig | None) -> int | None:
    return config.client_ip.timeout_seconds if config and config.client_ip else None


def _defaulted_port(port: SlicePort) -> SlicePort:
    """An unnamed port is called "" and is TCP; null would mean not served (behaviour 4)."""
    if port.name is not None and port.protocol is not None:
        return port
    return msgspec.structs.replace(port, name=port.name or "", protocol=port.protocol or "TCP")


def _remarks(located: Located) -> Iterator[Finding]:
    """Yield what is worth saying about an object that was read."""
    obj = located.obj
    what = f"{located.kind} {obj.metadata.object_name}"
    if isinstance(obj, Service) and not obj.spec.cluster_ip and obj.spec.type != "ExternalName":
        reason = (
            "is missing and nothing assigns one to a manifest, so it is not served: write an "
            f"unused address of the Service range (or None for a headless one) ({located.where})"
        )
        yield _error(what, "spec.clusterIP", reason)
    if isinstance(obj, EndpointSlice) and not (
        obj.metadata.labels and obj.metadata.labels.service_name
    ):
        reason = f"is missing: the slice belongs to no Service and is ignored ({located.where})"
        yield Finding(what, "metadata.labels[kubernetes.io/service-name]", reason)


def _duplicate(what: str, first: str, second: str) -> Finding:
    return Finding(what, "", f"is also in {first}, which counts: remove it from {second}")


def _services_with_slices(slices: Mapping[ObjectName, KubeObject]) -> set[ObjectName]:
    return {
        ObjectName(name.namespace, obj.metadata.labels.service_name or "")
        for name, obj in slices.items()
        if obj.metadata.labels
    }


def _not_slices(name: ObjectName, where: str) -> Finding:
    reason = f"Endpoints are not read: give its endpoints as an EndpointSlice ({where})"
    return Finding(f"Endpoints {name}", "", reason)


def _error(what: str, field: str, reason: str) -> Finding:
    return Finding(what, field, reason, Severity.ERROR)
