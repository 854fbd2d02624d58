// Draws a chart in each element with data-chart, with uPlot.
//
//   <div class="chart" role="img" aria-label="..." data-chart="{{ chart | json }}" data-height="180">
//
// The attribute is a Chart of operate/answer.py: {times, series: [{label, values}], unit, kind,
// stacked}. A live part may replace it at any time: the chart follows. An element is empty in the
// HTML, so putting a live part in place takes its chart out; it is put back before the next frame.

const HEIGHT = 180; // pixels, unless data-height says otherwise
const COLOURS = 8; // --chart-1 to --chart-8 in app.css
const LEAST_SECONDS = 60; // that an axis shows, however few values there are yet
const LONGEST = 40; // characters of a label
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" }); // as the reader writes it
const drawn = new Map(); // element: {plot, text, chart}

function colour(style, index) {
  return style.getPropertyValue(`--chart-${(index % COLOURS) + 1}`).trim() || "gray";
}

function moment(seconds) {
  return seconds === null || seconds === undefined ? "-" : clock.format(new Date(seconds * 1000));
}

function shown(value, unit) {
  if (value === null || value === undefined) return "-";
  if (unit === "s") {
    if (value >= 10 || value === 0) return `${Math.round(value)} s`;
    if (value >= 1) return `${value.toFixed(1)} s`;
    if (value >= 0.001) return `${(value * 1000).toPrecision(3)} ms`;
    return `${(value * 1e6).toPrecision(3)} us`;
  }
  return `${Number(value.toPrecision(4)).toLocaleString()}${unit}`;
}

// The columns that uPlot draws: of stacked series, sums with the largest first, so that smaller
// ones are painted over them.
function columns(chart) {
  const values = chart.series.map((series) => series.values);
  if (!chart.stacked) return [chart.times, ...values];
  const sums = [];
  values.forEach((own, index) => {
    sums.push(own.map((value, at) => (value ?? 0) + (index ? sums[index - 1][at] : 0)));
  });
  return [chart.times, ...sums.reverse()];
}

function order(chart) {
  const indices = chart.series.map((_, index) => index);
  return chart.stacked ? indices.reverse() : indices;
}

function short(label) {
  return label.length > LONGEST ? `${label.slice(0, LONGEST / 2)}…${label.slice(1 - LONGEST / 2)}` : label;
}

function look(chart, stroke) {
  const paths = chart.kind === "bars" ? uPlot.paths.bars({ size: [0.8, 24, 2] }) : undefined;
  if (chart.kind === "points") {
    return { stroke, paths: () => null, points: { show: true, size: 5, fill: stroke } };
  }
  const filled = chart.kind === "bars" || chart.stacked;
  return { stroke, width: filled ? 0 : 1.5, paths, fill: filled ? stroke : undefined, points: { show: false } };
}

function draw(element, chart) {
  const style = getComputedStyle(element);
  const text = style.getPropertyValue("--dim").trim();
  const line = style.getPropertyValue("--line").trim();
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const series = order(chart).map((index) => ({
    label: short(chart.series[index].label),
    value: (plot, _value, _series, at) => {
      const found = drawn.get(element)?.chart.series[index];
      return shown(at === null ? null : found?.values[at], chart.unit);
    },
    ...look(chart, colour(style, index)),
  }));
  const options = {
    width: Math.max(element.clientWidth, 120),
    height: Number(element.dataset.height) || HEIGHT,
    cursor: { y: false, drag: { x: false, y: false } },
    legend: { live: true },
    scales: {
      x: { range: (_plot, low, high) => [Math.min(low, high - LEAST_SECONDS), high] },
      y: { range: (_plot, _low, high) => [0, high > 0 ? high * 1.1 : 1] },
    },
    axes: [
      { ...axis, space: 90, values: (_plot, ticks) => ticks.map(moment) },
      { ...axis, size: 64, values: (_plot, ticks) => ticks.map((tick) => shown(tick, chart.unit)) },
    ],
    series: [{ label: "Time", value: (_plot, value) => moment(value) }, ...series],
  };
  return new uPlot(options, columns(chart), element);
}

function sameSeries(one, other) {
  const labels = (chart) => JSON.stringify([chart.kind, chart.stacked, chart.unit, chart.series.map((each) => each.label)]);
  return labels(one) === labels(other);
}

function follow(element) {
  const text = element.dataset.chart;
  const known = drawn.get(element);
  if (known && known.text === text) {
    if (known.plot.root.parentNode !== element) element.append(known.plot.root);
    return;
  }
  const chart = JSON.parse(text);
  if (known && sameSeries(known.chart, chart)) {
    Object.assign(known, { text, chart });
    known.plot.setData(columns(chart));
    if (known.plot.root.parentNode !== element) element.append(known.plot.root);
    return;
  }
  known?.plot.destroy();
  drawn.set(element, { text, chart, plot: draw(element, chart) });
  sizes.observe(element);
}

function followAll() {
  for (const [element, { plot }] of drawn) {
    if (element.isConnected && element.dataset.chart !== undefined) continue;
    plot.destroy();
    sizes.unobserve(element);
    drawn.delete(element);
  }
  for (const element of document.querySelectorAll("[data-chart]")) follow(element);
}

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const plot = drawn.get(target)?.plot;
    const width = Math.max(target.clientWidth, 120);
    if (plot && plot.width !== width) plot.setSize({ width, height: plot.height });
  }
});

new MutationObserver(followAll).observe(document.body, {
  subtree: true,
  childList: true,
  attributeFilter: ["data-chart"],
});
// Colours are painted, not styled: paint again if the reader changes between light and dark.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [element, known] of drawn) {
    known.plot.destroy();
    drawn.set(element, { ...known, plot: draw(element, known.chart) });
  }
});
followAll();
