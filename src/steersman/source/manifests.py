"""From manifest files to objects: kinds, defaults, Lists, and many files together. Pure.

    file -> documents -> List items -> objects and Findings   (read_manifest)
    files -> one object for each kind and name                (combine_manifests)

There is no API server between a file and us. So this module fills in the API server's defaults if
their absence would change the meaning of an object; if it cannot, the object gets a Finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from steersman.model import codes
from steersman.model.addresses import canonical_ip, family_of
from steersman.model.findings import Finding, Severity
from steersman.model.kube import (
    KINDS,
    ClientIPConfig,
    EndpointSlice,
    KubeObject,
    Service,
    SessionAffinityConfig,
)
from steersman.model.names import ObjectName
from steersman.model.yaml_reader import Document
from steersman.source.documents import read_documents
from steersman.source.objects import decode_value

_API_VERSIONS = {
    "Service": ("v1",),
    "Node": ("v1",),
    "Endpoints": ("v1",),
    "EndpointSlice": ("discovery.k8s.io/v1",),
    "ServiceCIDR": ("networking.k8s.io/v1", "networking.k8s.io/v1beta1"),
}
_NAMESPACED = frozenset({"Service", "EndpointSlice", "Endpoints"})
_MAX_LIST_DEPTH = 9  # Lists in Lists
_AFFINITY_SECONDS = 10800  # the API server's default for ClientIP affinity


class Located(NamedTuple):
    """An object and its place."""

    kind: str
    obj: KubeObject
    where: str
    """`FILE line N`, for Findings."""


class Manifest(msgspec.Struct, frozen=True):
    """The content of one file."""

    objects: tuple[Located, ...] = ()
    findings: tuple[Finding, ...] = ()
    endpoints: tuple[tuple[ObjectName, str], ...] = ()
    """Names and places of `Endpoints` objects, which are not read."""


class CombinedManifests(NamedTuple):
    """The content of all files."""

    objects: dict[str, dict[ObjectName, KubeObject]]
    """By kind (each kind that is read has an entry), then by name."""
    findings: dict[str, tuple[Finding, ...]]
    """By file; files without Findings have no entry."""


def combine_manifests(files: Mapping[str, Manifest]) -> CombinedManifests:
    """Combine files; of objects with the same name the first one counts, by path, then by line."""
    objects: dict[str, dict[ObjectName, KubeObject]] = {kind: {} for kind in KINDS}
    places: dict[tuple[str, ObjectName], str] = {}
    findings = {path: list(files[path].findings) for path in sorted(files)}
    for path, found in findings.items():
        for kind, obj, where in files[path].objects:
            name = obj.metadata.object_name
            first = places.setdefault((kind, name), where)
            if first is where:
                objects[kind][name] = obj
            else:
                reason = f"is also in {first}, which counts: remove it from {where}"
                found.append(Finding(f"{kind} {name}", "", reason, code=codes.FILE))

    # Endpoints without EndpointSlices get a Finding.
    have_slices = {
        ObjectName(name.namespace, obj.metadata.labels.service_name or "")
        for name, obj in objects["EndpointSlice"].items()
        if obj.metadata.labels
    }
    for path, found in findings.items():
        for name, where in files[path].endpoints:
            if name not in have_slices:
                reason = f"Endpoints are not read: write an EndpointSlice instead ({where})"
                found.append(Finding(f"Endpoints {name}", "", reason, code=codes.ENDPOINTS_OBJECT))
    return CombinedManifests(
        objects, {path: tuple(each) for path, each in findings.items() if each}
    )


def read_manifest(path: str, data: bytes) -> Manifest:
    """Read one file: several documents, Lists of any kind, the output of `kubectl get -o yaml`.

    Kinds that we do not use are skipped. A malformed object becomes a Finding.

    Raises:
        BrokenFileError: it is not YAML or JSON.
    """
    objects: list[Located] = []
    findings: list[Finding] = []
    endpoints: list[tuple[ObjectName, str]] = []
    for document in read_documents(data, only_json=path.endswith(".json")):
        for value, line in _expand(document.value, document.line, document):
            where = f"{path} line {line}"
            match _read_object(value, where):
                case Finding() as finding:
                    findings.append(finding)
                case Located() as located:
                    objects.append(located)
                    findings.extend(_remarks(located))
                case ObjectName() as name:
                    endpoints.append((name, where))
    return Manifest(tuple(objects), tuple(findings), tuple(endpoints))


def _expand(
    value: Any, line: int, document: Document | None, depth: int = _MAX_LIST_DEPTH
) -> Iterator[tuple[Any, int]]:
    """Yield the objects of a document, those in Lists included, with their lines.

    Args:
        value: a document, or an item of a List in it.
        document: for the lines of its items; None if `value` is an item.
        depth: how many more Lists may be nested.
    """
    kind = value.get("kind") if isinstance(value, dict) else None
    if not (isinstance(kind, str) and kind.endswith("List")):
        yield value, line
        return
    if not depth:
        return
    items, item_kind = value.get("items"), kind.removesuffix("List")
    lines = document.item_lines if document is not None else ()
    for index, item in enumerate(items if isinstance(items, list) else ()):
        at = lines[index] if index < len(lines) else line
        given = item
        if isinstance(item, dict) and "kind" not in item and item_kind:
            # The API omits the kind of the items of a ServiceList.
            given = {"apiVersion": value.get("apiVersion"), **item, "kind": item_kind}
        yield from _expand(given, at, None, depth - 1)


def _read_object(value: Any, where: str) -> Located | ObjectName | Finding | None:
    """Return the object, the name of an Endpoints object, a Finding, or None to skip the value."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        reason = "is missing: this is not a Kubernetes object"
        return Finding(where, "kind", reason, Severity.ERROR, codes.FILE)

    # Skip kinds of other groups (Knative has a `Service`, too), report other versions of our group.
    version, wanted = value.get("apiVersion"), _API_VERSIONS.get(kind, ())
    if not wanted:
        return None
    if version is not None and version not in wanted:
        group, slash, _ = str(version).rpartition("/")
        if (group, slash) != wanted[0].rpartition("/")[:2]:
            return None
        reason = f"{version} is not read: use {wanted[0]}"
        return Finding(f"{kind} in {where}", "apiVersion", reason, Severity.ERROR, codes.FILE)

    # Like kubectl, put an object without a namespace into `default`.
    meta = value.get("metadata")
    if kind in _NAMESPACED and isinstance(meta, dict) and not meta.get("namespace"):
        meta = {**meta, "namespace": "default"}
        value = {**value, "metadata": meta}

    if kind == "Endpoints":  # empty ones are left from leader election
        if not isinstance(meta, dict) or not value.get("subsets"):
            return None
        return ObjectName(str(meta.get("namespace")), str(meta.get("name")))
    match decode_value(kind, value):
        case Finding() as finding:
            return msgspec.structs.replace(finding, reason=f"{finding.reason} ({where})")
        case obj:
            return Located(kind, _with_defaults(obj), where)


