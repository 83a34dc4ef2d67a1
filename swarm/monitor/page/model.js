// The card of one model: throughput, missing blocks with commands to serve them, all blocks, history, servers.

import { element, reconcile, setAttribute, setText } from "./dom.js";
import { Plot } from "./plot.js";
import { Strip, legend } from "./strip.js";
import { ServerTable } from "./table.js";
import { count, missingSentence, rate } from "./words.js";

export class ModelCard {
  constructor(model) {
    this.strip = new Strip();
    this.plot = new Plot(model.name);
    this.table = new ServerTable();
    this.name = element("h2", { text: model.name });
    this.facts = element("p", { class: "facts" });
    this.figure = element("strong");
    this.unit = element("span");
    this.sentence = element("p");
    this.commands = element("div", { class: "commands" });
    this.hint = element("p", { class: "hint" });
    this.missing = element("div", { class: "missing", role: "alert" }, this.sentence, this.commands, this.hint);
    const head = element("div", { class: "head" }, element("div", { class: "title" }, this.name, this.facts),
      element("p", { class: "figure" }, this.figure, this.unit));
    const servers = element("section", { class: "servers" }, element("h3", { text: "Servers" }), this.table.node);
    this.node = element("article", { class: "card", "aria-label": model.name },
      head, this.missing, this.strip.node, legend(), this.plot.node, servers);
  }

  update(model) {
    setAttribute(this.node, "data-complete", model.complete);
    const servers = count(model.servers_online, "server", "servers");
    setText(this.facts, `${count(model.blocks, "block", "blocks")} · ${servers} · ${model.revision}`);
    setText(this.figure, model.complete ? rate(model.throughput) : String(missingBlocks(model)));
    setText(this.unit, model.complete ? unitOf(model) : missingBlocks(model) === 1 ? "block is missing" : "blocks are missing");
    this.#missing(model);
    this.strip.update(model);
    this.table.update(model);
    this.plot.update();
  }

  #missing(model) {
    const sentence = missingSentence(model);
    this.missing.hidden = sentence === null;
    setText(this.sentence, sentence ?? "");
    const commands = model.missing.map(({ command }) => command).filter((command) => command !== null).slice(0, 5);
    reconcile(this.commands, commands, (command) => command, makeCommand, () => {});
    setText(this.hint, commands.some((command) => command.endsWith(" ADDRESS")) ? "Replace ADDRESS with the address of any peer of this swarm." : "");
  }
}

function missingBlocks(model) {
  return model.missing.reduce((sum, { start, end }) => sum + end - start, 0);
}

function unitOf(model) {
  return model.weakest === null ? "tokens/s at every block" : `tokens/s at the weakest block, ${model.weakest}`;
}

function makeCommand(command) {
  const copy = element("button", { type: "button", class: "plain", text: "Copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // no clipboard permission: select the text for Ctrl-C
    }
  });
  const code = element("code", { text: command });
  return element("div", { class: "command" }, code, copy);
}
