// The route and the speed of an answer: as a row of small lights, and in words.

import { element } from "../ui/dom.js";

const MAX_HOPS = 200;
const MAX_LIGHTS = 12;

/** The hops of the gateway's `route` event as `[{blocks, peer, name}]`, all strings; null if there are none. */
export function readHops(hops) {
  if (!Array.isArray(hops) || !hops.length) return null;
  const text = (value) => (typeof value === "string" ? value.slice(0, 200) : "");
  const read = (hop) => ({ blocks: text(hop?.blocks), peer: text(hop?.peer), name: text(hop?.name) });
  return hops.slice(0, MAX_HOPS).map(read);
}

/** The numbers of the gateway's `done` event; unknown ones are absent. */
export function readFigures(event) {
  const names = ["tokens", "seconds", "tokens_per_second", "first_token_seconds"];
  return Object.fromEntries(names.filter((name) => Number.isFinite(event[name])).map((name) => [name, event[name]]));
}

/** One light for each hop, joined by lines. */
export function drawLights(route) {
  const lights = route.slice(0, MAX_LIGHTS).map(() => element("i"));
  return element("span", { class: "lights", "aria-hidden": "true" }, ...lights);
}

/** The details in words: hops, figures, recoveries. */
export function drawDetails({ route, figures, recoveries }) {
  const parts = [];
  if (route) parts.push(element("ol", { class: "hops" }, ...route.map(drawHop)));
  const lines = [];
  if (figures?.seconds !== undefined) lines.push(`${figures.tokens ?? 0} tokens in ${formatSeconds(figures.seconds)}`);
  if (figures?.first_token_seconds !== undefined) lines.push(`first after ${formatSeconds(figures.first_token_seconds)}`);
  if (recoveries?.length) lines.push(recoveryText(recoveries));
  if (lines.length) parts.push(element("p", { text: lines.join(" · ") }));
  return parts;
}

function drawHop({ blocks, peer, name }) {
  return element(
    "li",
    {},
    element("i", { "aria-hidden": "true" }),
    element("span", { class: "hop-name", text: name || "unnamed" }),
    element("span", { class: "hop-blocks", text: `blocks ${blocks}` }),
    element("code", { text: peer }),
  );
}

function recoveryText(recoveries) {
  const longest = Math.max(...recoveries);
  if (recoveries.length === 1) return `a server was lost and replaced within ${formatSeconds(longest)}`;
  return `${recoveries.length} servers were lost and replaced, each within ${formatSeconds(longest)}`;
}

/** A duration such as "70 ms", "1.2 s" or "2 min 5 s". */
export function formatSeconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}
