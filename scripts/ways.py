"""Draw a packet's way in each mode for docs/how.md: `python scripts/ways.py` writes docs/images.

Client, decision and endpoints are those of `explain` for the Services in demo/; each step is an
object that the mode renders for them. A step whose object is no longer rendered is an error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from steersman.config import parse_command_line
from steersman.operate.explain import Question, explain
from steersman.operate.explain_flow import CLIENTS, ExplainedFlow, FlowAnswer
from steersman.operate.load import load_world
from steersman.operate.picture import picture_of
from tests.support.modes.ipvs import IPVS
from tests.support.modes.registry import MODES

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
FLAGS = ["--cluster-cidr", "10.244.0.0/16", "--hostname-override", "node-a"]
QUESTIONS = {
    "pod": Question(client="shop/web-1", to="shop/web:http"),
    "outside": Question(client="outside", to="node-a:30080"),
}
STYLE = """
svg { background: #fff; color: #1f2328; font: 13px/1 system-ui, sans-serif; }
.way-box rect { stroke: #656d76; } .way-node rect { fill: #f6f8fa; stroke: #d0d7de; }
.way-rule rect { fill: #fff; stroke: #0969da; } .way-endpoint rect { stroke: #1a7f37; }
.way-name { font-weight: 650; } .way-arrow { color: #656d76; }
@media (prefers-color-scheme: dark) {
svg { background: #0d1117; color: #e6edf3; } .way-node rect { fill: #161b22; stroke: #30363d; }
.way-rule rect { fill: #0d1117; stroke: #4493f8; } .way-endpoint rect { stroke: #3fb950; }
}
"""
_WIDE, _CARD, _GAP, _EDGE = 560.0, 210.0, 26.0, 14.0
_LINE, _PAD = 18.0, 9.0


class Box(NamedTuple):
    """A box with lines of text; that of a node surrounds others."""

    kind: str
    x: float
    y: float
    width: float
    lines: Sequence[str]
    around: float = 0.0
    """Height of a box that surrounds others."""

    @property
    def height(self) -> float:
        return self.around or 2 * _PAD + _LINE * len(self.lines)

    @property
    def bottom(self) -> float:
        return self.y + self.height


class Step(NamedTuple):
    """A step of a packet on its way through a node."""

    place: str
    """Where in the kernel, or which program."""
    pattern: str
    """Matches the rendered objects of shop/web; "" if the step has no object of its own."""
    name: str
    """The first line; {0} stands for the first group of the pattern."""
    text: str


_LATER = "the packets that follow are translated by conntrack, without a rule"
_SVC = Step(
    "", r"-A (KUBE-SVC-\w+) .*--probability", "{0}", "one rule for each endpoint: at random"
)
_SEP = Step("", r"-A (KUBE-SEP-\w+) .*-j DNAT", "{0}", f"DNAT to the endpoint; {_LATER}")
_SERVER = "chooses by its scheduler and rewrites the destination"
_MASQUERADE = "masquerades: the endpoint answers to this node"

WAYS: dict[tuple[str, str], tuple[Step, ...]] = {
    ("iptables", "pod"): (
        Step(
            "nat PREROUTING",
            r"-A (KUBE-SERVICES) -d 10.96.0.10/32 .*--dport 80 ",
            "{0}",
            "compares address and port, one Service after the other",
        ),
        _SVC,
        _SEP,
    ),
    ("iptables", "outside"): (
        Step(
            "nat PREROUTING", r"-A (KUBE-NODEPORTS) .*--dport 30080", "{0}", "matches the node port"
        ),
        Step("", r"-A (KUBE-EXT-\w+) .*KUBE-MARK-MASQ", "{0}", "marks the packet for masquerading"),
        _SVC,
        _SEP,
        Step("nat POSTROUTING", "", "KUBE-POSTROUTING", _MASQUERADE),
    ),
    ("nftables", "pod"): (
        Step(
            "nat-prerouting",
            r"(service-ips) \{ 10.96.0.10 . tcp . 80",
            "map {0}",
            "one look-up, however many Services there are",
        ),
        Step("", r"10.96.0.10 .*goto ([\w-]+)", "{0}", "draws the number of a slot"),
        Step(
            "",
            r"(service-endpoints) \{ 10.96.0.10",
            "map {0}",
            f"DNAT to the endpoint; {_LATER}",
        ),
    ),
    ("nftables", "outside"): (
        Step("nat-prerouting", r"(service-nodeports) \{ tcp . 30080", "map {0}", "one look-up"),
        Step("", r"30080 .*goto ([\w-]+)", "{0}", "marks the packet, draws the number of a slot"),
        Step("", r"(nodeport-endpoints) \{ tcp", "map {0}", f"DNAT to the endpoint; {_LATER}"),
        Step("nat-postrouting", "", "mark 0x4000", _MASQUERADE),
    ),
    ("ipvs", "pod"): (
        Step(
            "INPUT",
            r"-A -t (10.96.0.10:80) -s (?:rr)",
            "virtual server {0}",
            f"its address is on kube-ipvs0; IPVS {_SERVER}",
        ),
        Step(
            "",
            r"-a -t 10.96.0.10:80 -r \S+ (-m)",
            "real server, {0}",
            "IPVS does the same to the packets that follow",
        ),
    ),
    ("ipvs", "outside"): (
        Step(
            "nat PREROUTING",
            r"add (KUBE-IPVS-OUTSIDE-MASQ) 192.0.2.1,6:30080",
            "ipset {0}",
            "marks the connection for masquerading",
        ),
        Step("INPUT", r"-A -t (192.0.2.1:30080)", "virtual server {0}", f"IPVS {_SERVER}"),
        Step(
            "",
            r"-a -t 192.0.2.1:30080 -r \S+ (-m)",
            "real server, {0}",
            "IPVS does the same to the packets that follow",
        ),
        Step("nat POSTROUTING", "", "KUBE-IPVS-POSTROUTING", _MASQUERADE),
    ),
    ("ebpf", "pod"): (
        Step(
            "connect() of the pod",
            r"(frontend 10.96.0.10:80)/TCP",
            "map entry {0}",
            "found once, when the socket connects",
        ),
        Step(
            "",
            r"(service shop/web:http) ",
            "map entry {0}",
            "the socket gets the endpoint's address: no packet is rewritten",
        ),
    ),
    ("ebpf", "outside"): (
        Step(
            "ingress of the device",
            r"(frontend node port 30080)/TCP",
            "map entry {0}",
            "found for the first packet",
        ),
        Step("", r"(service shop/web:http) ", "map entry {0}", "chooses the endpoint"),
        Step(
            "",
            "",
            "flow",
            "rewrites this and all later packets; masquerades them, without conntrack",
        ),
    ),
    ("userspace", "pod"): (
        Step(
            "nat PREROUTING",
            r"(portal 10.96.0.10 80)/TCP",
            "{0}",
            "leads the connection to a socket of steersman",
        ),
        Step(
            "steersman",
            r"(listener 10.96.0.10 80)/TCP",
            "{0}",
            "accepts, and dials an endpoint; if it fails, the next one",
        ),
        Step("steersman", "", "second connection", "passes bytes on; the endpoint sees this node"),
    ),
    ("userspace", "outside"): (
        Step(
            "steersman",
            r"(listener node port 192.0.2.1 30080)/TCP",
            "{0}",
            "accepts, and dials an endpoint; if it fails, the next one",
        ),
        Step("steersman", "", "second connection", "passes bytes on; the endpoint sees this node"),
    ),
}


def ask(mode: str, way: str) -> tuple[ExplainedFlow, str]:
    """Return what `explain` says of a way, and the objects that a mode renders for shop/web."""
    argv = ["--manifests", str(ROOT / "demo"), "--proxy-mode", mode, *FLAGS]
    parsed = parse_command_line(argv)

    async def answer() -> tuple[ExplainedFlow, str]:
        world = await load_world(parsed)
        explained = await explain(world, QUESTIONS[way], parsed.config)
        assert isinstance(explained, FlowAnswer)
        return explained.flows[0], {**MODES, "ipvs": IPVS}[mode].golden(world.plan)

    return asyncio.run(answer())


def draw(mode: str, way: str) -> str:
    """Return the picture of a way as SVG; raise LookupError if the mode lacks an object."""
    flow, rendered = ask(mode, way)
    steps = WAYS[mode, way]
    texts = [(f"{step.place}: " if step.place else "") + named(step, rendered) for step in steps]
    (hop,) = flow.hops
    client = CLIENTS.get(flow.client, flow.client)
    where = f"to {flow.destination}, {flow.protocol} port {flow.port}"
    boxes = [(text, step.text) for step, text in zip(steps, texts, strict=True)]
    ends = [(each.pod, each.address, f"on {each.node}") for each in hop.endpoints]
    described = "; ".join((*texts, *hop.reasons))
    return svg(f"{mode} mode: {flow.headline.text}", described, (client, where), boxes, ends)


def decision() -> str:
    """Return the picture of the README: the decision about a way from outside, in every mode."""
    flow, _ = ask("nftables", "outside")
    picture = picture_of(flow)
    client, node, last = picture.stages
    ends = [(*each.lines, each.share) for each in last.boxes]
    described = "; ".join(step.text for step in picture.steps)
    return svg(
        picture.title, described, client.boxes[0].lines, [each.lines for each in node.boxes], ends
    )


def svg(
    title: str,
    described: str,
    client: Sequence[str],
    steps: Sequence[Sequence[str]],
    ends: Sequence[Sequence[str]],
) -> str:
    """Draw the client, below it the steps on node-a, and below these the endpoints in a row."""
    wide = max(_WIDE, len(ends) * (_CARD + _EDGE) - _EDGE)
    boxes = [Box("client", 3 * _EDGE, _EDGE, wide, client)]
    top = boxes[0].bottom + _GAP
    y = top + _LINE + _EDGE
    for lines in steps:
        boxes.append(Box("rule", 3 * _EDGE, y, wide, lines))
        y = boxes[-1].bottom + _GAP
    frame = Box("node", 2 * _EDGE, top, wide + 2 * _EDGE, ["node node-a"], y - _GAP + _EDGE - top)
    y += _EDGE
    last = [
        Box("endpoint", 3 * _EDGE + n * (_CARD + _EDGE), y, _CARD, lines)
        for n, lines in enumerate(ends)
    ]
    size = f"{wide + 6 * _EDGE:g}", f"{last[0].bottom + _EDGE:g}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{size[0]}" height="{size[1]}"'
        f' viewBox="0 0 {size[0]} {size[1]}" aria-labelledby="title text">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="text">{escape(described)}</desc>',
        f"<style>{STYLE}</style>",
    ]
    for box in (frame, *boxes, *last):
        out += _box(box)
    for start, end in pairwise(boxes):
        out.append(_arrow(start, end))
    out += [_arrow(boxes[-1], end) for end in last]
    return "\n".join((*out, "</svg>", ""))


def named(step: Step, rendered: str) -> str:
    """Return the name of a step, with that of its object."""
    if not step.pattern:
        return step.name
    found = re.search(step.pattern, "\n".join(_own(rendered)))
    if found is None:
        raise LookupError(f"nothing that is rendered matches {step.pattern}")
    return step.name.format(*found.groups())


def _own(rendered: str) -> Iterator[str]:
    """Yield the lines about shop/web."""
    return (line for line in rendered.split("\n") if "cart" not in line and ".0.20" not in line)


def _box(box: Box) -> Iterator[str]:
    yield f'<g class="way-box way-{box.kind}"><title>{escape(chr(10).join(box.lines))}</title>'
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


def _arrow(start: Box, end: Box) -> str:
    """Return an arrow from the lower edge of a box to the upper edge of another."""
    x, y = end.x + end.width / 2, end.y
    return (
        f'<g class="way-arrow"><path d="M{x:g} {start.bottom:g}V{y - 7:g}" fill="none"'
        f' stroke="currentColor"/><path d="M{x:g} {y:g}l-4 -8h8z" fill="currentColor"/></g>'
    )


def made() -> dict[str, str]:
    """Return every picture by the name of its file."""
    drawn = {f"way-{mode}-{way}.svg": draw(mode, way) for mode, way in WAYS}
    return {**drawn, "way.svg": decision()}


if __name__ == "__main__":
    for name, text in made().items():
        (IMAGES / name).write_text(text)
