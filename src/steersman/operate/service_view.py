"""The page of one Service: where it is served, by which endpoints, and a packet's way there. Pure.

Everything is seen by one node, whose World it is. What only the kernel knows (`dump`, `doctor`,
`trace`) is asked for apart, when an operator wants it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steersman.model.addresses import family_of, join_host_port
from steersman.model.names import ObjectName
from steersman.operate.answer import QuestionError, View
from steersman.operate.explain_flow import ExplainedFlow, FlowExplainer
from steersman.operate.explain_service import ServiceAnswer, explain_service
from steersman.operate.names import Names
from steersman.operate.picture import Picture, picture_of

MOST_CHOICES = 100
"""Addresses of a Service among which one is selected; it has as many ports as it likes."""


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
        name: the Service, which the World has.
        client: who connects: a pod, a node, an address or a class of clients; "" for any pod.
        to: the destination, one of the choices; "" for the first.
    """
    world, client = names.world, client.strip() or "pod"
    explainer = FlowExplainer(world, names)
    served = explain_service(explainer, name)
    view = ServiceView(
        source=world.origin.text,
        service=str(name),
        node=names.here,
        served=served,
        client=client,
    )
    choices = list(choices_of(names, served))
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


def choices_of(names: Names, served: ServiceAnswer) -> Iterator[Choice]:
    """Yield the destinations at which a Service is served, clusterIPs first."""
    frontends = [(port, each) for port in served.ports for each in port.frontends]
    for port, each in frontends[:MOST_CHOICES]:
        address = each.address
        if not address:  # a node port: at an address of this node, or of another one
            groups = (names.node_addresses(node) for node in (names.here, *names.nodes))
            known = (ip for group in groups for ip in group)
            address = next((ip for ip in known if family_of(ip).kubernetes == port.family), "")
        if address:
            to = f"{join_host_port(address, each.port)}/{each.protocol}"
            label = each.text if each.address else f"node port {to}"
            yield Choice(to, label + (f" ({port.port})" if port.port else ""))
