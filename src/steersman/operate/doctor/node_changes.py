"""Check of rules of other programs that change the packets of the question, or take them away.

Translation of addresses before ours, NOTRACK, zones, cleared marks and the like break a Service
although no rule drops a packet. The same rules are harmless in other places, so they are notices:
they count if a connection fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steersman.model.plan import SourceClass
from steersman.modes.base import Requirements
from steersman.netfilter.firewall.packet_filter import Met
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import Path, paths, requirements
from steersman.operate.doctor.node_firewall import WHO, Stage, described, met_rules
from steersman.operate.doctor.result import Cause, Found, notice, ok, skipped

_SOURCE_NAT = 100  # NF_IP_PRI_NAT_SRC
_CONNTRACK = -200  # NF_IP_PRI_CONNTRACK
_WORDS: Mapping[str, str] = {
    "destination": "decides where packets of {who} go, before the rules of this proxy",
    "source": "gives packets of {who} another source",
    "untracked": "keeps packets of {who} from being tracked, so that they are not translated",
    "zone": "has packets of {who} tracked in a zone of its own, so that their answers are not "
    "translated back",
    "hops": "changes how far packets of {who} get (their TTL)",
    "program": "hands packets of {who} to a program",
    "cleared": "clears the mark of packets of {who} that are to be masqueraded",
    "set": "sets the mark for masquerading on packets of {who}",
}
_CERTAIN: Final = 1
_LIKELY: Final = 4
"""Steps after `Cause.NODE` of rules that certainly do so, and of those that may."""


async def changes(context: Context) -> Found:
    """Note the rules of other programs that change packets of the question."""
    if not await context.once(paths):
        return skipped("no packet is forwarded to an endpoint")
    needs, mark = await context.once(requirements), context.world.plan.settings.masquerade_mark
    hits: dict[tuple[str, ...], tuple[Met, str, dict[str, None]]] = {}
    for path, stage, each in await context.once(met_rules):
        if effect := _what_matters(each, path, stage, needs, mark):
            key = each.table, each.chain, each.place, effect
            first, _, who = hits.setdefault(key, (each, effect, {}))
            if each.certain and not first.certain:
                hits[key] = each, effect, who
            who[WHO[path.source]] = None
    results = []
    for change, effect, who in hits.values():
        rule = await described(context, change)
        sure = "" if change.certain else ", if it matches"
        words = _WORDS[effect].format(who=" and ".join(who))
        results.append(
            notice(
                f"a rule of another program {words}{sure}: {rule}",
                rule,
                remedy="delete that rule, or let it leave out this traffic; `steersman trace` "
                "shows what it does to a packet",
                cause=Cause.NODE + (_CERTAIN if change.certain else _LIKELY),
            )
        )
    results.sort(key=lambda result: result.cause)
    return results or ok("no rule of another program changes these packets")


def _what_matters(rule: Met, path: Path, stage: Stage, needs: Requirements, mark: int) -> str:
    """Return what a rule does to packets of a way, as a key of _WORDS; "" if it does no harm."""
    effect = rule.effect
    if effect is None:
        return ""
    early, forwarded = rule.priority < _CONNTRACK, path.source is not SourceClass.NODE
    match effect.kind:
        case "destination":
            decides = stage.hook in ("prerouting", "output") and bool(stage.before)
            matters = decides and rule.priority <= -_SOURCE_NAT
        case "source":
            # The node's own connections have a source of the node in any case.
            matters = stage.hook == "postrouting" and not path.masquerade and forwarded
        case "untracked" | "zone":
            matters = early
        case "mark":
            marked, unmarked = effect.marked(mark) & mark, effect.marked(0) & mark
            matters = needs.delivery == "forwarded" and not stage.packet.answer
            matters = matters and not early and rule.priority < _SOURCE_NAT
            matters = matters and (not marked if path.masquerade else bool(unmarked))
            return ("set" if unmarked else "cleared") if matters else ""
        case _:
            matters = True
    return effect.kind if matters else ""
