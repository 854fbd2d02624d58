"""Check of firewalls: would a rule of another program drop the packets of the question?

The rules are walked for the packets of each way from a class of clients to an endpoint, at the
hooks that these packets pass in this mode; nothing is sent. A rule that may match (a rate, a set,
an interface that is not known) is only a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from steersman.compile.trace import Flow
from steersman.model.addresses import is_loopback
from steersman.model.plan import NodeSettings, SourceClass
from steersman.modes.base import Requirements
from steersman.netfilter.firewall import rule_text
from steersman.netfilter.packet_filter import Drop, Hook, Packet, drops
from steersman.operate.doctor.check import (
    Cause,
    Check,
    CheckResult,
    Context,
    error,
    ok,
    on_the_node,
    skipped,
    unknown,
    warning,
)
from steersman.operate.doctor.facts import Path, firewall, paths, requirements, ways
from steersman.operate.doctor.network import Way

_WHO = {
    SourceClass.POD: "pods of this node",
    SourceClass.NODE: "this node itself",
    SourceClass.EXTERNAL: "clients outside",
}
_MOST_PATHS = 400
"""Ways that are looked at if the question is about the whole node."""


class Stage(NamedTuple):
    """A hook that a packet passes."""

    hook: Hook
    packet: Packet
    before: Packet | None = None
    """The packet as it is before NAT at this hook."""


async def firewalls(context: Context) -> Iterable[CheckResult]:
    """Walk the rules of all programs for the packets of the question."""
    found = await context.once(paths)
    if not found:
        return [skipped("no packet is forwarded to an endpoint")]
    rules = await context.once(firewall)
    needs, to_endpoint = await context.once(requirements), await context.once(ways)
    settings, flow = context.world.plan.settings, context.question.flow
    hits: dict[Drop, dict[str, None]] = {}
    for path in found[:_MOST_PATHS]:
        for stage in stages(path, needs, settings, to_endpoint[path.endpoint.ip], flow):
            for drop in drops(rules.tables, stage.hook, stage.packet, stage.before):
                if needs.own_jumps and drop.chain.startswith(needs.own_jumps):
                    continue  # of the mode itself: source ranges, policy Local
                hits.setdefault(drop, {})[f"{_WHO[path.source]}: {stage.packet}"] = None
    results = []
    for drop, packets in hits.items():
        text = await rule_text(context.execute, drop)
        who = dict.fromkeys(packet.partition(":")[0] for packet in packets)
        place = f"{drop.table}, chain {drop.chain}"
        evidence = (f"{place}: {text}", *packets)
        if drop.certain:
            results.append(
                error(
                    f"a firewall {drop.fate}s packets of {' and '.join(who)}: {place}: {text}",
                    *evidence,
                    remedy="delete that rule, or accept this traffic before it",
                )
            )
        else:
            results.append(
                warning(
                    f"a firewall may {drop.fate} packets of {' and '.join(who)}: {place}: {text}",
                    *evidence,
                    remedy="steersman trace shows whether it does",
                    suspect=True,
                )
            )
    if rules.notes:
        results.append(unknown("some rules could not be read", *rules.notes))
    return results or [ok("no rule of another program drops these packets")]


def stages(
    path: Path, needs: Requirements, settings: NodeSettings, way: Way, flow: Flow | None
) -> Iterator[Stage]:
    """Yield the hooks that the first packet of a connection passes, with its addresses there.

    Args:
        path: from where, and to which endpoint.
        needs: tells which packets netfilter sees in this mode.
        settings: of the node.
        way: the way to the endpoint.
        flow: the connection, if one was asked for.
    """
    plan, frontend, endpoint = path.plan, path.frontend, path.endpoint
    own = settings.family(plan.key.family)
    address = frontend.address
    if not address:  # a node port: any address that serves it
        served = own.node_port_addresses
        served = own.local_addresses if served is None else served
        address = (
            flow.destination
            if flow
            else next((each for each in served if not is_loopback(each)), "")
        )
    source = flow.source if flow and not isinstance(flow.source, SourceClass) else ""
    came_in = flow.interface if flow else ""
    to_service = Packet(
        plan.key.family,
        plan.key.name.protocol,
        address,
        frontend.port,
        source,
        came_in,
        mark=0,
        translated=False,
    )
    to_endpoint = to_service._replace(
        destination=endpoint.ip,
        port=endpoint.port,
        mark=settings.masquerade_mark if path.masquerade else 0,
        translated=True,
    )
    leaving = to_endpoint._replace(goes_out=way.device)
    from_node = leaving._replace(came_in="")
    local_process = path.source is SourceClass.NODE
    match needs.delivery:
        case "local":  # the client's packet ends here; the node sends others to the endpoint
            if local_process:
                yield Stage("output", to_service)
            else:
                yield Stage("prerouting", to_service)
            yield Stage("input", to_service)
            yield Stage("output", from_node._replace(source="", translated=None, mark=None))
            return
        case "translated":
            to_service = to_endpoint = to_endpoint._replace(mark=None, translated=None)
            leaving = leaving._replace(mark=None, translated=None)
            from_node = leaving._replace(came_in="")
    if local_process:
        yield Stage("output", from_node, to_service)
    else:
        yield Stage("prerouting", to_endpoint, to_service)
    if way.local:  # an endpoint in the node's own network
        yield Stage("input", to_endpoint)
    elif not local_process:
        yield Stage("forward", leaving)
    if not way.local:
        yield Stage("postrouting", leaving)


FIREWALL_CHECKS: Final = (
    Check("firewall", "firewalls", firewalls, on_the_node, Cause.NODE + 2, 8.0),
)
"""The check of firewalls."""
