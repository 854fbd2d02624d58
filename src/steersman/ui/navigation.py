"""The pages, in the order of the navigation."""

from __future__ import annotations

from typing import Final

from steersman.ui.pages import about, cluster, map, plan, problems, service, services, time
from steersman.ui.site import Page

PAGES: Final[tuple[Page, ...]] = (
    cluster.PAGE,
    services.PAGE,
    service.PAGE,
    service.RATES,
    map.PAGE,
    problems.PAGE,
    time.PAGE,
    plan.PAGE,
    about.PAGE,
)
