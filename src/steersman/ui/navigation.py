"""The pages, in the order of the navigation."""

from __future__ import annotations

from typing import Final

from steersman.ui.pages import about, cluster, services
from steersman.ui.site import Page

PAGES: Final[tuple[Page, ...]] = (cluster.PAGE, services.PAGE, about.PAGE)
