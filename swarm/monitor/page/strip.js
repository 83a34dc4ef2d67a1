// The strip of blocks, one cell per block, and below it the servers that hold them, as bars.

import { element, reconcile, setAttribute, setText } from "./dom.js";
import { blockSentence, serverName, stateOf } from "./words.js";

const MAX_BARS = 200;
const MAX_NUMBERED_CELLS = 40; // with more, cells are too narrow for a number

export class Strip {
  constructor() {
    this.cells = element("div", { class: "cells", role: "group", "aria-label": "Blocks" });
    this.axis = element("div", { class: "axis", "aria-hidden": "true" });
    this.lanes = element("div", { class: "lanes", "aria-hidden": "true" });
    this.sentence = element("p", { class: "sentence" });
    this.node = element("div", { class: "strip" }, this.cells, this.axis, this.lanes, this.sentence);
    this.model = null;
    this.pointed = null;
    this.cells.addEventListener("pointermove", ({ clientX }) => this.#point(this.#blockAt(clientX)));
    this.cells.addEventListener("pointerdown", ({ clientX }) => this.#point(this.#blockAt(clientX)));
    this.cells.addEventListener("pointerleave", () => this.#point(null));
    this.cells.addEventListener("focusin", ({ target }) => this.#point(target.itemKey ?? null));
    this.cells.addEventListener("focusout", () => this.#point(null));
    this.cells.addEventListener("keydown", (event) => this.#onKey(event));
  }

  update(model) {
    this.model = model;
    const blocks = model.coverage.map((_, block) => block);
    this.node.style.setProperty("--blocks", model.blocks);
    setAttribute(this.node, "data-many", model.blocks > MAX_NUMBERED_CELLS ? "" : null);
    const make = () => element("button", { type: "button", tabindex: "-1" });
    reconcile(this.cells, blocks, (block) => block, make, (cell, block) => this.#cell(cell, block));
    if (!this.cells.querySelector('[tabindex="0"]')) this.cells.firstElementChild?.setAttribute("tabindex", "0");
    this.#axis();
    this.#bars();
    this.#highlight();
  }

  #cell(cell, block) {
    const { servers, joining } = this.model.coverage[block];
    setText(cell, servers ? String(servers) : joining ? "…" : "×");
    setAttribute(cell, "data-level", levelOf(this.model, block));
    setAttribute(cell, "data-weakest", block === this.model.weakest ? "" : null);
    setAttribute(cell, "aria-label", blockSentence(this.model, block));
  }

  #axis() {
    const step = niceStep(this.model.blocks / 12);
    const ticks = [];
    for (let block = 0; block <= this.model.blocks - step / 2; block += step) ticks.push(block);
    reconcile(this.axis, ticks, (tick) => tick, () => element("span"), (node, tick) => {
      setText(node, String(tick));
      node.style.gridColumn = `${tick + 1} / span ${Math.min(step, this.model.blocks - tick)}`;
    });
  }

  #bars() {
    const shown = this.model.servers.filter(({ state }) => state !== "offline").slice(0, MAX_BARS);
    const rows = lanes(shown);
    reconcile(this.lanes, shown, (server) => server.peer_id, makeBar, (bar, server) => {
      setText(bar.firstElementChild, serverName(server));
      setAttribute(bar, "title", `${serverName(server)}, blocks ${server.start}:${server.end}: ${stateOf(server)}`);
      setAttribute(bar, "data-state", server.excluded ? "excluded" : server.state);
      bar.style.gridColumn = `${server.start + 1} / ${server.end + 1}`;
      bar.style.gridRow = String(rows.get(server.peer_id) + 1);
    });
  }

  #onKey(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const from = event.target.itemKey ?? 0;
    const block = Math.min(Math.max(from + move, 0), this.model.blocks - 1);
    for (const cell of this.cells.querySelectorAll('[tabindex="0"]')) cell.setAttribute("tabindex", "-1");
    this.cells.children[block].setAttribute("tabindex", "0");
    this.cells.children[block].focus();
  }

  /** The block at a position along the strip. It works even if cells are too narrow for a finger. */
  #blockAt(x) {
    const { left, width } = this.cells.getBoundingClientRect();
    return Math.min(Math.max(Math.floor(((x - left) / width) * this.model.blocks), 0), this.model.blocks - 1);
  }

  #point(block) {
    this.pointed = block;
    this.#highlight();
  }

  #highlight() {
    const block = this.pointed !== null && this.pointed < this.model.blocks ? this.pointed : null;
    const holders = this.model.servers.filter(({ start, end, state }) => block !== null && start <= block && block < end && state !== "offline");
    const holding = new Set(holders.map(({ peer_id }) => peer_id));
    for (const bar of this.lanes.children) setAttribute(bar, "data-holds", block === null ? null : holding.has(bar.itemKey));
    for (const cell of this.cells.children) setAttribute(cell, "data-pointed", cell.itemKey === block ? "" : null);
    const names = holders.slice(0, 8).map(serverName);
    if (holders.length > names.length) names.push(`and ${holders.length - names.length} more`);
    const hint = "Point at a block, or use the arrow keys, to see which servers hold it.";
    setText(this.sentence, block === null ? hint : blockSentence(this.model, block) + (names.length ? ` – ${names.join(", ")}` : ""));
  }
}

function makeBar() {
  return element("div", { class: "bar" }, element("span"));
}

/** The color level of a block: 0 missing, 1 loading, 2 (below half the median) to 6 (twice the median or more). */
export function levelOf(model, block) {
  const { servers, joining, throughput } = model.coverage[block];
  if (!servers) return joining ? 1 : 0;
  const share = model.median > 0 ? throughput / model.median : 1;
  return 2 + [0.5, 0.8, 1.25, 2].filter((bound) => share >= bound).length;
}

/** Assigns each server (by peer id) a row in which its bar overlaps no other bar, with as few rows as possible. Pure. */
export function lanes(servers) {
  const ends = [];
  const rows = new Map();
  const order = [...servers].sort((one, other) => one.start - other.start || other.end - one.end);
  for (const { peer_id, start, end } of order) {
    let row = ends.findIndex((taken) => taken <= start);
    if (row < 0) row = ends.length;
    ends[row] = end;
    rows.set(peer_id, row);
  }
  return rows;
}

/** The first of 1, 2, 5, 10, 20, ... that is at least `least`. */
export function niceStep(least) {
  for (let power = 1; ; power *= 10) for (const digit of [1, 2, 5]) if (digit * power >= least) return digit * power;
}

/** The legend of the colors. */
export function legend() {
  const names = [["0", "missing"], ["2", "below half the median"], ["4", "median"], ["6", "twice the median"]];
  return element("p", { class: "legend", "aria-hidden": "true" }, ...names.map(([level, text]) =>
    element("span", {}, element("i", { "data-level": level }), text)), element("span", {}, element("i", { class: "weakest" }), "weakest"));
}

