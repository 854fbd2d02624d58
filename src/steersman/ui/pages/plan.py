"""`/plan`: what pasted manifests, a configuration or another mode would change, on which nodes.

Nothing is written anywhere: a node only tells its World, and the plan is computed beside this
server (ui/plan_process.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from steersman.model.node_state import NodeState
from steersman.modes.specs import SPECS
from steersman.operate.answer import QuestionError, View
from steersman.operate.plan_answer import PlanAnswer
from steersman.operate.plan_text import MOST_BYTES, PlanQuestion, check_question
from steersman.run.serve import http
from steersman.ui.plan_process import plan_in_process
from steersman.ui.requests import Asked
from steersman.ui.site import Page, Query, Site

MOST_NODES = 8
"""Nodes that are planned for one question."""


class Result(msgspec.Struct, frozen=True, rename="camel"):
    """What changes on some nodes: the same on each of them."""

    nodes: tuple[str, ...]
    like: int
    """Further nodes of the same mode and version, for which these stand."""
    plan: PlanAnswer | None = None
    problem: str = ""
    """Why there is no plan."""


class PlanPage(View, frozen=True, kw_only=True):
    """A question about a change, and what it would do."""

    asked: PlanQuestion = PlanQuestion()
    chosen: tuple[str, ...] = ()
    """Nodes that were asked for; () for one of each mode and version."""
    nodes: tuple[str, ...] = ()
    """Nodes that can be asked for."""
    modes: tuple[str, ...] = tuple(SPECS)
    results: tuple[Result, ...] = ()
    problem: str = ""
    """Why nothing was planned."""
    seconds: float = 0.0


async def empty_form(site: Site, _: Query) -> PlanPage:
    """Return the page without a question."""
    return PlanPage(nodes=tuple(sorted(site.fleet.nodes)))


async def answer_form(site: Site, asked: Asked) -> http.Answer:
    """Plan what a form asks, and answer with the page that has the result."""
    form = asked.form
    text = form.text("text")
    file = form.files.get("file")
    if file is not None and file.name:
        text = file.data[: MOST_BYTES + 1].decode("utf-8-sig", errors="replace")
    question = PlanQuestion(
        text.replace("\r\n", "\n"),
        form.text("mode"),
        whole=bool(form.text("whole")),
        lines=bool(form.text("lines")),
    )
    nodes = tuple(sorted(site.fleet.nodes))
    chosen = tuple(dict.fromkeys(filter(None, form.texts("node"))))
    answer = PlanPage(asked=question, chosen=chosen, nodes=nodes)
    began = time.monotonic()
    try:
        results = await plan_on(site, question, chosen)
        answer = msgspec.structs.replace(answer, results=results)
    except QuestionError as error:
        answer = msgspec.structs.replace(answer, problem=str(error))
    answer = msgspec.structs.replace(answer, seconds=round(time.monotonic() - began, 3))
    status = 200 if any(each.plan for each in answer.results) else 422
    return site.respond(asked.request, PAGE, answer, status=status)


async def plan_on(site: Site, asked: PlanQuestion, chosen: Sequence[str]) -> tuple[Result, ...]:
    """Return what a change would do on some nodes; equal results are one.

    Args:
        site: the nodes.
        asked: the change.
        chosen: names of nodes; () for one of each mode, variant and version.

    Raises:
        QuestionError: nothing can be planned.
    """
    check_question(asked)
    states = site.fleet.nodes
    like: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in sorted(states):
        like[_kind(states[name])].append(name)
    if unknown := [name for name in chosen if name not in states]:
        raise QuestionError(f"there is no node {unknown[0][:300]}")
    if not states:
        raise QuestionError(site.fleet.problem or "no node is known yet")
    if len(chosen) > MOST_NODES:
        raise QuestionError(
            f"choose at most {MOST_NODES} nodes: others of their mode and version change alike"
        )
    names = [*chosen] or [group[0] for group in like.values()][:MOST_NODES]
    found = await asyncio.gather(*(_plan_node(site, asked, name) for name in names))
    # Of nodes that were not chosen, a kind has one that stands for the others.
    stands = {} if chosen else {name: len(like[_kind(states[name])]) - 1 for name in names}
    same: dict[bytes, Result] = {}
    for name, result in zip(names, found, strict=True):
        plan = result.plan
        key = result.problem.encode()
        if plan is not None:
            plain = msgspec.structs.replace(plan, source="", compared_with="")
            key = msgspec.json.encode(plain)
        first = same.get(key)
        if first is not None:
            nodes = (*first.nodes, name)
            result = msgspec.structs.replace(first, nodes=nodes)  # noqa: PLW2901
        more = result.like + stands.get(name, 0)
        same[key] = msgspec.structs.replace(result, like=more)
    return tuple(same.values())


async def _plan_node(site: Site, asked: PlanQuestion, name: str) -> Result:
    try:
        async with site.planning:
            world = await site.fleet.get(name, "/world")
            return Result((name,), 0, await plan_in_process(world, asked))
    except (QuestionError, TimeoutError) as error:
        return Result((name,), 0, problem=str(error) or "the node did not answer in time")


def _kind(state: NodeState) -> tuple[str, str, str]:
    return state.mode, state.variant, state.version


PAGE = Page(
    "/plan", "plan.html", empty_form, "Plan", nav="Plan", live=False, actions={"/plan": answer_form}
)
