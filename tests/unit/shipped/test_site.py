"""The documentation site: it can be built, its links lead somewhere, and it loads nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import reference
import site_pages
import yaml

from tests.support.site import build

ROOT = Path(__file__).parents[3]
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}
"""Elements that make a browser load something, with the attribute that says what."""


class Loads(HTMLParser):
    """Collects the addresses that a page loads when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for key, value in attrs if key == LOADED.get(tag)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    return build(tmp_path_factory.mktemp("site"))


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_text_becomes_a_page(site: Path) -> None:
    texts = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    texts |= {*site_pages.ELSEWHERE.values(), *reference.PAGES}
    built = {str(path.relative_to(site).with_suffix(".md")) for path in pages(site)}
    assert built == texts | {"404.md"}


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in pages(site):
        loads = Loads()
        loads.feed(page.read_text())
        assert any("stylesheets" in each for each in loads.found), page.name
        assert [each for each in loads.found if re.match(r"\w+:|//", each)] == [], page.name


def test_lists_and_tables_are_shown_as_such(site: Path) -> None:
    for page in pages(site):
        text = re.sub(r"<pre>.*?</pre>", "", page.read_text(), flags=re.DOTALL)
        assert not re.findall(r"^(?:- |\d+\. |\| ).*", text, re.MULTILINE), page.name


@pytest.mark.parametrize("link", ["nowhere.md", "behaviour.md#no-such-section"])
def test_a_broken_link_is_an_error(tmp_path: Path, link: str) -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config["docs_dir"] = str(tmp_path / "docs")
    config["hooks"] = config["extra_css"] = []
    config["nav"] = ["index.md", "behaviour.md"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "behaviour.md").write_text("# Behaviour\n")
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n[a link]({link})\n")
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    argv = [sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path / "out")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert link.rsplit("#", maxsplit=1)[-1] in done.stderr


def test_links_lead_to_files_for_those_who_read_the_tree() -> None:
    texts = [*(ROOT / "docs").glob("*.md"), *map(ROOT.joinpath, site_pages.ELSEWHERE)]
    links = [
        (path, link.partition("#")[0])
        for path in (*texts, ROOT / "README.md")
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text())
    ]
    assert len(links) > 50
    made = {ROOT / "docs" / name for name in reference.PAGES}
    missing = [
        (path.name, link)
        for path, link in links
        if not (path.parent / link).exists() and (path.parent / link).resolve() not in made
    ]
    assert missing == []


def test_lists_are_nested_by_four_spaces() -> None:
    text = "Items:\n- one\n  more of it\n  1. inner\n\n     another paragraph\n- two\n\n      code"
    assert site_pages.four_spaces(text).split("\n") == [
        *("", "Items:", "", "- one", "    more of it", "    1. inner", ""),
        *("        another paragraph", "", "- two", "", "        code"),
    ]


def test_sections_become_links_outside_of_code() -> None:
    anchors = {"8.2": "82-large-clusters"}
    linked = site_pages.section_links("see behaviour 8.2, 9", "../", anchors)
    assert linked == "see [behaviour 8.2](../behaviour.md#82-large-clusters), 9"
    for text in ("    # behaviour 8.2", "behaviour 8.3", "# behaviour 8.2"):
        assert site_pages.section_links(text, "", anchors) == text
    assert site_pages.section_links("in `docs/limits.md`.", "", {}) == "in [limits](limits.md)."
