// A stacked area chart over time, drawn by uPlot, with a legend, a text and a table of the same numbers.

import { element, setText } from "./text_format.js";

const PATTERNS = 4;
const SPOKEN_MS = 10000; // between two changes of the text for screen readers
const LEAST_S = 30; // shortest span of time that is shown

export const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A colour for the canvas, which cannot resolve light-dark().
function resolved(name) {
  const probe = element("span", { hidden: true });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found || colour(name);
}

// A tile with a layer's colour and pattern. The pattern distinguishes layers without colours.
function tile(layer) {
  const side = 8 * Math.ceil(devicePixelRatio);
  const canvas = element("canvas", { width: side, height: side });
  const draw = canvas.getContext("2d");
  draw.fillStyle = resolved(layer.colour);
  draw.fillRect(0, 0, side, side);
  draw.strokeStyle = "rgb(255 255 255 / .55)";
  draw.fillStyle = draw.strokeStyle;
  draw.lineWidth = side / 6;
  draw.beginPath();
  if (layer.pattern === 1) {
    for (const shift of [-side, 0, side]) {
      draw.moveTo(shift, side);
      draw.lineTo(shift + side, 0);
    }
  } else if (layer.pattern === 2) {
    draw.arc(side / 2, side / 2, side / 5, 0, 7);
    draw.fill();
    draw.beginPath();
  } else if (layer.pattern === 3) {
    draw.moveTo(0, side / 2);
    draw.lineTo(side, side / 2);
  }
  draw.stroke();
  return canvas;
}

// Range of the horizontal axis. uPlot's own range is empty for a single sample.
function span(plot) {
  const times = plot.data[0];
  const to = times.at(-1) ?? Date.now() / 1000;
  return [Math.min(times[0] ?? to, to - LEAST_S), to];
}

export const patternOf = (index) => Math.floor(index / 2) % PATTERNS;

export class StackChart {
  // label: title of the chart. format: function from a value to its text. steps: possible distances between two ticks of
  // the vertical axis, uPlot's by default.
  constructor(container, { label, format, steps, height = 240 }) {
    Object.assign(this, { label, format, steps, height, plot: null, shape: "", spokenMs: -Infinity });
    this.picture = element("div", { className: "plot", role: "img", ariaLabel: label });
    this.legend = element("ul", { className: "legend" });
    this.head = element("tr");
    this.body = element("tbody");
    this.details = element("details", {}, element("summary", {}, `${label} as a table`),
      element("div", { className: "scroll", tabindex: 0, role: "region", ariaLabel: `Table: ${label}` },
        element("table", {}, element("thead", {}, this.head), this.body)));
    this.head.append(...["layer", "now", "mean", "least", "most"].map((name, index) =>
      element("th", { scope: "col", className: index ? "number" : "" }, name)));
    container.append(this.picture, this.legend, this.details);
    new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: this.height })).observe(this.picture);
    this.details.addEventListener("toggle", () => this.fillTable());
  }

  width() {
    return Math.max(200, this.picture.clientWidth);
  }

  // Colours have changed.
  restyle() {
    this.shape = "";
    if (this.layers) this.draw(this.times, this.layers);
  }

  // times: seconds since 1970. layers, lowest first: {name, colour, pattern, values}; null is a gap.
  draw(times, layers) {
    Object.assign(this, { times, layers });
    const sums = [];
    let below = times.map(() => 0);
    for (const layer of layers) {
      below = below.map((sum, index) => (sum === null || layer.values[index] === null ? null : sum + layer.values[index]));
      sums.push(below);
    }
    const shape = JSON.stringify(layers.map((layer) => [layer.name, layer.colour, layer.pattern]));
    // The highest sum is painted first, and the lower ones over it.
    const data = [times, ...sums.reverse()];
    if (shape === this.shape) this.plot.setData(data);
    else this.build(shape, data);
    this.readout(null);
    this.speak();
    if (this.details.open) this.fillTable();
  }

  build(shape, data) {
    this.shape = shape;
    this.plot?.destroy();
    const tiles = this.layers.map(tile);
    const text = resolved("text");
    const grid = { stroke: resolved("line"), width: 1 };
    const series = this.layers.map((layer, index) => ({
      label: layer.name,
      stroke: resolved(layer.colour),
      width: 1,
      points: { show: false },
      paths: uPlot.paths.stepped({ align: 1 }),
      fill: (plot) => plot.ctx.createPattern(tiles[index], "repeat"),
    }));
    const axis = { stroke: text, grid, ticks: grid };
    this.plot = new uPlot({
      width: this.width(),
      height: this.height,
      legend: { show: false },
      cursor: { points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { range: span }, y: { range: (plot, low, high) => [0, high || 1] } },
      axes: [{ ...axis, space: 80, values: (plot, splits) => splits.map((at) => clock.format(at * 1000)) }, { ...axis, size: 60, ...(this.steps ? { incrs: this.steps } : {}), values: (plot, splits) => splits.map((value) => this.format(value)) }],
      series: [{}, ...series.reverse()],
      hooks: { setCursor: [(plot) => this.readout(plot.cursor.idx)] },
    }, data, this.picture);
    this.values = [];
    this.legend.replaceChildren(...this.layers.map((layer, index) => {
      const value = element("span", { className: "value" });
      this.values.push(value);
      return element("li", {}, tiles[index], element("span", { className: "name", title: layer.name }, layer.name), value);
    }));
  }

  // The legend's numbers: those under the pointer, else the newest.
  readout(index) {
    this.layers?.forEach((layer, number) => {
      const value = layer.values[index ?? layer.values.length - 1];
      setText(this.values[number], value === null || value === undefined ? "–" : this.format(value));
    });
  }

  speak() {
    if (performance.now() - this.spokenMs < SPOKEN_MS) return;
    this.spokenMs = performance.now();
    const parts = this.layers.map((layer) => `${layer.name} ${this.format(layer.values.at(-1) ?? 0)}`);
    this.picture.setAttribute("aria-label", `${this.label}, now: ${parts.join(", ") || "nothing yet"}. The table below has more.`);
  }

  fillTable() {
    if (!this.details.open || !this.layers) return;
    this.body.replaceChildren(...this.layers.map((layer) => {
      const known = layer.values.filter((value) => value !== null);
      const sum = known.reduce((total, value) => total + value, 0);
      const least = known.reduce((a, b) => Math.min(a, b), Infinity);
      const most = known.reduce((a, b) => Math.max(a, b), 0);
      const numbers = known.length ? [known.at(-1), sum / known.length, least, most].map(this.format) : ["–", "–", "–", "–"];
      return element("tr", {}, element("th", { scope: "row" }, layer.name), ...numbers.map((text) => element("td", { className: "number" }, text)));
    }));
  }
}