def _with_defaults(obj: KubeObject) -> KubeObject:
    """Fill in an API server's defaults, if their absence would change the meaning."""
    if isinstance(obj, EndpointSlice):
        if not obj.ports or all(p.name is not None and p.protocol is not None for p in obj.ports):
            return obj
        # A port without a name is not served (behaviour 4); the default is "".
        ports = [
            msgspec.structs.replace(port, name=port.name or "", protocol=port.protocol or "TCP")
            for port in obj.ports
        ]
        return msgspec.structs.replace(obj, ports=ports)
    if not isinstance(obj, Service):
        return obj
    spec = obj.spec
    changes: dict[str, Any] = {}
    if not spec.type:
        changes["type"] = "ClusterIP"
    if spec.cluster_ips and not spec.cluster_ip:
        changes["cluster_ip"] = spec.cluster_ips[0]
    if spec.cluster_ip and spec.ip_families and not spec.cluster_ips:
        changes["cluster_ips"] = [spec.cluster_ip]
    ips = [ip for text in spec.cluster_ips or () if (ip := canonical_ip(text))]
    if ips and not spec.ip_families:
        changes["ip_families"] = [family_of(ip).kubernetes for ip in ips]
    client_ip = spec.session_affinity_config and spec.session_affinity_config.client_ip
    if spec.session_affinity == "ClientIP" and not (client_ip and client_ip.timeout_seconds):
        config = SessionAffinityConfig(ClientIPConfig(_AFFINITY_SECONDS))
        changes["session_affinity_config"] = config
    if not changes:
        return obj
    return msgspec.structs.replace(obj, spec=msgspec.structs.replace(spec, **changes))


def _remarks(located: Located) -> Iterator[Finding]:
    """Yield Findings about an object that is well formed but has no effect."""
    obj = located.obj
    name = f"{located.kind} {obj.metadata.object_name}"
    if isinstance(obj, Service) and not obj.spec.cluster_ip and obj.spec.type != "ExternalName":
        reason = (
            "is missing and nothing assigns one to a manifest, so it is not served: write an "
            f"unused address of the Service range (or None for a headless one) ({located.where})"
        )
        yield Finding(name, "spec.clusterIP", reason, Severity.ERROR, codes.CLUSTER_IP)
    if isinstance(obj, Service) and obj.spec.type == "NodePort":
        ports = enumerate(obj.spec.ports or ())
        missing = [f"spec.ports[{index}].nodePort" for index, port in ports if not port.node_port]
        if missing:
            reason = "is missing and nothing assigns one to a manifest, so there is no node port:"
            reason += f" write an unused number of the range for node ports ({located.where})"
            yield Finding(name, missing[0], reason, Severity.ERROR, codes.SERVICE_FIELD)
    if isinstance(obj, EndpointSlice) and not (
        obj.metadata.labels and obj.metadata.labels.service_name
    ):
        reason = f"is missing: the slice belongs to no Service and is ignored ({located.where})"
        field = "metadata.labels[kubernetes.io/service-name]"
        yield Finding(name, field, reason, code=codes.SLICE_OF_NO_SERVICE)
