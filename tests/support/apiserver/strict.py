"""What a real API server (v1.36) checks of objects that are created in it, as far as we write them.

A field that it does not know is an error here, although it only warns: it would do nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from tests.support.apiserver.world import Object

DnsLabel: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)
]
ServiceName: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)
]
LabelKey: TypeAlias = Annotated[
    str,
    msgspec.Meta(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"),
]
LabelValue: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
]
Labels: TypeAlias = dict[LabelKey, LabelValue]
PortName: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)
]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Quantity: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^\d+(m|Ki|Mi|Gi)?$")]
Policy: TypeAlias = Literal["Cluster", "Local"]


class Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Has no other fields."""


class Meta(Strict):
    name: DnsLabel
    namespace: DnsLabel = ""
    labels: Labels = {}


class Namespace(Strict):
    api_version: Literal["v1"]
    kind: Literal["Namespace"]
    metadata: Meta
    spec: dict[str, str] = {}


class ServicePort(Strict):
    name: PortName  # required: there are several
    port: Port
    target_port: Port
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"


class ServiceSpec(Strict):
    selector: Labels
    ports: list[ServicePort]
    ip_family_policy: Literal["SingleStack", "PreferDualStack", "RequireDualStack"]
    type: Literal["ClusterIP", "NodePort"] = "ClusterIP"
    session_affinity: Literal["None", "ClientIP"] = "None"
    internal_traffic_policy: Policy = "Cluster"
    external_traffic_policy: Policy | None = None
    publish_not_ready_addresses: bool = False

    def __post_init__(self) -> None:
        names = [port.name for port in self.ports]
        numbers = [(port.port, port.protocol) for port in self.ports]
        if len({*names}) < len(names) or len({*numbers}) < len(numbers):
            raise ValueError("ports: Duplicate value")
        if self.external_traffic_policy and self.type == "ClusterIP":
            raise ValueError("externalTrafficPolicy: may only be set for externally-accessible")


class Service(Strict):
    class Metadata(Meta):
        name: ServiceName

    api_version: Literal["v1"]
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec


class Toleration(Strict):
    operator: Literal["Exists"]  # without a key, it has to be this: every taint


class Seccomp(Strict):
    type: Literal["RuntimeDefault", "Unconfined"]


class PodSecurity(Strict):
    run_as_non_root: Literal[True]
    run_as_user: Annotated[int, msgspec.Meta(ge=1)]
    seccomp_profile: Seccomp


class Capabilities(Strict):
    drop: list[Literal["ALL"]]


class ContainerSecurity(Strict):
    """What the level "restricted" of Pod Security asks for, beside PodSecurity."""

    allow_privilege_escalation: Literal[False]
    read_only_root_filesystem: bool
    capabilities: Capabilities


class Resources(Strict):
    requests: dict[Literal["cpu", "memory"], Quantity]
    limits: dict[Literal["cpu", "memory"], Quantity]


class Container(Strict):
    name: DnsLabel
    image: Annotated[str, msgspec.Meta(min_length=1, pattern=r"^\S+$")]
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"]
    command: list[str]
    security_context: ContainerSecurity
    resources: Resources


class PodSpec(Strict):
    node_name: str
    tolerations: list[Toleration]
    restart_policy: Literal["Always", "OnFailure", "Never"]
    active_deadline_seconds: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    termination_grace_period_seconds: Annotated[int, msgspec.Meta(ge=0)]
    automount_service_account_token: bool
    enable_service_links: bool
    security_context: PodSecurity
    containers: Annotated[list[Container], msgspec.Meta(min_length=1)]
    host_network: bool = False

    def __post_init__(self) -> None:
        names = [each.name for each in self.containers]
        if len({*names}) < len(names):
            raise ValueError("containers: Duplicate value")


class Pod(Strict):
    api_version: Literal["v1"]
    kind: Literal["Pod"]
    metadata: Meta
    spec: PodSpec


_SHAPES: dict[str, Any] = {"Namespace": Namespace, "Service": Service, "Pod": Pod}


def problem_of(made: Object) -> str:
    """Why a real API server refuses to create this object, naming the field; "" if it does not."""
    try:
        msgspec.convert(made, _SHAPES[made["kind"]])
    except msgspec.ValidationError as error:
        return f'{made["kind"]} "{made["metadata"]["name"]}" is invalid: {error}'
    return ""
