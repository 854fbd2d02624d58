"""Add pages to the documentation site whose text is not in docs/.

MkDocs calls the functions `on_*` while it builds the site. The guide for contributors and the
theory of each mode are where developers look for them; the reference is made of the code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import reference

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "CONTRIBUTING.md": "developing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "src/steersman/config/README.md": "behaviour-configuration.md",
    "src/steersman/failover/README.md": "behaviour-failover.md",
    "src/steersman/source/README.md": "behaviour-source.md",
    "src/steersman/netfilter/conntrack/README.md": "behaviour-conntrack.md",
    **{
        str(path.relative_to(ROOT)): f"modes/{path.parent.name}.md"
        for path in sorted(ROOT.glob("src/steersman/modes/*/README.md"))
    },
}
"""Files outside docs/, and the pages that they become."""


WITH_ANCHORS = (
    *("annotations.md", "doctor.md", "fields.md", "flags.md", "metric-list.md"),
    *("compatibility.md", "problems.md"),
)
"""Pages whose tables have a row for each name: links can lead to the rows."""
_FENCE = re.compile(r" *(```|~~~)")
_ITEM = re.compile(r" *([-*]|\d+\.) +")
_SECTION = re.compile(r"(?<![\[\w])behaviour (\d+(?:\.\d+)*)(?![\w\]]|\.\d)")


def page_text(source: str) -> str:
    """Return the text of a file outside docs/ with its links as seen from its page."""
    up = "../" * ELSEWHERE[source].count("/")
    text = (ROOT / source).read_text()
    text = re.sub(r"\]\((?:\.\./)*docs/", f"]({up}", text)
    for other, page in ELSEWHERE.items():
        text = text.replace(f"]({other})", f"]({up}{page})")
    return text


def four_spaces(text: str) -> str:
    """Return Markdown with lists as Python-Markdown wants them.

    CommonMark nests by the width of the item's mark and lets a list follow a paragraph at once;
    Python-Markdown wants four spaces for each level and an empty line before the first item.
    """
    out = [""]
    levels: list[int] = []  # columns at which the texts of the open items begin
    fenced = loose = False
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        if not line.strip():
            out.append("")
            continue
        if not fenced:
            while levels and indent < levels[-1]:
                levels.pop()
        begin = levels[-1] if levels else 0
        new = 4 * len(levels) + max(indent - begin, 0)
        mark = _ITEM.match(line)
        if _FENCE.match(line):
            fenced = not fenced
        elif mark and not fenced and indent - begin < 4:
            first = not levels and not _ITEM.match(out[-1]) and not out[-1].startswith(" ")
            if out[-1] and (first or loose):
                out.append("")
            levels.append(mark.end())
            loose = False
        elif not out[-1]:
            loose = bool(levels)  # a further paragraph of an item
        out.append(" " * new + line.lstrip(" "))
    return "\n".join(out)


def section_links(text: str, up: str, anchors: dict[str, str]) -> str:
    """Return Markdown in which `behaviour 8.2` and file names of pages are links."""

    def link(found: re.Match[str]) -> str:
        anchor = anchors.get(found[1])
        return f"[{found[0]}]({up}behaviour.md#{anchor})" if anchor else found[0]

    lines = []
    for line in text.split("\n"):
        linked = line
        if not line.startswith(("    ", "#")) and "](" not in line:
            linked = _SECTION.sub(link, line)
            linked = re.sub(r"`docs/([a-z]+)\.md`", rf"[\1]({up}\1.md)", linked)
        lines.append(linked)
    return "\n".join(lines)


def row_anchors(text: str) -> str:
    """Return Markdown in which rows of tables that begin with a name have it as an anchor."""
    seen: set[str] = set()

    def mark(found: re.Match[str]) -> str:
        anchor = found[2].lstrip("-").replace("/", "-")
        if anchor in seen:
            return found[0]
        seen.add(anchor)
        return f"{found[1]}{{ #{anchor} }}"

    return re.sub(r"^(\| `([\w./-]+)`)(?= \||,)", mark, text, flags=re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose text is elsewhere."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - tests read ELSEWHERE without it

    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=page_text(source)))
    for name, text in reference.made().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Adapt a page to Python-Markdown, and link the sections that it names."""
    from markdown.extensions.toc import slugify  # noqa: PLC0415

    behaviour = (ROOT / "docs" / "behaviour.md").read_text()
    headings = re.findall(r"^#+ ((\d+(?:\.\d+)*)\.? .*)$", behaviour, re.MULTILINE)
    anchors = {number: slugify(title.replace("`", ""), "-") for title, number in headings}
    up = "../" * page.file.src_uri.count("/")
    for source, other in ELSEWHERE.items():  # links lead to files, for those who read the tree
        markdown = markdown.replace(f"](../{source}", f"]({other}")
    text = section_links(four_spaces(markdown), up, anchors)
    return row_anchors(text) if page.file.src_uri in WITH_ANCHORS else text
