"""The way of a connection in boxes: client, nodes, rule, masquerading, endpoints. Pure.

    client -> | node: Service address -> address that the endpoint sees | -> endpoints, or the end

A page draws the stages from left to right, or below each other where it is narrow. What the picture
shows is in its steps as text, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from steersman.model.addresses import join_host_port
from steersman.operate.explain_flow import CLIENTS, ExplainedFlow, Hop

Kind: TypeAlias = Literal[
    "client", "rule", "source", "endpoint", "more", "drop", "reject", "accept"
]

MOST_ENDPOINTS = 8
"""Endpoints that are drawn; one box stands for all others."""
_FRONTENDS = {
    "clusterIP": "clusterIP",
    "externalIP": "external IP",
    "loadBalancerIP": "load balancer IP",
    "nodePort": "node port",
}
_ENDS: dict[str, tuple[str, str]] = {
    "drop": ("dropped", "the client times out"),
    "reject": ("rejected", "an error at once"),
    "accept": ("goes on unchanged", ""),
}


class Box(msgspec.Struct, frozen=True, rename="camel"):
    """A box with some lines of text."""

    kind: Kind
    lines: tuple[str, ...]
    share: str = ""
    """The share of new connections that goes there; "" for all, or if it is not known."""


class Stage(msgspec.Struct, frozen=True, rename="camel"):
    """What a node decides, one box after the other; or the client, or where connections end."""

    boxes: tuple[Box, ...]
    node: str = ""
    """"" for the client, and for the endpoints: each connection goes to one of these."""


class Step(msgspec.Struct, frozen=True, rename="camel"):
    """A decision of a node, in words."""

    node: str
    text: str


class Picture(msgspec.Struct, frozen=True, rename="camel"):
    """The way of one connection."""

    title: str
    """All of it in one sentence."""
    stages: tuple[Stage, ...]
    steps: tuple[Step, ...]


def picture_of(flow: ExplainedFlow) -> Picture:
    """Return the picture of a connection."""
    where = f"{join_host_port(flow.destination, flow.port)}/{flow.protocol}"
    client = CLIENTS.get(flow.client, flow.client)
    address = () if flow.source in (*CLIENTS, flow.client) else (flow.source,)
    stages = [Stage((Box("client", (client, *address, f"to {where}")),))]
    for hop in flow.hops:
        lines: tuple[str, ...] = ("no Service here", where)
        if hop.service:
            lines = (hop.service, _FRONTENDS[hop.frontend or ""], where)
        boxes = [Box("rule", lines)]
        if hop.verdict == "forward":
            seen = "the client's address" if flow.source in CLIENTS else flow.source
            head = "not masqueraded"
            if hop.masquerade:
                head, seen = "masqueraded", f"an address of {hop.node}"
            boxes.append(Box("source", (head, "the endpoint sees", seen)))
        stages.append(Stage(tuple(boxes), hop.node))
    last = flow.hops[-1]
    ends = tuple(_endpoints(last))
    if last.verdict != "forward":
        head, text = _ENDS[last.verdict]
        ends = (Box(last.verdict, (head, text or where)),)
    return Picture(flow.headline.text, (*stages, Stage(ends)), tuple(steps_of(flow)))


def _endpoints(hop: Hop) -> Iterator[Box]:
    """Yield the first endpoints, and a box for all others."""
    total = len(hop.endpoints)
    most = MOST_ENDPOINTS + (total == MOST_ENDPOINTS + 1)  # a box for one more is no saving
    for each in hop.endpoints[:most]:
        node = f"on {each.node}" if each.node else ""
        own = "itself: masqueraded" if each.address in hop.hairpins else ""
        lines = tuple(filter(None, (each.pod, each.address, node, own)))
        yield Box("endpoint", lines, _share(1, total, hop))
    if (more := total - most) > 0:
        yield Box("more", (f"and {more} more",), _share(more, total, hop))


def _share(some: int, total: int, hop: Hop) -> str:
    """Return the share of some of the endpoints in words."""
    if total == 1 or not hop.even:
        return ""
    percent = 100 * some / total
    return f"{percent:.0f} %" if percent >= 1 else "< 1 %"


def steps_of(flow: ExplainedFlow) -> Iterator[Step]:
    """Yield the decisions about a connection in words: the picture as text."""
    for hop in flow.hops:
        if hop.assumed:
            yield Step(hop.node, "the packets are assumed to arrive at this node")
        yield from (Step(hop.node, reason) for reason in hop.reasons)
        if hop.verdict == "forward" and not hop.even:
            text = "a scheduler, weights or a hash chooses the endpoint: shares are not known"
            yield Step(hop.node, text)
