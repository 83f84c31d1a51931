// Curves as SVG, drawn by hand: a band from the lowest to the highest value of each bucket of
// steps, its smoothed mean, dots for validation, dashed lines for restarts.
//
//   value -> pixel     y = top + (1 - (v - low) / (high - low)) * height      (log: of ln v)
//   smoothing s        m_i = s m_(i-1) + (1 - s) y_i,  divided by 1 - s^(i+1): unbiased at once

import { el, svg } from "./dom.js";
import { number, whole } from "./format.js";

export const COLORS = 8; // the classes series-0 to series-7 of style.css; then the same ones, dashed
const MARGIN = { top: 14, right: 36, bottom: 34, left: 58 };
const MOST_BANDS = 6; // more of them hide each other
const MOST_IN_TIP = 10;
const ENOUGH = 8; // ticks that are asked for: at least three come
const SHORTEST_DRAG = 8; // pixels

export function smoothed(values, s) {
  if (!s) return values;
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    mean = s * mean + (1 - s) * value;
    weight = s * weight + (1 - s);
    return mean / weight;
  });
}

// About `count` round numbers from low to high.
function ticksOf(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    ticks.push(i * step);
  }
  return ticks;
}

// 1, 2 and 5 of each power of ten; of many powers only these.
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const factors = last - first > 3 ? [1] : [1, 2, 5];
  const ticks = [];
  for (let power = first; power <= last; power++) {
    for (const factor of factors) ticks.push(factor * 10 ** power);
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  return inside.length > 2 ? inside : ticksOf(low, high, ENOUGH);
}

