// Draws the map of traffic in each element with data-graph: dagre places the points, this draws them.
//
//   <div class="graph" data-graph="{{ answer.graph | json }}"></div>
//
// The attribute is a Graph of operate/traffic.py. Points with a page are links, so the map works
// with the keyboard; the table below it has the same for those who cannot see it.

import { graphlib, layout } from "./dagre.esm.min.js";

const SVG = "http://www.w3.org/2000/svg";
const CHARACTER = 7.2; // pixels, about
const HEIGHT = 42;
const LONGEST = 34; // characters
const drawn = new WeakMap(); // element: {text, svg}
let focused = ""; // address of the point that has the focus

function make(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function cut(text) {
  const half = LONGEST / 2 - 1;
  return text.length > LONGEST ? `${text.slice(0, half)}…${text.slice(-half)}` : text;
}

function rate(value) {
  return `${Number(value.toPrecision(3)).toLocaleString()}/s`;
}

// Returns the path of a stream through the points that dagre gives, with flat ends.
function path(from, to) {
  const [x1, y1, x2, y2] = [from.x + from.width / 2, from.y, to.x - to.width / 2, to.y];
  const bend = (x1 + x2) / 2;
  return `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`;
}

function place(graph) {
  const placed = new graphlib.Graph();
  placed.setGraph({ rankdir: "LR", nodesep: 14, ranksep: 130, marginx: 8, marginy: 8 });
  placed.setDefaultEdgeLabel(() => ({}));
  // Sorted: the picture must not change whenever another Service is ahead.
  for (const point of graph.points.toSorted((one, other) => one.id.localeCompare(other.id))) {
    const width = Math.max(140, cut(point.label).length * CHARACTER + 20);
    placed.setNode(point.id, { width, height: HEIGHT });
  }
  for (const stream of graph.streams) {
    placed.setEdge(stream.source, stream.target);
  }
  layout(placed);
  return placed;
}

// Returns what passes a point: what arrives there, or at a node what leaves it.
function passing(graph, point) {
  const end = point.kind === "node" ? "source" : "target";
  const streams = graph.streams.filter((stream) => stream[end] === point.id);
  const sum = (key) => streams.reduce((total, stream) => total + stream[key], 0);
  return told(sum("rate"), sum("failures"));
}

function told(connections, failures) {
  return failures > 0 ? `${rate(connections)}, ${rate(failures)} failed` : rate(connections);
}

function draw(graph) {
  const placed = place(graph);
  const { width = 0, height = 0 } = placed.graph();
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const most = Math.max(1e-9, ...graph.streams.map((stream) => stream.rate + stream.failures));
  for (const stream of graph.streams) {
    const share = (stream.rate + stream.failures) / most;
    svg.append(make("path", {
      d: path(placed.node(stream.source), placed.node(stream.target)),
      "stroke-width": (1 + 9 * Math.sqrt(share)).toFixed(1),
      ...(stream.failures > 0 ? { class: "bad" } : {}),
    }, make("title", {}, told(stream.rate, stream.failures))));
  }
  for (const point of graph.points) {
    const { x, y, width: wide } = placed.node(point.id);
    const text = passing(graph, point);
    const whole = cut(point.label) === point.label ? [] : [make("title", {}, point.label)];
    svg.append(make(
      point.href ? "a" : "g",
      point.href ? { href: point.href, class: point.kind } : { class: point.kind },
      ...whole,
      make("rect", { x: x - wide / 2, y: y - HEIGHT / 2, width: wide, height: HEIGHT, rx: 6 }),
      make("text", { x, y: y - 3, "text-anchor": "middle" }, cut(point.label)),
      " ",
      make("text", { x, y: y + 13, "text-anchor": "middle", class: "share" }, text),
    ));
  }
  return svg;
}

function follow() {
  for (const element of document.querySelectorAll("[data-graph]")) {
    const text = element.dataset.graph;
    const known = drawn.get(element);
    if (known?.text === text) {
      if (known.svg.parentNode !== element) element.replaceChildren(known.svg);
      continue;
    }
    const svg = draw(JSON.parse(text));
    drawn.set(element, { text, svg });
    element.replaceChildren(svg);
    if (focused && document.activeElement === document.body) {
      element.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    }
  }
}

// Putting the part in place takes the drawing out, and the focus with it: give it back.
document.addEventListener("focusin", ({ target }) => {
  focused = target.closest("[data-graph] a")?.getAttribute("href") ?? "";
});
document.addEventListener("pointerdown", () => { focused = ""; });
new MutationObserver(follow).observe(document.body, {
  subtree: true,
  childList: true,
  attributeFilter: ["data-graph"],
});
follow();
