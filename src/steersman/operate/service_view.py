"""The page of one Service: where it is served, by which endpoints, and a packet's way there. Pure.

Everything is seen by one node, whose World it is. What only the kernel knows (`dump`, `doctor`,
`trace`) is asked for apart, when an operator wants it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steersman.model.addresses import family_of, join_host_port
from steersman.model.kube import Service
from steersman.model.names import ObjectName
from steersman.model.plan import FrontendKind
from steersman.model.world import World
from steersman.operate.answer import QuestionError, View
from steersman.operate.explain_flow import ExplainedFlow, FlowExplainer
from steersman.operate.explain_service import ServiceAnswer, explain_service
from steersman.operate.names import Names
from steersman.operate.picture import Picture, picture_of

MOST_CHOICES = 100
"""Addresses of a Service among which one is selected; it has as many ports as it likes."""
_AFFINITY_SECONDS = 10_800  # the API server's default
_KINDS = {
    FrontendKind.CLUSTER_IP: "clusterIP",
    FrontendKind.EXTERNAL_IP: "external IP",
    FrontendKind.LOAD_BALANCER_IP: "load balancer IP",
    FrontendKind.NODE_PORT: "node port",
}
_POLICIES = {
    "Cluster": "to endpoints of every node",
    "Local": "only to endpoints of the node that the packets arrive at; without one it drops them",
}


class Setting(msgspec.Struct, frozen=True, rename="camel"):
    """A field of the Service that decides where traffic goes."""

    name: str
    value: str
    meaning: str


class Choice(msgspec.Struct, frozen=True, rename="camel"):
    """A destination that a client may connect to."""

    to: str
    """As it is typed: `10.96.0.10:80/TCP`."""
    label: str
    selected: bool = False


class Differing(msgspec.Struct, frozen=True, rename="camel"):
    """A node that does not serve the Service as most do."""

    node: str
    reason: str = ""


class ServiceView(View, frozen=True, kw_only=True):
    """One Service as a node serves it, and the way of one connection to it."""

    service: str
    """`namespace/name`."""
    node: str = ""
    """The node whose view it is; "" if none could be asked."""
    nodes: tuple[str, ...] = ()
    """Nodes that can be asked."""
    differing: tuple[Differing, ...] = ()
    settings: tuple[Setting, ...] = ()
    served: ServiceAnswer | None = None
    client: str = ""
    """The client of the connection, as it was typed."""
    choices: tuple[Choice, ...] = ()
    flow: ExplainedFlow | None = None
    picture: Picture | None = None
    way_problem: str = ""
    """Why the connection cannot be explained; "" if it can."""
    problem: str = ""
    """Why nothing can be said about the Service; "" if something can."""
    advice: str = ""
    """What to do about it."""

    @property
    def selected(self) -> str:
        """The destination that is selected; "" if there is none."""
        return next((each.to for each in self.choices if each.selected), "")


def service_view(names: Names, name: ObjectName, client: str = "", to: str = "") -> ServiceView:
    """Describe a Service on the node of a World.

    Args:
        names: of the World, with further pods if clients may be any.
        name: the Service.
        client: who connects: a pod, a node, an address or a class of clients; "" for any pod.
        to: the destination, one of the choices; "" for the first.
    """
    world, client = names.world, client.strip() or "pod"
    service = names.service(name)
    if service is None:
        return unknown_service(world, name)
    explainer = FlowExplainer(world, names)
    view = ServiceView(
        source=world.origin.text,
        service=str(name),
        node=names.here,
        settings=tuple(settings_of(service, name in world.unserved)),
        served=explain_service(explainer, name),
        client=client,
    )
    choices = list(choices_of(explainer, name))
    if not choices:
        return view
    wanted = to or choices[0].to
    if wanted not in [each.to for each in choices]:
        # An address that is typed, or that the Service had before: explain it anyway.
        choices.append(Choice(wanted, wanted))
    marked = tuple(Choice(each.to, each.label, each.to == wanted) for each in choices)
    view = msgspec.structs.replace(view, choices=marked)
    try:
        flows = explainer.explain(names.client(client), names.resolve(wanted)).flows
    except QuestionError as error:
        return msgspec.structs.replace(view, way_problem=str(error))
    if not flows:
        text = f"no Service is at {wanted}: the proxies leave packets to it alone"
        return msgspec.structs.replace(view, way_problem=text)
    return msgspec.structs.replace(view, flow=flows[0], picture=picture_of(flows[0]))


def unknown_service(world: World, name: ObjectName) -> ServiceView:
    """Return the view of a Service that a World does not have, with what to do."""
    here = world.config.node_name or "this node"
    similar = [each for each in world.snapshot.services if each.name == name.name]
    advice = "check the namespace and the name"
    if similar:
        advice += f"; there is {' and '.join(map(str, similar[:3]))}"
    return ServiceView(
        source=world.origin.text,
        service=str(name),
        node=here,
        problem=f"Service {name} is not known on node {here}",
        advice=f"{advice}. A Service that was just created appears once the node's process has"
        " received it.",
    )


def settings_of(service: Service, unserved: bool) -> Iterator[Setting]:
    """Yield the fields that decide where traffic goes, with what they mean."""
    spec, notes = service.spec, service.metadata.annotations
    outside = spec.type in ("NodePort", "LoadBalancer") or bool(spec.external_ips)
    yield Setting("type", spec.type or "ClusterIP", "")
    if unserved:
        return
    inside = spec.internal_traffic_policy or "Cluster"
    yield Setting("internalTrafficPolicy", inside, _POLICIES.get(inside, ""))
    if outside:
        policy = spec.external_traffic_policy or "Cluster"
        text = _POLICIES.get(policy, "")
        if policy == "Cluster":
            text += ", which see an address of this node as the client"
        yield Setting("externalTrafficPolicy", policy, text)
    if spec.session_affinity == "ClientIP":
        config = spec.session_affinity_config
        seconds = (config and config.client_ip and config.client_ip.timeout_seconds) or None
        text = f"a client keeps its endpoint for {seconds or _AFFINITY_SECONDS} s"
        yield Setting("sessionAffinity", "ClientIP", text)
    else:
        yield Setting("sessionAffinity", "None", "each connection goes to any of the endpoints")
    if spec.load_balancer_source_ranges:
        ranges = ", ".join(spec.load_balancer_source_ranges)
        text = "packets of other clients to a load balancer IP are dropped"
        yield Setting("loadBalancerSourceRanges", ranges, text)
    if spec.health_check_node_port:
        text = "tells load balancers whether this node has an endpoint that is ready"
        yield Setting("healthCheckNodePort", str(spec.health_check_node_port), text)
    if spec.selector is None:
        yield Setting("selector", "none", "its EndpointSlices are written by hand or by a program")
    for field in msgspec.structs.fields(notes) if notes is not None else ():
        value = getattr(notes, field.name)
        if value is not None and field.encode_name.startswith("steersman/"):
            yield Setting(field.encode_name, value, "")


def choices_of(explainer: FlowExplainer, name: ObjectName) -> Iterator[Choice]:
    """Yield the destinations at which a Service is served, clusterIPs first."""
    names, count = explainer.names, 0
    for key, plan in explainer.world.plan.services.items():
        if key.name.object_name != name:
            continue
        for frontend in plan.frontends:
            address = frontend.address
            if not address:  # a node port: at an address of this node, or of another one
                groups = (names.node_addresses(node) for node in (names.here, *names.nodes))
                all_of = (ip for group in groups for ip in group if family_of(ip) is key.family)
                address = next(all_of, "")
            count += 1
            if address and count <= MOST_CHOICES:
                to = f"{join_host_port(address, frontend.port)}/{key.name.protocol}"
                port = f" ({key.name.port})" if key.name.port else ""
                yield Choice(to, f"{_KINDS[frontend.kind]} {to}{port}")
