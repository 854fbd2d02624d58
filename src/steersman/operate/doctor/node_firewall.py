"""Check of firewalls: would a rule of another program drop the packets of the question?

The rules are walked for the packets of each way from a class of clients to an endpoint, at the
hooks that these packets pass in this mode; nothing is sent. A rule that may match (a rate, a set,
an interface that is not known) is only a notice: most network policies have some.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from steersman.compile.trace import Flow
from steersman.model.addresses import is_loopback
from steersman.model.plan import NodeSettings, SourceClass
from steersman.modes.base import Requirements
from steersman.netfilter.firewall.packet_filter import Hook, Met, Packet, met
from steersman.netfilter.firewall.read import rule_text
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import Path, firewall, paths, requirements, ways
from steersman.operate.doctor.result import Found, error, notice, ok, skipped, unknown
from steersman.operate.trace_loss import Hop

WHO: Final = {
    SourceClass.POD: "pods of this node",
    SourceClass.NODE: "this node itself",
    SourceClass.EXTERNAL: "clients outside",
}
"""Whose packets a way is of."""
_SIMILAR = 4
"""Endpoints that are looked at of those which are reached by one interface: a Service may have
hundreds, which rules hardly tell apart."""


class Stage(NamedTuple):
    """A hook that a packet passes."""

    hook: Hook
    packet: Packet
    before: Packet | None = None
    """The packet as it is before NAT at this hook."""


async def met_rules(context: Context) -> Sequence[tuple[Path, Stage, Met]]:
    """Return the rules of other programs that end or change packets of the question (a fact)."""
    found, to_endpoint = await context.once(paths), await context.once(ways)
    rules, needs = await context.once(firewall), await context.once(requirements)
    settings, flow = context.world.plan.settings, context.question.flow

    def walk() -> Iterator[tuple[Path, Stage, Met]]:
        seen: Counter[object] = Counter()
        for path in found:
            way = to_endpoint[path.endpoint.ip]
            alike = path.plan.key, path.frontend, path.source, way.device
            seen[alike] += 1
            if seen[alike] > _SIMILAR:
                continue
            for stage in stages(path, needs, settings, way, flow):
                for each in met(rules.tables, stage.hook, stage.packet, stage.before):
                    if needs.own_jumps and each.chain.startswith(needs.own_jumps):
                        continue  # of the mode itself: source ranges, policy Local
                    if each.certain or not stage.packet.answer:
                        # Too little is known of the client of an answer: it would always match.
                        yield path, stage, each

    return await asyncio.to_thread(lambda: [*walk()])


async def firewalls(context: Context) -> Found:
    """Find the rules of other programs that drop packets of the question."""
    if not await context.once(paths):
        return skipped("no packet is forwarded to an endpoint")
    rules = await context.once(firewall)
    hits: dict[Met, dict[str, None]] = {}
    for path, stage, each in await context.once(met_rules):
        if not each.effect:
            hits.setdefault(each, {})[f"{WHO[path.source]}: {stage.packet}"] = None
    results = []
    # One result for each rule, however many packets it drops.
    for drop, packets in hits.items():
        rule = await described(context, drop)
        who = " and ".join(dict.fromkeys(packet.partition(":")[0] for packet in packets))
        if drop.certain:
            text = f"a firewall {drop.fate}s packets of {who}: {rule}"
            remedy = "delete that rule, or accept this traffic before it"
            results.append(error(text, rule, *packets, remedy=remedy))
        else:
            text = f"a firewall may {drop.fate} packets of {who}: {rule}"
            remedy = "`steersman trace` shows whether it does"
            results.append(notice(text, rule, *packets, remedy=remedy))
    if rules.notes:
        results.append(unknown("some rules could not be read", *rules.notes))
    return results or ok("no rule of another program drops these packets")


async def described(context: Context, rule: Met) -> str:
    """Return a rule and its place, for people."""
    return f"{rule.table}, chain {rule.chain}: {await rule_text(context.execute, rule)}"


def first_packet(path: Path, settings: NodeSettings, flow: Flow | None) -> Packet:
    """Return the first packet of a connection as the client sends it, to the Service."""
    plan, address = path.plan, path.frontend.address
    own = settings.family(plan.key.family)
    if not address and flow:
        address = flow.destination
    elif not address:  # a node port: any address that serves it stands for all
        served = own.node_port_addresses
        served = own.local_addresses if served is None else served
        address = next((each for each in served if not is_loopback(each)), "")
    return Packet(
        plan.key.family,
        plan.key.name.protocol,
        address,
        path.frontend.port,
        flow.source if flow and not isinstance(flow.source, SourceClass) else "",
        flow.interface if flow else "",
        mark=0,
        translated=False,
    )


def stages(
    path: Path, needs: Requirements, settings: NodeSettings, way: Hop, flow: Flow | None
) -> Iterator[Stage]:
    """Yield the hooks that the first packet of a connection and its answer pass.

    Args:
        path: from where, and to which endpoint.
        needs: tells which packets netfilter sees in this mode.
        settings: of the node.
        way: the way to the endpoint.
        flow: the connection, if one was asked for.
    """
    endpoint = path.endpoint
    to_service = first_packet(path, settings, flow)
    # NAT changes the destination, and the rules of the mode may set the mark.
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
            # Programs before netfilter have changed the destination; conntrack does not know.
            to_service = to_endpoint = to_endpoint._replace(mark=0, translated=False)
            leaving = leaving._replace(mark=0, translated=False)
            from_node = leaving._replace(came_in="")
    # Chains before NAT (raw, mangle) still see the address of the Service.
    if local_process:
        yield Stage("output", from_node, to_service)
    else:
        yield Stage("ingress", to_service)
        yield Stage("prerouting", to_endpoint, to_service)
    if way.local:  # an endpoint in the node's own network
        yield Stage("input", to_endpoint)
        return
    if not local_process:
        yield Stage("forward", leaving)
    yield Stage("postrouting", leaving)
    yield Stage("egress", leaving._replace(goes_out=""))  # a port of that bridge, perhaps
    # The answer comes back by the same interface; a masqueraded one is forwarded, too.
    answer = to_endpoint._replace(
        destination="",
        port=0,
        source=endpoint.ip,
        came_in=way.device,
        mark=0,
        answer=True,
    )
    yield Stage("ingress", answer._replace(came_in=""))
    yield Stage("prerouting", answer)
    yield Stage("input" if local_process else "forward", answer)
