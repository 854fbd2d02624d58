"""The pages: a module and a template each. `PAGES` has them in the order of the navigation."""

from __future__ import annotations

from typing import Final

from steersman.ui.pages.about import PAGE as ABOUT
from steersman.ui.pages.cluster import PAGE as CLUSTER
from steersman.ui.pages.map import PAGE as MAP
from steersman.ui.pages.plan import PAGE as PLAN
from steersman.ui.pages.problems import PAGE as PROBLEMS
from steersman.ui.pages.service import PAGE as SERVICE
from steersman.ui.pages.service import RATES
from steersman.ui.pages.services import PAGE as SERVICES
from steersman.ui.pages.time import PAGE as TIME
from steersman.ui.site import Page

PAGES: Final[tuple[Page, ...]] = (
    CLUSTER,
    SERVICES,
    SERVICE,
    RATES,
    MAP,
    PROBLEMS,
    TIME,
    PLAN,
    ABOUT,
)
