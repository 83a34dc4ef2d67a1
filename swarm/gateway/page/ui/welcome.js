// The content of an empty conversation: the model, how many servers hold it, and suggestions.

import { byId, element } from "./dom.js";
import { animateLights } from "./light_animation.js";

const CHAT_SUGGESTIONS = [
  ["Explain", "How can many small computers run one large language model together?"],
  ["Write", "Write a short poem about fireflies that find their way by each other’s light."],
  ["Plan", "Plan a quiet weekend by the sea for two people who love books. Answer with a table."],
  ["Code", "Write a Python function that merges overlapping intervals, and explain it."],
];
const TEXT_SUGGESTIONS = [
  ["A story", "Once upon a time there was a swarm of small lights that"],
  ["A letter", "Dear friend, you asked me how the machines of so many people could"],
  ["A list", "Three things that every traveller should know:\n1."],
  ["A play", "Enter two servers, one of them out of breath.\nFIRST SERVER:"],
];

const COMPLETION_NOTE =
  "This model continues texts. It was not trained to chat: write the beginning of a text, and it continues from there.";

export class Welcome {
  /** `pick(text)` is called with the suggestion that the user chooses. */
  constructor(pick) {
    this.pick = pick;
    this.section = byId("welcome");
    animateLights(byId("lights"));
  }

  /** Show or hide it. `model` is an entry of `/v1/models` or null; `swarm` is the monitor's view or null. */
  draw(isShown, model, swarm) {
    this.section.hidden = !isShown;
    const signature = JSON.stringify([model?.id, countServers(model, swarm)]);
    if (!isShown || signature === this.signature) return;
    this.signature = signature;
    const chats = model?.swarm?.chat_template !== false;
    const suggestions = model ? (chats ? CHAT_SUGGESTIONS : TEXT_SUGGESTIONS) : [];
    byId("welcome-title").textContent = chats ? "What should the swarm think about?" : "How should the text begin?";
    byId("welcome-model").replaceChildren(...(model ? describe(model, swarm) : ["No model is served here at present."]));
    byId("welcome-note").hidden = chats;
    byId("welcome-note").textContent = COMPLETION_NOTE;
    byId("suggestions").replaceChildren(...suggestions.map((suggestion) => this.#suggestion(suggestion)));
  }

  #suggestion([title, text]) {
    const parts = [element("strong", { text: title }), element("span", { text })];
    return element("button", { type: "button", class: "suggestion", on: { click: () => this.pick(text) } }, ...parts);
  }
}

function describe(model, swarm) {
  const parts = [element("strong", { text: shortName(model.id) })];
  const found = countServers(model, swarm);
  if (found !== null) {
    const many = `held by ${found} ${found === 1 ? "server" : "servers"}`;
    const text = found === 0 ? "no server holds it at present" : many;
    parts.push(" ", element("span", { class: found ? "carried" : "carried none", text }));
  }
  return parts;
}

/** How many servers hold blocks of the model; null if the monitor does not know it. */
function countServers(model, swarm) {
  const models = Array.isArray(swarm?.models) ? swarm.models : [];
  const found = models.find(({ name }) => name === model?.id);
  return Number.isInteger(found?.servers_online) ? found.servers_online : null;
}

/** A model's name without its folder or organisation. */
export function shortName(id) {
  return id.split("/").filter(Boolean).at(-1) ?? id;
}
