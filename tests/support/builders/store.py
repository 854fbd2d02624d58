"""Services, slices and a Store that is fed with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from steersman.model.findings import Finding
from steersman.model.kube import KubeObject
from steersman.source.objects import decode_value
from steersman.source.store import Store
from tests.support.builders import kube


def make(kind: str, value: dict[str, Any]) -> KubeObject:
    obj = decode_value(kind, value)
    assert not isinstance(obj, Finding), obj
    return obj


def service(name: str = "web", labels: dict[str, str] | None = None, **spec: Any) -> KubeObject:
    value = kube.service(
        name, metadata={"labels": labels or {}}, **{"ports": [{"port": 80}], **spec}
    )
    return make("Service", value)


def slice_(
    name: str = "web-1",
    service_name: str | None = "web",
    ips: tuple[str, ...] = ("10.1.0.1",),
    protocol: str = "TCP",
    trigger: str | None = None,
    headless: bool = False,
) -> KubeObject:
    notes = {"endpoints.kubernetes.io/last-change-trigger-time": trigger} if trigger else {}
    value = kube.endpoint_slice(
        name,
        service_name,
        *ips,
        ports=[{"name": "", "port": 8080, "protocol": protocol}],
        labels={"service.kubernetes.io/headless": ""} if headless else {},
        annotations=notes,
    )
    return make("EndpointSlice", value)


def replace_objects(store: Store, kind: str, objects: Iterable[KubeObject]) -> None:
    """Feed a complete list of a kind."""
    listed = {each.metadata.object_name: each for each in objects}
    for each in listed.values():
        store.upsert(each)
    store.retain(kind, listed)
