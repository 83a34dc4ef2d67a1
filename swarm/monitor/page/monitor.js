// The page: a card a model, kept up to date by the live stream.

import { reconcile, setText } from "./dom.js";
import { Live, apiKey } from "./live.js";
import { ModelCard } from "./model.js";
import { ago, count } from "./words.js";

const byId = (id) => document.getElementById(id);
const cards = new Map();
let latest = null;
let trouble = "";

function show(view) {
  latest = view;
  trouble = "";
  reconcile(byId("models"), view.models, (model) => model.name, makeCard, (_, model) => cards.get(model.name).update(model));
  for (const name of cards.keys()) if (!view.models.some((model) => model.name === name)) cards.delete(name);
  showEmpty(view);
  byId("key-form").hidden = true;
  showState();
}

function makeCard(model) {
  const card = new ModelCard(model);
  cards.set(model.name, card);
  return card.node;
}

function showEmpty(view) {
  const lines = view.absent.map((name) => `Nobody in this swarm serves ${name}.`);
  if (!view.models.length && !view.absent.length) {
    lines.push("Nobody serves a model in this swarm yet. The first server starts with: swarm server MODEL --initial-peers ADDRESS");
  }
  if (view.left_out) lines.push(`${count(view.left_out, "more model is", "more models are")} announced than this monitor shows.`);
  byId("empty").hidden = !lines.length;
  setText(byId("empty"), lines.join(" "));
}

/** How fresh what is shown is; `data-state` colours the dot. */
function showState() {
  const age = latest === null ? 0 : Date.now() / 1000 - latest.time;
  const isOld = latest !== null && age > 3 * latest.period + 60;
  const problem = trouble || (latest?.problem ?? "") || (isOld ? `the last look at the swarm was ${ago(age)}` : "");
  byId("problem").hidden = !problem;
  setText(byId("problem"), problem && `What is shown may be old: ${problem}.`);
  byId("live").dataset.state = trouble ? "lost" : problem ? "old" : latest ? "live" : "";
  setText(byId("live").lastElementChild, trouble ? "reconnecting" : problem ? "stale" : latest ? "live" : "connecting");
}

const live = new Live({
  view: show,
  lost(reason) {
    trouble = `no connection to the monitor (${reason}); trying again`;
    showState();
  },
  needsKey() {
    byId("key-form").hidden = false;
    byId("key").focus();
  },
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.keep(byId("key").value.trim());
  byId("key").value = "";
  live.start();
});

// Beside the chat page, if this page is a part of a gateway.
byId("chat").hidden = !location.pathname.endsWith("/monitor/");
setInterval(showState, 5000);
live.start();
