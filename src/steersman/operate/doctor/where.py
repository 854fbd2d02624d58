"""Say where a connection that failed, or went elsewhere, left the way that the plan predicts.

A dial tells only that it failed. So one more packet of the same way is followed through the kernel
(operate/trace.py), and the first difference is the likely cause.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from steersman.model.errors import BusyError
from steersman.operate.answer import QuestionError
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.facts import rules_are_listed
from steersman.operate.doctor.result import Cause, CheckResult, error, unknown
from steersman.operate.load import world_again
from steersman.operate.trace import TraceAnswer, make_tracer, trace_packet
from steersman.operate.trace_question import TraceQuestion

_CAUSES = {
    # The check of routes names the endpoint, too.
    **dict.fromkeys(("no-route", "policy-rule"), Cause.PATH + 1),
    # These name nobody, or a place and no object: a check that finds one there explains them.
    **dict.fromkeys(
        (
            "rules",
            "rules-differ",
            "rules-agree",
            "unseen",
            "kernel-drop",
            "neighbour",
            "no-carrier",
            "not-forwarded",
            "left",
            "not-sent",
            "answer-untranslated",
            "not-taken",
        ),
        Cause.SYMPTOM - 1,
    ),
    **dict.fromkeys(("not-answered", "refused", "answer-source"), Cause.ENDPOINT),
}
"""Where a problem is, by the code of a difference; that of others is in the node."""


async def where_lost(context: Context, question: TraceQuestion) -> CheckResult | None:
    """Send a packet of one way, follow it, and return where it leaves the prediction.

    Args:
        context: has the plan, and the mode that follows packets.
        question: the packet: its destination, and the namespace and address of its client. It must
            be answered.

    Returns:
        An error that names the object and its owner; None if the packet goes as predicted. If it
        cannot be followed, why not.
    """
    await context.once(rules_are_listed)  # before the trace writes rules
    make = partial(make_tracer, context.world, context.mode)
    question = replace(question, must_answer=True)
    try:
        answer = await trace_packet(context.world, question, make, context.renew or world_again)
    except (BusyError, QuestionError) as failure:
        return unknown(f"a packet to {question.destination} cannot be followed: {failure}")
    return _result(answer) if answer.differences else None


def _result(answer: TraceAnswer) -> CheckResult:
    first, *others = answer.differences
    evidence = [
        f"{answer.flow}: {answer.predicted}",
        *first.evidence,
        *(each.text for each in others),
    ]
    remedy = f"look at it: `{first.shows}`" if first.shows else ""
    return error(first.text, *evidence, remedy=remedy, cause=_CAUSES.get(first.code, Cause.NODE))
