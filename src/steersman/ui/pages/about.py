"""`/about`: what this server is, and the licences of what it ships."""

from __future__ import annotations

from pathlib import Path

import msgspec

from steersman.operate.answer import View
from steersman.ui.site import Page, Query, Site

_STATIC = Path(__file__).parents[1] / "static"


class Asset(msgspec.Struct, frozen=True):
    """A file of another project that the wheel contains unchanged."""

    file: str
    name: str
    version: str
    licence: str
    """SPDX identifier; the text is in `licences/`."""
    source: str
    """The file in the package of the npm registry that it was taken from."""
    sha256: str


class About(View, frozen=True, kw_only=True):
    """This server."""

    version: str
    nodes: int
    assets: tuple[Asset, ...]


async def _answer(site: Site, _: Query) -> About:
    assets = msgspec.json.decode((_STATIC / "VENDORED.json").read_bytes(), type=tuple[Asset, ...])
    return About(version=site.version, nodes=len(site.fleet.nodes), assets=assets)


PAGE = Page("/about", "about.html", _answer, "About", live=False)
