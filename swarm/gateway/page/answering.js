// One answer under way: asks the gateway, writes into the conversation, tells who looks at it.

import { addMessage, pathTo, ROOT } from "./conversation.js";
import { readFigures, readHops } from "./facts.js";
import { askForAnswer, GatewayError } from "./gateway.js";
import { makeRequest, readSettings } from "./settings.js";

const NEWS_SHOWN = 5000; // milliseconds for which good news stay
const SAVE_EVERY = 2000; // milliseconds: a page that is closed in mid-answer keeps what had come

export class Answering {
  /**
   * @param conversation it belongs to
   * @param parent id of the message that is answered
   * @param model of the gateway, as `/v1/models` has it
   * @param changed called whenever there is something new to show
   * @param save called now and then, and at the end
   */
  constructor(conversation, parent, model, changed, save) {
    this.conversation = conversation;
    this.model = model;
    this.changed = changed;
    this.save = save;
    this.notice = null;
    this.controller = new AbortController();
    this.node = addMessage(conversation, parent, "assistant", "", { state: "running", model: model.id });
  }

  /** Runs until the answer is complete, was stopped, or failed. Never raises; failures stand in the message. */
  async run() {
    const { node, conversation, controller } = this;
    const messages = node.parent === ROOT ? [] : pathTo(conversation, node.parent);
    const request = makeRequest(this.model.id, messages, readSettings(), this.model.swarm?.chat_template !== false);
    const saving = setInterval(() => this.save(), SAVE_EVERY);
    try {
      for await (const event of askForAnswer(request, controller.signal)) this.#take(event);
      node.state = "done";
    } catch (error) {
      node.state = controller.signal.aborted ? "stopped" : "failed";
      if (node.state === "failed") node.error = describe(error);
    }
    clearInterval(saving);
    this.notice = null;
    conversation.updated = Date.now();
    this.save();
    this.changed();
    return node;
  }

  /** The connection is closed; the gateway frees the session at once. */
  stop() {
    this.controller.abort();
  }

  /** Stop, and save nothing any more. */
  discard() {
    this.save = () => {};
    this.stop();
  }

  #take(event) {
    const { node } = this;
    if (event.kind === "text") node.text += event.text;
    else if (event.kind === "finish") node.finish = event.reason;
    else if (event.kind === "route") node.route = readHops(event.hops) ?? node.route;
    else if (event.kind === "done") node.figures = readFigures(event);
    else this.#takeNews(event);
    this.changed();
  }

  #takeNews(event) {
    if (event.kind === "lost") {
      const hope = "The swarm is finding another way; nothing written is lost.";
      this.#tell("trouble", `A server was lost in mid-answer. ${hope}`);
    } else if (event.kind === "missing") {
      const blocks = String(event.blocks).slice(0, 80);
      this.#tell("trouble", `Nobody holds blocks ${blocks} at present. Waiting for a server that does.`);
    } else if (event.kind === "recovered" && Number.isFinite(event.seconds)) {
      this.node.recoveries = [...(this.node.recoveries ?? []), event.seconds];
      this.#tell("good", "A server was lost; the swarm has recovered and goes on.");
      const told = this.notice;
      setTimeout(() => {
        if (this.notice === told) this.notice = null;
        this.changed();
      }, NEWS_SHOWN);
    }
  }

  #tell(kind, text) {
    this.notice = { kind, text };
  }
}

function describe(error) {
  const isKnown = error instanceof GatewayError;
  return {
    kind: isKnown ? error.kind : "unknown",
    message: isKnown ? error.message : `The answer could not be read: ${error.message}`,
    retryAfter: isKnown ? error.retryAfter : null,
    at: Date.now(),
  };
}
