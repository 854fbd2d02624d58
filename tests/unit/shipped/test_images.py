"""The pictures in the docs: each page of the navigation has two, and the docs show both."""

from __future__ import annotations

from pathlib import Path

from screenshots import SHOTS

from steersman.ui.pages import PAGES

DOCS = Path(__file__).parents[3] / "docs"


def test_each_page_of_the_navigation_is_pictured_in_light_and_dark() -> None:
    pictured = {shot.path.partition("?")[0] for shot in SHOTS.values()}
    assert {page.path for page in PAGES if page.nav and page.nav != "About"} <= pictured
    text = (DOCS / "ui.md").read_text()
    for name in SHOTS:
        for scheme in ("light", "dark"):
            assert f"images/ui-{name}-{scheme}.png" in text
            picture = (DOCS / "images" / f"ui-{name}-{scheme}.png").read_bytes()
            assert picture.startswith(b"\x89PNG")
