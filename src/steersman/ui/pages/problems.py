"""`/problems`: everything that is wrong in the cluster, worst first; doctor with one click."""

from __future__ import annotations

import time
from urllib.parse import urlencode

from steersman.operate.doctor.check import Diagnosis
from steersman.operate.problems import Problems, find_problems, read_filter
from steersman.run.serve import http
from steersman.ui.access import see_other
from steersman.ui.doctor_runs import run_on
from steersman.ui.requests import Asked
from steersman.ui.site import Page, Query, Site


async def answer(site: Site, query: Query) -> Problems:
    """Return the problems that a query asks for."""
    fleet = site.fleet
    return find_problems(
        fleet.seen,
        fleet.disagreements,
        site.doctor_runs.results,
        read_filter(query),
        now=time.time(),
        trouble=fleet.problem,
    )


async def start_doctor(site: Site, asked: Asked) -> http.Answer:
    """Run doctor on a node, then show its problems."""
    node = asked.form.text("node")[:300].strip()
    diagnosis = await run_on(site.fleet, node, "doctor", (), Diagnosis)
    site.doctor_runs.note(node, "", diagnosis)
    words = {"node": node, "doctor": diagnosis.cause or "nothing"}
    return see_other(f"/problems?{urlencode(words)}")


PAGE = Page(
    "/problems",
    "problems.html",
    answer,
    "Problems",
    nav="Problems",
    actions={"/problems/doctor": start_doctor},
)
