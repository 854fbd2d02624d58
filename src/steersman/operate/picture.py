"""Draw the way of a connection: client, nodes, rule, masquerading, endpoints. Pure.

    client -> | node: Service address -> address that the endpoint sees | -> endpoints, or the end

`picture_of` places boxes and arrows, so a page and the documentation draw the same thing; `to_svg`
writes them as SVG. Colours come from the style sheet of the page by classes: a strict
Content-Security-Policy allows no style in the SVG itself. What the picture shows is in its steps as
text, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from steersman.model.addresses import join_host_port
from steersman.model.findings import printable
from steersman.operate.explain_flow import CLIENTS, ExplainedFlow, Hop

Kind: TypeAlias = Literal[
    "client", "node", "rule", "source", "endpoint", "more", "drop", "reject", "accept"
]

MOST_ENDPOINTS = 8
"""Endpoints that are drawn; one box stands for all others."""
_CHARACTERS = 25
"""Most characters of a line in a box: what fits in the font of the page."""

# Lengths in user units of the SVG, which are pixels if it is not scaled.
_WIDTH = 206.0
_LINE = 18.0
_PAD = 9.0
_GAP = 62.0
"""Between two columns; the share of an endpoint is written there."""
_SPACE = 12.0
"""Between two boxes of a column, and around a node's boxes."""
_HEAD = 24.0
"""The line with the name of a node."""

_FRONTENDS = {
    "clusterIP": "clusterIP",
    "externalIP": "external IP",
    "loadBalancerIP": "load balancer IP",
    "nodePort": "node port",
}
_ENDS: dict[str, tuple[str, str]] = {
    "drop": ("dropped", "the client times out"),
    "reject": ("rejected", "an error at once"),
    "accept": ("goes on unchanged", ""),
}


class Box(msgspec.Struct, frozen=True, rename="camel"):
    """A box with some lines of text; that of a node surrounds others."""

    kind: Kind
    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...]
    """Cut to the width of the box."""
    whole: str
    """All lines, not cut."""


class Arrow(msgspec.Struct, frozen=True, rename="camel"):
    """An arrow from one box to the next."""

    start: tuple[float, float]
    end: tuple[float, float]
    label: str = ""
    """The share of new connections that takes it; "" for all, or if it is not known."""
    refused: bool = False
    """Whether it leads to nowhere: packets are dropped or rejected."""


class Step(msgspec.Struct, frozen=True, rename="camel"):
    """A decision of a node, in words."""

    node: str
    text: str


class Picture(msgspec.Struct, frozen=True, rename="camel"):
    """The way of one connection."""

    title: str
    """All of it in one sentence."""
    width: float
    height: float
    boxes: tuple[Box, ...]
    """Those of nodes first: they are behind the others."""
    arrows: tuple[Arrow, ...]
    steps: tuple[Step, ...]

    def __html__(self) -> str:
        """Return the SVG: templates insert it as it is, since its texts are escaped."""
        return to_svg(self)


class _Card(NamedTuple):
    """A box before it has a place."""

    kind: Kind
    lines: tuple[str, ...]
    share: str = ""

    @property
    def height(self) -> float:
        return 2 * _PAD + _LINE * len(self.lines)


class _Column(NamedTuple):
    """Cards above each other."""

    cards: Sequence[_Card]
    hop: int | None = None
    """Index of the node's decision that they are part of."""

    @property
    def height(self) -> float:
        return sum(card.height + _SPACE for card in self.cards) - _SPACE


def picture_of(flow: ExplainedFlow) -> Picture:
    """Place the boxes and arrows of a connection, from left to right."""
    columns = list(_columns(flow))
    inner = max(
        column.height + 2 * (_HEAD + _SPACE) * (column.hop is not None) for column in columns
    )
    middle = inner / 2 + _SPACE
    x = _SPACE
    placed: list[list[Box]] = []
    frames: dict[int, Box] = {}
    last: int | None = None
    for column in columns:
        if column.hop != last and last is not None:
            x += _SPACE  # the frame of the node ends
        if column.hop != last and column.hop is not None:
            x += _SPACE
        last, y = column.hop, middle - column.height / 2
        boxes = []
        for card in column.cards:
            boxes.append(_box(card.kind, (x, y, _WIDTH, card.height), card.lines))
            y += card.height + _SPACE
        placed.append(boxes)
        if column.hop is not None:
            frames[column.hop] = _frame(flow.hops[column.hop], frames.get(column.hop), boxes[0])
        x += _WIDTH + _GAP
    arrows = [
        Arrow(
            (start.x + start.width, start.y + start.height / 2),
            (box.x, box.y + box.height / 2),
            card.share,
            box.kind in ("drop", "reject"),
        )
        for (before, _), (boxes, column) in pairwise(zip(placed, columns, strict=True))
        for start in before
        for box, card in zip(boxes, column.cards, strict=True)
    ]
    flat = [box for boxes in placed for box in boxes]
    return Picture(
        title=flow.headline.text,
        width=x - _GAP + _SPACE,
        height=inner + 2 * _SPACE,
        boxes=(*frames.values(), *flat),
        arrows=tuple(arrows),
        steps=tuple(steps_of(flow)),
    )


