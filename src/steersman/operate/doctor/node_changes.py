"""Check of rules of other programs that change the packets of the question, or take them away.

Translation of addresses before ours, NOTRACK, zones, cleared marks and the like break a Service
although no rule drops a packet. The same rules are harmless in other places, so they are notices:
they count if a connection fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from steersman.model.plan import SourceClass
from steersman.modes.base import Requirements
from steersman.netfilter.firewall.packet_filter import Change, FilterTable, changes
from steersman.netfilter.firewall.read import rule_text
from steersman.operate.doctor.check import (
    Cause,
    Check,
    CheckResult,
    Context,
    notice,
    ok,
    on_linux,
    skipped,
)
from steersman.operate.doctor.facts import Path, firewall, paths, requirements
from steersman.operate.doctor.node_firewall import WHO, Stage, stages_of_paths

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
_SIMILAR = 2
"""Endpoints that are looked at of those which are reached by one interface."""


async def rule_changes(context: Context) -> Iterable[CheckResult]:
    """Walk the rules of all programs, and note those that change packets of the question."""
    found = await context.once(paths)
    if not found:
        return [skipped("no packet is forwarded to an endpoint")]
    rules, needs = await context.once(firewall), await context.once(requirements)
    passed = await stages_of_paths(context, _SIMILAR)
    mark = context.world.plan.settings.masquerade_mark

    def walk() -> dict[tuple[str, ...], tuple[Change, str, dict[str, None]]]:
        hits: dict[tuple[str, ...], tuple[Change, str, dict[str, None]]] = {}
        for path, steps in passed:
            for change, effect in _of_path(rules.tables, path, needs, steps, mark):
                key = change.table, change.chain, change.place, effect
                sure, _, who = hits.setdefault(key, (change, effect, {}))
                if change.certain and not sure.certain:
                    hits[key] = change, effect, who
                who[WHO[path.source]] = None
        return hits

    results = []
    for change, effect, who in (await asyncio.to_thread(walk)).values():
        text = await rule_text(context.execute, change)
        place = f"{change.table}, chain {change.chain}"
        sure = "" if change.certain else ", if it matches"
        words = _WORDS[effect].format(who=" and ".join(who))
        results.append(
            notice(
                f"a rule of another program {words}{sure}: {place}: {text}",
                f"{place}: {text}",
                remedy="delete that rule, or let it leave out this traffic; steersman trace shows "
                "what it does to a packet",
                cause=Cause.NODE + (_CERTAIN if change.certain else _LIKELY),
            )
        )
    results.sort(key=lambda result: result.cause)
    return results or [ok("no rule of another program changes these packets")]


def _of_path(
    tables: Iterable[FilterTable],
    path: Path,
    needs: Requirements,
    steps: Iterable[Stage],
    mark: int,
) -> Iterator[tuple[Change, str]]:
    """Yield the rules that matter for a way, and what they do: a key of _WORDS."""
    for stage in steps:
        for change in changes(tables, stage.hook, stage.packet, stage.before):
            if needs.own_jumps and change.chain.startswith(needs.own_jumps):
                continue
            if stage.packet.answer and not change.certain:
                continue  # too little is known of the client: it would always be so
            early = change.priority < _CONNTRACK
            kind: str = change.effect.kind
            match kind:
                case "destination":
                    matters = stage.hook in ("prerouting", "output") and bool(stage.before)
                    matters = matters and change.priority <= -_SOURCE_NAT
                case "source":
                    # The node's own connections have a source of the node in any case.
                    matters = stage.hook == "postrouting" and not path.masquerade
                    matters = matters and path.source is not SourceClass.NODE
                case "untracked" | "zone":
                    matters = early
                case "mark":
                    after = change.effect.marked(mark) & mark, change.effect.marked(0) & mark
                    kind = "set" if after[1] else "cleared"
                    matters = needs.delivery == "forwarded" and not stage.packet.answer
                    matters = matters and not early and change.priority < _SOURCE_NAT
                    matters = matters and (not after[0] if path.masquerade else bool(after[1]))
                case _:
                    matters = True
            if matters:
                yield change, kind


CHANGE_CHECKS: Final = (
    Check("rule-changes", "rules that change packets", rule_changes, on_linux, Cause.NODE, 8.0),
)
"""The check of rules that change packets."""
