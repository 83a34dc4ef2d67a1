// The last hours of one model: throughput of the weakest block, and servers, over one axis of time.

import { element, setAttribute, setText, shape } from "./dom.js";
import { fetchHistory } from "./live.js";
import { count, rate } from "./words.js";

const RANGES = [1, 6, 24]; // hours
const REFRESH = 30_000;
const HEIGHT = 120;
const LEFT = 44;
const BOTTOM = 18;
const TOP = 8;
const GAP = 4; // points that may be missing before the line is broken

const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hour12: false });

export class Plot {
  constructor(name) {
    this.name = name;
    this.hours = 6;
    this.data = null;
    this.fetched = -Infinity;
    this.buttons = RANGES.map((hours) =>
      element("button", { type: "button", text: `${hours} h`, on: { click: () => this.#choose(hours) } }));
    this.charts = [new Chart("Tokens/s of the weakest block", "throughput"), new Chart("Servers", "servers")];
    this.note = element("p", { class: "sentence" });
    const ranges = element("div", { class: "ranges", role: "group", "aria-label": "Hours shown" }, ...this.buttons);
    const heading = element("div", { class: "heading" }, element("h3", { text: "Last hours" }), ranges);
    const charts = element("div", { class: "charts" }, ...this.charts.map(({ node }) => node));
    this.node = element("section", { class: "plot" }, heading, charts, this.note);
    new ResizeObserver(() => this.#draw()).observe(this.node);
    this.#mark();
  }

  /** Fetches the history if it is out of date, and draws it. */
  async update() {
    if (performance.now() - this.fetched < REFRESH) return;
    this.fetched = performance.now();
    const hours = this.hours;
    try {
      const data = await fetchHistory(this.name, hours);
      if (hours === this.hours) this.data = data;
    } catch {
      return; // the page says that the monitor does not answer
    }
    this.#draw();
  }

  #choose(hours) {
    this.hours = hours;
    this.fetched = -Infinity;
    this.#mark();
    this.update();
  }

  #mark() {
    RANGES.forEach((hours, place) => setAttribute(this.buttons[place], "aria-pressed", hours === this.hours));
  }

  #draw() {
    const points = this.data?.time.length ?? 0;
    for (const chart of this.charts) chart.draw(this.data, this.hours);
    setText(this.note, points < 2 ? "The plot grows while the monitor runs: one point per minute." : this.#summary());
  }

  #summary() {
    const { covered, blocks, step } = this.data;
    const gap = covered.filter((number) => number < blocks).length * step;
    return gap ? `Blocks were missing for ${count(Math.round(gap / 60), "minute", "minutes")} of this time.` : "No blocks were missing during this time.";
  }
}

class Chart {
  constructor(title, column) {
    this.column = column;
    this.title = title;
    this.svg = shape("svg", { height: HEIGHT, role: "img" });
    this.value = element("span", { class: "value" });
    this.node = element("figure", {}, element("figcaption", {}, element("span", { text: title }), this.value), this.svg);
    this.svg.addEventListener("pointermove", ({ offsetX }) => this.#point(offsetX));
    this.svg.addEventListener("pointerleave", () => this.#point(null));
  }

  draw(data, hours) {
    const width = this.node.clientWidth;
    setAttribute(this.svg, "width", width);
    if (!data || !data.time.length || width < LEFT + 20) {
      this.scale = null;
      return this.svg.replaceChildren();
    }
    const values = data[this.column];
    const top = niceTop(Math.max(...values));
    const start = data.end - hours * 3600;
    const x = (time) => LEFT + ((time - start) / (hours * 3600)) * (width - LEFT - 6);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - TOP);
    this.scale = { data, values, x, y };
    this.cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.svg.replaceChildren(
      ...gridLines(top, width, y), ...hourMarks(start, data.end, hours, x), ...gaps(data, x), ...lines(data, values, x, y), this.cursor);
    setAttribute(this.svg, "aria-label", `${this.title}, now ${rate(values.at(-1))}, most ${rate(Math.max(...values))}, least ${rate(Math.min(...values))}`);
    this.#point(null);
  }

  #point(offset) {
    if (!this.scale) return setText(this.value, "");
    const { data, values, x } = this.scale;
    let place = values.length - 1;
    if (offset !== null) data.time.forEach((time, index) => {
      if (Math.abs(x(time) - offset) < Math.abs(x(data.time[place]) - offset)) place = index;
    });
    setAttribute(this.cursor, "visibility", offset === null ? "hidden" : "visible");
    for (const name of ["x1", "x2"]) setAttribute(this.cursor, name, x(data.time[place]).toFixed(1));
    const when = offset === null ? "now" : clock.format(data.time[place] * 1000);
    setText(this.value, `${when}: ${rate(values[place])}`);
  }
}

function gridLines(top, width, y) {
  return [0, top / 2, top].flatMap((value) => [
    shape("line", { class: "grid", x1: LEFT, x2: width - 6, y1: y(value), y2: y(value) }),
    shape("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, rate(value)),
  ]);
}

function hourMarks(start, end, hours, x) {
  const step = { 1: 900, 6: 5400, 24: 21_600 }[hours];
  const marks = [];
  for (let time = Math.ceil(start / step) * step; time <= end; time += step) {
    const anchor = x(time) > x(end) - 18 ? "end" : x(time) < LEFT + 18 ? "start" : "middle";
    marks.push(shape("text", { x: x(time).toFixed(1), y: HEIGHT - 3, "text-anchor": anchor }, clock.format(time * 1000)));
  }
  return marks;
}

/** Periods in which blocks were missing. */
function gaps(data, x) {
  return data.time.flatMap((time, place) => data.covered[place] >= data.blocks ? [] : [
    shape("rect", { class: "gap", x: x(time).toFixed(1), y: TOP, width: Math.max(1.5, x(time + data.step) - x(time)).toFixed(1), height: HEIGHT - BOTTOM - TOP }),
  ]);
}

function lines(data, values, x, y) {
  return runs(data.time, GAP * data.step).flatMap(([first, last]) => {
    const points = [];
    for (let place = first; place <= last; place++) points.push(`${x(data.time[place]).toFixed(1)},${y(values[place]).toFixed(1)}`);
    if (points.length === 1) return [shape("circle", { class: "point", cx: x(data.time[first]), cy: y(values[first]), r: 2.5 })];
    const [left, right] = [x(data.time[first]).toFixed(1), x(data.time[last]).toFixed(1)];
    const area = shape("path", { class: "area", d: `M${left},${y(0)}L${points.join("L")}L${right},${y(0)}Z` });
    return [area, shape("path", { class: "line", d: `M${points.join("L")}` })];
  });
}

/** Splits points into runs that are at most `most` seconds apart, as pairs of first and last index. Pure. */
export function runs(times, most) {
  const found = [];
  times.forEach((time, place) => {
    if (place && time - times[place - 1] <= most) found.at(-1)[1] = place;
    else found.push([place, place]);
  });
  return found;
}

/** The end of an axis: a round number that is at least the largest value. Pure. */
export function niceTop(largest) {
  const power = 10 ** Math.floor(Math.log10(Math.max(largest, 2)));
  return [1, 2, 3, 4, 5, 6, 8, 10].find((digit) => digit * power >= Math.max(largest, 2)) * power;
}
