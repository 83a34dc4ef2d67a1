// The servers of one model as a table that can be sorted by any column.

import { element, reconcile, setAttribute, setText } from "./dom.js";
import { audits, milliseconds, precision, rate, reach, serverName, stateOf, whole } from "./words.js";

/** `value` is what a column is sorted by, `text` what it shows; `number` columns begin with the largest. */
const COLUMNS = [
  { title: "Server", value: (s) => serverName(s).toLowerCase(), text: serverName, class: "name" },
  { title: "Blocks", value: (s) => s.start * 10_000 + s.end, text: (s) => `${s.start}:${s.end}` },
  { title: "Tokens/s", value: (s) => s.throughput, text: (s) => rate(s.throughput), number: true },
  { title: "Queue", value: (s) => s.queue, text: (s) => milliseconds(s.queue), number: true },
  { title: "Free cache", value: (s) => s.cache_tokens_free, text: (s) => whole(s.cache_tokens_free), number: true, hint: "tokens" },
  { title: "Round trip", value: (s) => s.round_trip ?? Infinity, text: (s) => milliseconds(s.round_trip), number: true },
  { title: "Reached", value: reach, text: reach },
  { title: "Precision", value: precision, text: precision },
  { title: "Version", value: (s) => s.version, text: (s) => s.version },
  { title: "Audits", value: (s) => -(s.audits?.suspicion ?? -1), text: audits },
  { title: "Adapters", value: (s) => s.adapters.join(), text: (s) => s.adapters.join(", ") || "–" },
  { title: "State", value: stateOf, text: stateOf, class: "state" },
];

export class ServerTable {
  constructor() {
    this.column = COLUMNS[1];
    this.isDescending = false;
    this.servers = [];
    this.heads = COLUMNS.map((column) => this.#head(column));
    this.body = element("tbody");
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    this.more = element("p", { class: "more" });
    this.node = element("div", { class: "table", role: "region", "aria-label": "Servers", tabindex: "0" }, table, this.more);
    this.#mark();
  }

  update(model) {
    this.servers = model.servers;
    const unlisted = model.servers_total - model.servers.length;
    setText(this.more, unlisted > 0 ? `and ${whole(unlisted)} more servers` : "");
    this.#draw();
  }

  #head(column) {
    const button = element("button", { type: "button", text: column.title, on: { click: () => this.#sortBy(column) } });
    return element("th", { scope: "col", class: column.number ? "number" : "" }, button);
  }

  #sortBy(column) {
    this.isDescending = column === this.column ? !this.isDescending : Boolean(column.number);
    this.column = column;
    this.#mark();
    this.#draw();
  }

  #mark() {
    COLUMNS.forEach((column, place) => {
      const order = this.isDescending ? "descending" : "ascending";
      setAttribute(this.heads[place], "aria-sort", column === this.column ? order : "none");
    });
  }

  #draw() {
    const rows = sorted(this.servers, this.column.value, this.isDescending);
    const make = () => element("tr", {}, ...COLUMNS.map(makeCell));
    reconcile(this.body, rows, (server) => server.peer_id, make, (row, server) => {
      setAttribute(row, "data-state", server.excluded ? "excluded" : server.state);
      COLUMNS.forEach((column, place) => setText(row.children[place].firstElementChild, column.text(server)));
      setText(row.children[0].children[1], server.name ? server.short_id : "");
      setAttribute(row.children[0], "title", server.peer_id);
      setAttribute(row.children[6], "data-relayed", server.relayed ? "" : null);
    });
  }
}

function makeCell(column) {
  const tag = column.class === "name" ? "th" : "td";
  const cell = element(tag, { class: `${column.class ?? ""} ${column.number ? "number" : ""}` }, element("span"));
  if (tag === "th") {
    cell.setAttribute("scope", "row");
    cell.append(element("small"));
  }
  return cell;
}

/** A sorted copy; equal rows are ordered by peer id, so that they do not jump. Pure. */
export function sorted(servers, value, isDescending) {
  const sign = isDescending ? -1 : 1;
  return [...servers].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a !== b) return a < b ? -sign : sign;
    return one.peer_id < other.peer_id ? -1 : 1;
  });
}