def _columns(flow: ExplainedFlow) -> Iterator[_Column]:
    """Yield the columns from the client to the end."""
    where = f"{join_host_port(flow.destination, flow.port)}/{flow.protocol}"
    client = CLIENTS.get(flow.client, flow.client)
    address = () if flow.source in (*CLIENTS, flow.client) else (flow.source,)
    yield _Column([_Card("client", (client, *address, f"to {where}"))])
    last = flow.hops[-1]
    for number, hop in enumerate(flow.hops):
        rule = (
            (hop.service, _FRONTENDS[hop.frontend or ""]) if hop.service else ("no Service here",)
        )
        yield _Column([_Card("rule", (*rule, where))], number)
        if hop.verdict == "forward":
            seen = "the client's address" if flow.source in CLIENTS else flow.source
            head = "not masqueraded"
            if hop.masquerade:
                head, seen = "masqueraded", f"an address of {hop.node}"
            yield _Column([_Card("source", (head, "the endpoint sees", seen))], number)
    if last.verdict != "forward":
        head, text = _ENDS[last.verdict]
        yield _Column([_Card(last.verdict, (head, text or where))])
        return
    total, shown = len(last.endpoints), last.endpoints[:MOST_ENDPOINTS]
    if total == MOST_ENDPOINTS + 1:  # a box for one more is no saving
        shown = last.endpoints
    cards = []
    for each in shown:
        node = f"on {each.node}" if each.node else ""
        own = "itself: masqueraded" if each.address in last.hairpins else ""
        texts = tuple(filter(None, (each.pod, each.address, node, own)))
        cards.append(_Card("endpoint", texts, _share(1, total, last)))
    if more := total - len(shown):
        cards.append(_Card("more", (f"and {more} more",), _share(more, total, last)))
    yield _Column(cards)


def _share(some: int, total: int, hop: Hop) -> str:
    """Return the share of some of the endpoints in words."""
    if total == 1 or not hop.even:
        return ""
    percent = 100 * some / total
    return f"{percent:.0f} %" if percent >= 1 else "< 1 %"


def steps_of(flow: ExplainedFlow) -> Iterator[Step]:
    """Yield the decisions about a connection in words: the picture as text."""
    for hop in flow.hops:
        if hop.assumed:
            yield Step(hop.node, "the packets are assumed to arrive at this node")
        yield from (Step(hop.node, reason) for reason in hop.reasons)
        if hop.verdict == "forward" and not hop.even:
            text = "a scheduler, weights or a hash chooses the endpoint: shares are not known"
            yield Step(hop.node, text)


def _box(kind: Kind, place: tuple[float, float, float, float], lines: Sequence[str]) -> Box:
    """Return a box at x and y, of some width and height."""
    whole = [printable(line) for line in lines]
    most = int(_CHARACTERS * place[2] / _WIDTH)
    cut = tuple(shorten(line, most) for line in whole)
    return Box(kind, *place, lines=cut, whole="\n".join(whole))


def _frame(hop: Hop, before: Box | None, box: Box) -> Box:
    """Return the box of a node around one of its boxes, and around those that it has already."""
    left, top = box.x - _SPACE, box.y - _HEAD - _SPACE
    bottom = box.y + box.height + _SPACE
    if before is not None:
        left, top = before.x, min(before.y, top)
        bottom = max(before.y + before.height, bottom)
    width = box.x + box.width + _SPACE - left
    return _box("node", (left, top, width, bottom - top), [f"node {hop.node}"])


def shorten(text: str, most: int) -> str:
    """Cut a text in its middle: names of pods differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def to_svg(picture: Picture, name: str = "way", style: str = "") -> str:
    """Return a picture as an SVG element.

    Args:
        picture: the picture.
        name: start of its ids, if there are several on a page.
        style: a style sheet to put in; "" if the page has one.
    """
    size = f"{picture.width:g}", f"{picture.height:g}"
    described = " ".join(f"On node {step.node}: {step.text}." for step in picture.steps)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="way" role="img" width="{size[0]}"'
        f' height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}"'
        f' aria-labelledby="{name}-title {name}-text">',
        f'<title id="{name}-title">{escape(printable(picture.title))}</title>',
        f'<desc id="{name}-text">{escape(described)}</desc>',
    ]
    if style:
        out.append(f"<style>{escape(style, quote=False)}</style>")
    for box in picture.boxes:
        out += svg_box(box)
    for arrow in picture.arrows:
        out += svg_arrow(arrow)
    return "".join((*out, "</svg>"))


def svg_box(box: Box) -> Iterator[str]:
    """Yield a box, with its whole text for a pointer that rests on it."""
    yield f'<g class="way-box way-{box.kind}"><title>{escape(box.whole)}</title>'
    yield (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
        ' rx="7" fill="none" stroke="currentColor"/>'
    )
    y = box.y + _PAD + _LINE * 0.75
    for number, line in enumerate(box.lines):
        look = "" if number else ' class="way-name"'
        yield (
            f'<text x="{box.x + _PAD:g}" y="{y + number * _LINE:g}"{look} fill="currentColor">'
            f"{escape(line)}</text>"
        )
    yield "</g>"


def svg_arrow(arrow: Arrow) -> Iterator[str]:
    """Yield a curve with a head; markers would need ids."""
    (x1, y1), (x2, y2) = arrow.start, arrow.end
    bend = (x1 + x2) / 2
    look = " way-refused" if arrow.refused else ""
    yield (
        f'<g class="way-arrow{look}"><path d="M{x1:g} {y1:g}C{bend:g} {y1:g} {bend:g} {y2:g}'
        f' {x2 - 7:g} {y2:g}" fill="none" stroke="currentColor"/>'
        f'<path d="M{x2:g} {y2:g}l-8 -4v8z" fill="currentColor"/>'
    )
    if arrow.label:  # on the side that the curve does not come from
        y = y2 + 14 if y2 > y1 else y2 - 5
        yield (
            f'<text x="{x2 - 10:g}" y="{y:g}" text-anchor="end" fill="currentColor">'
            f"{arrow.label}</text>"
        )
    yield "</g>"
