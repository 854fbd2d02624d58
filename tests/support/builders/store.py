"""Services, slices and a Store that is fed with them."""

from __future__ import annotations

from typing import Any

from steersman.model.findings import Finding
from steersman.model.kube import KubeObject
from steersman.source.decode import decode_value


def make(kind: str, value: dict[str, Any]) -> KubeObject:
    obj = decode_value(kind, value)
    assert not isinstance(obj, Finding), obj
    return obj


def service(name: str = "web", labels: dict[str, str] | None = None, **spec: Any) -> KubeObject:
    meta = {"namespace": "shop", "name": name, "labels": labels or {}}
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}], **spec}
    return make("Service", {"metadata": meta, "spec": spec})


def slice_(
    name: str = "web-1",
    service_name: str | None = "web",
    ips: tuple[str, ...] = ("10.1.0.1",),
    protocol: str = "TCP",
    trigger: str | None = None,
    headless: bool = False,
) -> KubeObject:
    labels = {"kubernetes.io/service-name": service_name} if service_name else {}
    if headless:
        labels["service.kubernetes.io/headless"] = ""
    notes = {"endpoints.kubernetes.io/last-change-trigger-time": trigger} if trigger else {}
    meta = {"namespace": "shop", "name": name, "labels": labels, "annotations": notes}
    return make(
        "EndpointSlice",
        {
            "metadata": meta,
            "addressType": "IPv4",
            "ports": [{"name": "", "port": 8080, "protocol": protocol}],
            "endpoints": [{"addresses": [ip]} for ip in ips],
        },
    )