// The lowest and highest of several lists of numbers.
function extent(lists, isUsable) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (!isUsable(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low > high ? null : [low, high];
}

// [low, high] of an axis: with some air, and never empty.
function widened([low, high], isLog) {
  if (isLog) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
  const air = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
  return [low - air, high + air];
}

export class Chart {
  // label: what the curves show, for those who do not see them.
  constructor(container, label) {
    this.series = [];
    this.options = {};
    this.zoom = null; // [low, high] of what is shown, if that is not all
    this.svg = svg("svg", { "aria-hidden": "true" });
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    this.box = el("div", {
      class: "plot",
      tabindex: "0",
      role: "group",
      "aria-label": `${label}: the arrow keys read values, + and - zoom`,
      onpointerdown: (event) => { this.dragged = this.at(event.clientX); },
      onpointermove: (event) => this.pointAt(event.clientX),
      onpointerup: (event) => this.drop(event.clientX),
      ondblclick: () => this.zoomTo(null),
      onpointerleave: () => this.pointAway(),
      onblur: () => this.pointAway(),
      onkeydown: (event) => this.pointByKey(event),
    }, this.svg, this.tip);
    container.append(this.box);
    this.observer = new ResizeObserver(() => this.drawSoon());
    this.observer.observe(this.box);
  }

  // series: [{name, color, x, low, mean, high, val: {x, y}, restarts: [{x, label}]}].
  // options: {log, smoothing, xLabel}
  show(series, options = {}) {
    if (options.xLabel !== this.options.xLabel) this.zoom = null;
    this.series = series;
    this.options = options;
    this.drawSoon();
  }

  // At the next frame, once: a slider may ask more often than a screen can show.
  drawSoon() {
    if (this.isAwaited) return;
    this.isAwaited = true;
    requestAnimationFrame(() => {
      this.isAwaited = false;
      this.draw();
    });
  }

  draw() {
    this.width = this.box.clientWidth;
    this.height = this.box.clientHeight;
    if (!this.width) return;
    this.isUsable = this.options.log ? (v) => v > 0 : (v) => Number.isFinite(v);
    for (const one of this.series) one.line = smoothed(one.mean, this.options.smoothing);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    if (!this.setScales()) {
      const place = { class: "tick middle", x: this.width / 2, y: this.height / 2 };
      const words = this.series.length ? "no values to draw" : "";
      this.svg.replaceChildren(svg("text", place, words));
      this.cursor = null;
      return;
    }
    this.selection = svg("rect", { class: "selection", y: MARGIN.top, height: 9e3 });
    this.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: this.bottom, x1: -9, x2: -9 });
    this.svg.replaceChildren(
      ...this.axes(),
      ...(this.series.length <= MOST_BANDS ? this.series.map((one) => this.band(one)) : []),
      ...this.series.flatMap((one) => this.restarts(one)),
      ...this.series.map((one) => this.line(one)),
      ...this.series.flatMap((one) => this.dots(one)),
      this.selection,
      this.cursor,
    );
    if (this.pointed !== undefined && !this.tip.hidden) this.read(this.pointed);
  }

  // The ranges of both axes. False if there is nothing to draw.
  setScales() {
    const withBands = this.series.length <= MOST_BANDS;
    const xs = extent(this.series.flatMap((one) => [one.x, one.val.x]), Number.isFinite);
    if (!xs) return false;
    this.xs = this.zoom ?? (xs[0] === xs[1] ? [xs[0] - 1, xs[1] + 1] : xs);
    const seen = (at, values) => values.filter((_, i) => this.isInside(at[i]));
    const ys = extent(this.series.flatMap((one) => [
      ...(withBands ? [seen(one.x, one.low), seen(one.x, one.high)] : []),
      seen(one.x, one.line),
      seen(one.val.x, one.val.y),
    ]), this.isUsable);
    if (!ys) return false;
    this.ys = widened(ys, this.options.log);
    this.right = this.width - MARGIN.right;
    this.bottom = this.height - MARGIN.bottom;
    return true;
  }

  isInside(x) {
    return x >= this.xs[0] && x <= this.xs[1];
  }

  x(value) {
    const [low, high] = this.xs;
    return MARGIN.left + ((value - low) / (high - low)) * (this.right - MARGIN.left);
  }

  y(value) {
    const f = this.options.log ? Math.log : (v) => v;
    const low = f(this.ys[0]);
    const high = f(this.ys[1]);
    return this.bottom - ((f(value) - low) / (high - low)) * (this.bottom - MARGIN.top);
  }

  axes() {
    const nodes = [];
    const ys = this.options.log ? logTicks(...this.ys) : ticksOf(...this.ys, ENOUGH);
    for (const tick of ys) {
      const y = this.y(tick).toFixed(1);
      nodes.push(svg("line", { class: "rule", x1: MARGIN.left, x2: this.right, y1: y, y2: y }));
      const place = { class: "tick end", x: MARGIN.left - 8, y, dy: "0.32em" };
      nodes.push(svg("text", place, number(Number(tick.toPrecision(12)))));
    }
    const count = Math.max(2, Math.floor(this.width / 110));
    for (const tick of ticksOf(...this.xs, count).filter(Number.isInteger)) {
      const place = { class: "tick middle", x: this.x(tick).toFixed(1), y: this.bottom + 16 };
      nodes.push(svg("text", place, whole(tick)));
    }
    const ends = { x1: MARGIN.left, x2: this.right, y1: this.bottom, y2: this.bottom };
    nodes.push(svg("line", { class: "axis", ...ends }));
    const label = { class: "tick end", x: this.right, y: this.height - 4 };
    nodes.push(svg("text", label, this.options.xLabel ?? "step"));
    return nodes;
  }

  // "x,y x,y ..." of the values that can be drawn.
  points(xs, ys) {
    const points = [];
    for (let i = 0; i < xs.length; i++) {
      if (!this.isUsable(ys[i]) || !this.isInside(xs[i])) continue;
      points.push(`${tenths(this.x(xs[i]))},${tenths(this.y(ys[i]))}`);
    }
    return points;
  }

  line(one) {
    const points = this.points(one.x, one.line);
    if (points.length === 1) {
      const [cx, cy] = points[0].split(",");
      return svg("circle", { class: `dot ${colorOf(one)}`, cx, cy, r: 3 });
    }
    return svg("polyline", { class: `line ${colorOf(one)}`, points: points.join(" ") });
  }

  band(one) {
    const there = this.points(one.x, one.high);
    const back = this.points(one.x, one.low).reverse();
    return svg("polygon", { class: `band ${colorOf(one)}`, points: [...there, ...back].join(" ") });
  }

  dots(one) {
    return this.points(one.val.x, one.val.y).map((point) => {
      const [cx, cy] = point.split(",");
      return svg("circle", { class: `dot ${colorOf(one)}`, cx, cy, r: 3.2 });
    });
  }

  restarts(one) {
    return one.restarts.filter(({ x }) => this.isInside(x)).map(({ x, label }) => {
      const ends = { x1: this.x(x), x2: this.x(x), y1: MARGIN.top, y2: this.bottom };
      return svg("line", { class: `restart ${colorOf(one)}`, ...ends }, svg("title", {}, label));
    });
  }

  // The value of the axis at a place on the screen; undefined if nothing is drawn.
  at(clientX) {
    if (!this.cursor) return undefined;
    const pixel = clientX - this.box.getBoundingClientRect().left;
    const share = (pixel - MARGIN.left) / (this.right - MARGIN.left);
    return this.xs[0] + Math.min(1, Math.max(0, share)) * (this.xs[1] - this.xs[0]);
  }

  pointAt(clientX) {
    if (!this.cursor) return;
    const here = this.at(clientX);
    this.read(here);
    if (this.dragged === undefined) return;
    const [left, right] = [this.x(this.dragged), this.x(here)].sort((a, b) => a - b);
    this.selection.setAttribute("x", left);
    this.selection.setAttribute("width", right - left);
  }

  // A part of the axis was dragged over: it is shown alone.
  drop(clientX) {
    const ends = [this.dragged, this.at(clientX)].sort((a, b) => a - b);
    this.dragged = undefined;
    this.selection?.setAttribute("width", 0);
    if (this.x(ends[1]) - this.x(ends[0]) > SHORTEST_DRAG) this.zoomTo(ends);
  }

  // range: [low, high], null for all.
  zoomTo(range) {
    this.zoom = range;
    this.pointAway();
    this.drawSoon();
  }

  pointByKey(event) {
    const moves = { ArrowLeft: -0.02, ArrowRight: 0.02 };
    const spans = { "+": 0.25, "-": 1 }; // a half, twice as much, on both sides of a value
    if (event.key === "Escape") this.zoomTo(null);
    if (!this.cursor || !(event.key in moves || event.key in spans)) return;
    event.preventDefault();
    const [low, high] = this.xs;
    const now = this.pointed ?? (event.key in moves ? high : (low + high) / 2);
    const span = spans[event.key] * (high - low);
    if (span) return this.zoomTo([now - span, now + span]);
    this.read(Math.min(high, Math.max(low, now + moves[event.key] * (high - low))));
  }

  pointAway() {
    this.pointed = undefined;
    this.dragged = undefined;
    this.tip.hidden = true;
    this.cursor?.setAttribute("x1", -9);
    this.cursor?.setAttribute("x2", -9);
  }

  // Show the values next to a step.
  read(step) {
    const found = this.series.filter((one) => one.x.length).map((one) => {
      const i = nearest(one.x, step);
      const j = nearest(one.val.x, step);
      const val = j < 0 ? "" : ` (validation ${number(one.val.y[j])})`;
      return { one, step: one.x[i], value: `${number(one.line[i])}${val}` };
    });
    if (!found.length) return;
    this.pointed = step;
    const at = found.reduce((a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a));
    const x = this.x(at.step);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    this.tip.replaceChildren(
      el("strong", {}, `${this.options.xLabel ?? "step"} ${whole(at.step)}`),
      ...found.slice(0, MOST_IN_TIP).map(({ one, value }) => el(
        "div", {}, el("span", { class: `swatch ${colorOf(one)}` }), `${value} ${one.name}`,
      )),
    );
    this.tip.hidden = false;
    const isLeft = x < this.width / 2;
    this.tip.style.left = isLeft ? `${x + 12}px` : "auto";
    this.tip.style.right = isLeft ? "auto" : `${this.width - x + 12}px`;
  }
}

// The classes by which style.css gives a series its color.
export const colorOf = ({ color }) => `series-${color % COLORS}${color < COLORS ? "" : " again"}`;

// A pixel with one digit: toFixed takes five times as long.
const tenths = (value) => Math.round(value * 10) / 10;

// The index of the sorted number nearest to a value; -1 if there is none.
export function nearest(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle;
    else high = middle;
  }
  return value - sorted[low] <= sorted[high] - value ? low : high;
}
