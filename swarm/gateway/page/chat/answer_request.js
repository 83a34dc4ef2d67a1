// One answer while it is generated: sends the request, adds the text to the conversation, and reports changes.

import { addMessage, pathTo, ROOT } from "./conversation.js";
import { readFigures, readHops } from "./answer_details.js";
import { streamAnswer, GatewayError } from "../api/gateway_client.js";
import { makeRequest, readSettings } from "./settings.js";

const RECOVERY_NOTICE_MS = 5000;
const SAVE_INTERVAL_MS = 2000; // so that closing the page during an answer loses little of it

export class AnswerRequest {
  /**
   * @param conversation that the answer belongs to
   * @param parent id of the message that is answered
   * @param model of the gateway, as `/v1/models` has it
   * @param changed called when there is something new to show
   * @param save called every few seconds, and at the end
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

  /** Runs until the answer is complete, stopped or failed. Never throws: errors are recorded in the message. */
  async run() {
    const { node, conversation, controller } = this;
    const messages = node.parent === ROOT ? [] : pathTo(conversation, node.parent);
    const request = makeRequest(this.model.id, messages, readSettings(), this.model.swarm?.chat_template !== false);
    const saving = setInterval(() => this.save(), SAVE_INTERVAL_MS);
    try {
      for await (const event of streamAnswer(request, controller.signal)) this.#onEvent(event);
      node.state = "done";
    } catch (error) {
      node.state = controller.signal.aborted ? "stopped" : "failed";
      if (node.state === "failed") node.error = describeError(error);
    }
    clearInterval(saving);
    this.notice = null;
    conversation.updated = Date.now();
    this.save();
    this.changed();
    return node;
  }

  /** Close the connection; the gateway then frees the session at once. */
  stop() {
    this.controller.abort();
  }

  /** Stop, without saving. */
  discard() {
    this.save = () => {};
    this.stop();
  }

  #onEvent(event) {
    const { node } = this;
    if (this.notice?.kind === "waiting") this.notice = null;
    if (event.kind === "text") node.text += event.text;
    else if (event.kind === "thought") node.thought = (node.thought ?? "") + event.text;
    else if (event.kind === "finish") node.finish = event.reason;
    else if (event.kind === "route") node.route = readHops(event.hops) ?? node.route;
    else if (event.kind === "done") node.figures = readFigures(event);
    else this.#onRouteEvent(event);
    this.changed();
  }

  #onRouteEvent(event) {
    if (event.kind === "lost") {
      const outlook = "The swarm is finding another route; no text is lost.";
      this.#setNotice("warning", `A server was lost during the answer. ${outlook}`);
    } else if (event.kind === "missing") {
      const blocks = String(event.blocks).slice(0, 80);
      this.#setNotice("warning", `No server holds blocks ${blocks} at present. Waiting for one.`);
    } else if (event.kind === "waiting") {
      this.#setNotice("waiting", "The servers are full. The answer goes on when they have room.");
    } else if (event.kind === "prompt" && Number.isFinite(event.computed) && Number.isFinite(event.tokens)) {
      const [computed, tokens] = [event.computed, event.tokens].map((count) => count.toLocaleString("en"));
      this.#setNotice("waiting", `Reading the conversation: ${computed} of ${tokens} tokens`);
    } else if (event.kind === "recovered" && Number.isFinite(event.seconds)) {
      this.node.recoveries = [...(this.node.recoveries ?? []), event.seconds];
      this.#setNotice("good", "A server was lost. The swarm has recovered and continues.");
      const shown = this.notice;
      setTimeout(() => {
        if (this.notice === shown) this.notice = null;
        this.changed();
      }, RECOVERY_NOTICE_MS);
    }
  }

  #setNotice(kind, text) {
    this.notice = { kind, text };
  }
}

function describeError(error) {
  const isKnown = error instanceof GatewayError;
  return {
    kind: isKnown ? error.kind : "unknown",
    message: isKnown ? error.message : `The answer could not be read: ${error.message}`,
    retryAfter: isKnown ? error.retryAfter : null,
    at: Date.now(),
  };
}
