"""`steersman top`: a live view of rates, failures, syncs, drift and Findings."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from steersman.cli.command import Argument, Command, Example, option
from steersman.operate.answer import Answer

if TYPE_CHECKING:
    from steersman.config import Parsed

_SORTS = ("rate", "connections", "failures", "latency", "endpoints", "name")


async def _answer(parsed: Parsed) -> Answer:
    """Show the view on a terminal; answer with one screen otherwise."""
    from steersman.config import UsageError  # noqa: PLC0415 - as the others
    from steersman.operate.top import top_once  # noqa: PLC0415
    from steersman.operate.top_model import TopModel  # noqa: PLC0415

    values = parsed.values
    text = parsed.arguments[0] if parsed.arguments else ""
    model = TopModel(text, str(values.get("sort", "rate")))
    if values.get("once") and "delay" in values:
        raise UsageError("--delay is for the live view: leave out --once, or --delay")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if values.get("once") or not interactive or str(values.get("output", "text")) != "text":
        return await top_once(model.question)
    from steersman.cli.top_view import show_top  # noqa: PLC0415 - a terminal

    seconds = float(getattr(values.get("delay"), "seconds", 1.0))
    await show_top(model, max(0.2, seconds))
    return Answer()  # the view was closed: there is nothing more to say


COMMAND = Command(
    name="top",
    summary="watch rates, failures, syncs, drift and Findings",
    description=(
        "Show what the running process does, refreshed every second: connections and failures by\n"
        "Service and endpoint, how long connections take to be set up, syncs, drift, and\n"
        "Findings. Numbers that the mode does not count are shown as -.\n\n"
        "Keys: up and down move, Enter opens a Service, Escape goes back, / filters, s sorts by\n"
        "the next column, d runs doctor on the Service, f shows all Findings, ? all keys, q\n"
        "quits.\n\n"
        "In a pipe, or with --once, one screen is printed. In large clusters the process counts\n"
        "connections less often than every second, so that this takes at most 5 % of a core."
    ),
    arguments=(
        Argument("TEXT", "Show only ServicePorts whose name contains it.", completes="service"),
    ),
    flags=(
        option("once", "Print one screen and exit.", kind="bool"),
        option("delay", "Time between two refreshes.", kind="duration", default="1s"),
        option("sort", "Order: " + ", ".join(_SORTS), default="rate", choices=_SORTS),
    ),
    examples=(
        Example("steersman top", "the live view"),
        Example("steersman top shop/", "one namespace"),
        Example("steersman top --once --sort failures", "what fails now, for a ticket"),
        Example("steersman top --once -o json", "for scripts"),
    ),
    answer=_answer,
    takes=frozenset(),
)
