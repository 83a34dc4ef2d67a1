// What an empty conversation shows: the model, who carries it, and something to begin with.

import { byId, element } from "./dom.js";
import { showLights } from "./lights.js";

const QUESTIONS = [
  ["Explain", "How can many small computers run one large language model together?"],
  ["Write", "Write a short poem about fireflies that find their way by each other’s light."],
  ["Plan", "Plan a quiet weekend by the sea for two people who love books. Answer with a table."],
  ["Code", "Write a Python function that merges overlapping intervals, and explain it."],
];
const BEGINNINGS = [
  ["A story", "Once upon a time there was a swarm of small lights that"],
  ["A letter", "Dear friend, you asked me how the machines of so many people could"],
  ["A list", "Three things that every traveller should know:\n1."],
  ["A play", "Enter two servers, one of them out of breath.\nFIRST SERVER:"],
];

const CONTINUES =
  "This model continues texts. It was not trained to chat: write a beginning, and it goes on from there.";

export class Welcome {
  /** `pick(text)` is called with the suggestion that the reader takes. */
  constructor(pick) {
    this.pick = pick;
    this.section = byId("welcome");
    showLights(byId("lights"));
  }

  /** Show or hide it. `model` as `/v1/models` has it, or null if there is none; `swarm` as of the monitor, or null. */
  draw(isShown, model, swarm) {
    this.section.hidden = !isShown;
    const look = JSON.stringify([model?.id, carriers(model, swarm)]);
    if (!isShown || look === this.look) return;
    this.look = look;
    const chats = model?.swarm?.chat_template !== false;
    const suggestions = model ? (chats ? QUESTIONS : BEGINNINGS) : [];
    byId("welcome-title").textContent = chats ? "What shall the swarm think about?" : "How shall the text begin?";
    byId("welcome-model").replaceChildren(...(model ? describe(model, swarm) : ["No model is served here at present."]));
    byId("welcome-note").hidden = chats;
    byId("welcome-note").textContent = CONTINUES;
    byId("suggestions").replaceChildren(...suggestions.map((one) => this.#suggestion(one)));
  }

  #suggestion([title, text]) {
    const parts = [element("strong", { text: title }), element("span", { text })];
    return element("button", { type: "button", class: "suggestion", on: { click: () => this.pick(text) } }, ...parts);
  }
}

function describe(model, swarm) {
  const parts = [element("strong", { text: shortName(model.id) })];
  const found = carriers(model, swarm);
  if (found !== null) {
    const many = `carried by ${found} ${found === 1 ? "server" : "servers"}`;
    const text = found === 0 ? "no server carries it at present" : many;
    parts.push(" ", element("span", { class: found ? "carried" : "carried none", text }));
  }
  return parts;
}

/** How many servers carry the model; null if the monitor does not know it. */
function carriers(model, swarm) {
  const models = Array.isArray(swarm?.models) ? swarm.models : [];
  const found = models.find(({ name }) => name === model?.id);
  return Number.isInteger(found?.servers_online) ? found.servers_online : null;
}

/** A model's name without the folders or the organisation before it. */
export function shortName(id) {
  return id.split("/").filter(Boolean).at(-1) ?? id;
}
