"""`make screenshots`: pictures of the pages, light and dark, for docs/images (as root).

    python scripts/screenshots.py [NAME...]      all, or only some of them

The pages show the cluster of `make demo-ui`, so the pictures differ a little from run to run.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.browser import Tab, browser, chromium, demo, tab

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH = 1200
HIGHEST = 1500


class Shot(NamedTuple):
    """A picture of a page."""

    path: str
    ready: str
    """Selector of what must be there."""
    seconds: float = 2.0
    """For how long it is open before: charts get their points then."""


SHOTS = {
    "cluster": Shot("/", "main table"),
    "services": Shot("/services", "main table"),
    "service": Shot("/services/shop/web?client=external&node=node-a", "main .way", 40),
    "problems": Shot("/problems", "main h1"),
    "time": Shot("/time?node=node-a", "main table", 4),
    "plan": Shot("/plan", "main form"),
    "map": Shot("/map", "main table", 6),
}
MANIFEST = """\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  sessionAffinity: ClientIP
  ports:
    - {name: http, port: 80, targetPort: 8080, nodePort: 30080}
"""


async def take(opened: Tab, name: str, shot: Shot) -> None:
    """Take both pictures of a page."""
    page = opened.page
    await opened.look(width=WIDTH)
    await opened.open(shot.path)
    await page.wait_for_selector(shot.ready)
    if name == "plan":
        await page.locator("textarea").fill(MANIFEST)
        await page.get_by_role("button").last.click()
        await page.wait_for_selector("main h2")
    await asyncio.sleep(shot.seconds)
    for scheme in ("light", "dark"):
        await opened.look(dark=scheme == "dark", width=WIDTH)
        await asyncio.sleep(1)  # charts are drawn again
        high = await page.evaluate(
            "document.querySelector('footer').getBoundingClientRect().bottom"
        )
        path = IMAGES / f"ui-{name}-{scheme}.png"
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": min(int(high), HIGHEST)}
        await page.screenshot(path=path, full_page=True, clip=clip)
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size // 1000} kB", flush=True)


async def main(names: list[str]) -> int:
    """Take the pictures; return the exit status."""
    if not chromium():
        print("no Chromium is installed: scripts/setup.sh all-tests, as root", file=sys.stderr)
        return 1
    IMAGES.mkdir(parents=True, exist_ok=True)
    async with demo() as url, browser() as chrome, tab(chrome, url) as opened:
        await asyncio.sleep(45)  # a history to show
        for name in names or SHOTS:
            await take(opened, name, SHOTS[name])
    return 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(sys.argv[1:])))
