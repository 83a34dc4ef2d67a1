// The page: one card per model, kept up to date.

import { reconcile, setText } from "./dom.js";
import { Live, apiKey } from "./live.js";
import { ModelCard } from "./model.js";
import { ago, count } from "./words.js";

const byId = (id) => document.getElementById(id);
const cards = new Map();
let latest = null;
let connectionError = "";

function show(view) {
  latest = view;
  connectionError = "";
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
  const lines = view.absent.map((name) => `No server of this swarm serves ${name}.`);
  if (!view.models.length && !view.absent.length) {
    lines.push("This swarm has no servers yet. Start the first one with: swarm server MODEL --initial-peers ADDRESS");
  }
  if (view.left_out) lines.push(`${count(view.left_out, "more model is", "more models are")} announced but not shown.`);
  byId("empty").hidden = !lines.length;
  setText(byId("empty"), lines.join(" "));
}

/** Shows whether the data is up to date; `data-state` colors the dot. */
function showState() {
  const age = latest === null ? 0 : Date.now() / 1000 - latest.time;
  const isOld = latest !== null && age > 3 * latest.period + 60;
  const problem = connectionError || (latest?.problem ?? "") || (isOld ? `the swarm was last read ${ago(age)}` : "");
  byId("problem").hidden = !problem;
  setText(byId("problem"), problem && `This page may be out of date: ${problem}.`);
  byId("live").dataset.state = connectionError ? "lost" : problem ? "old" : latest ? "live" : "";
  setText(byId("live").lastElementChild, connectionError ? "reconnecting" : problem ? "stale" : latest ? "live" : "connecting");
}

const live = new Live({
  view: show,
  lost(reason) {
    connectionError = `no connection to the monitor (${reason}); trying again`;
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

// A gateway serves this page together with the chat page.
byId("chat").hidden = !location.pathname.endsWith("/monitor/");
setInterval(showState, 5000);
live.start();
