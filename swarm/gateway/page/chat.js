// The conversation that is shown: its messages, what is written to it, where the reader looks.

import { Answering } from "./answering.js";
import { addMessage, chooseVersion, removeLeaf, ROOT, shownPath, versionOf } from "./conversation.js";
import { byId } from "./dom.js";
import { MessageView } from "./messages.js";

const NEAR_END = 48; // pixels
const SLOWEST = 500; // milliseconds between two drawings of an answer that takes long to draw
const READ_OUT = 600; // characters of an answer that are read out at its end

/** `page` offers `model()`, `save(conversation)`, `changed()`, `askForKey()`. */
export class Chat {
  constructor(page) {
    this.page = page;
    this.running = new Map(); // answers under way, by conversation: they go on while another one is shown
    this.views = new Map();
    this.conversation = null;
    this.follows = true;
    this.scroll = byId("scroll");
    this.messages = byId("messages");
    this.actions = {
      edit: (id, text) => this.send(text, this.conversation.nodes[id].parent),
      regenerate: (id) => this.answer(this.conversation.nodes[id].parent),
      retry: (id) => this.retry(id),
      goOn: (id) => this.answer(id),
      canGoOn: (node) => !node.error && !node.children.length && this.page.model()?.swarm?.chat_template === false,
      choose: (id, direction) => this.choose(id, direction),
    };
    this.#followEnd();
  }

  /** Show this conversation. */
  show(conversation) {
    if (this.conversation !== conversation) this.views.clear();
    this.conversation = conversation;
    this.follows = true;
    this.draw();
  }

  isRunning() {
    return this.running.has(this.conversation?.id);
  }

  /** Add a message of the reader's at the end, or as another version below `parent`, and have it answered. */
  send(text, parent = null) {
    if (this.isRunning()) return;
    const { conversation } = this;
    const message = addMessage(conversation, parent ?? shownPath(conversation).at(-1)?.id ?? ROOT, "user", text);
    this.answer(message.id);
  }

  /** Have a message answered, once more if it is already. */
  async answer(parent) {
    const model = this.page.model();
    if (this.isRunning() || !model) return;
    const { conversation } = this;
    conversation.model = model.id;
    const save = () => this.page.save(conversation);
    const answering = new Answering(conversation, parent, model, () => this.#changed(answering), save);
    this.running.set(conversation.id, answering);
    this.follows = true;
    save();
    this.draw();
    say("The swarm is answering.");
    const node = await answering.run();
    this.running.delete(conversation.id);
    this.#ended(conversation, node);
  }

  stop() {
    this.running.get(this.conversation?.id)?.stop();
  }

  /** The conversation is gone for good. */
  drop(id) {
    this.running.get(id)?.discard();
  }

  /** Ask again for an answer that failed. What had come of it stays as a version. */
  retry(id) {
    const { parent, text } = this.conversation.nodes[id];
    if (this.isRunning()) return;
    if (text === "") removeLeaf(this.conversation, id);
    this.answer(parent);
  }

  choose(id, direction) {
    const version = versionOf(this.conversation, id);
    const wanted = direction === "left" ? version.before : version.after;
    if (wanted === null) return;
    chooseVersion(this.conversation, wanted);
    this.follows = false;
    this.page.save(this.conversation);
    this.draw();
    const buttons = [...this.views.get(wanted).element.querySelectorAll("[data-direction]:not(:disabled)")];
    (buttons.find((button) => button.dataset.direction === direction) ?? buttons[0])?.focus();
  }

  /** Draw all messages that are shown; those that are drawn already are kept. */
  draw() {
    const nodes = shownPath(this.conversation);
    const elements = nodes.map((node) => {
      if (!this.views.has(node.id)) this.views.set(node.id, new MessageView(node, this.actions));
      this.#drawOne(node);
      return this.views.get(node.id).element;
    });
    const isSame = elements.length === this.messages.children.length
      && elements.every((node, index) => this.messages.children[index] === node);
    if (!isSame) this.messages.replaceChildren(...elements);
    this.page.changed();
    if (nodes.length) this.toEnd();
    else this.scroll.scrollTop = 0;
  }

  toEnd() {
    if (this.follows) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  #drawOne(node) {
    const answering = this.running.get(this.conversation.id);
    const notice = answering?.node === node ? answering.notice : null;
    this.views.get(node.id).update(versionOf(this.conversation, node.id), notice);
  }

  /** Draws an answer once a frame, less often if drawing takes long. */
  #changed(answering) {
    if (this.waits || answering.conversation !== this.conversation) return;
    this.waits = true;
    const draw = () => {
      this.waits = false;
      const isShown = this.conversation === answering.conversation && this.views.has(answering.node.id);
      if (!isShown) return;
      this.#tell(answering.notice);
      const before = performance.now();
      this.#drawOne(answering.node);
      this.toEnd();
      this.pause = Math.min(SLOWEST, 4 * (performance.now() - before));
    };
    if ((this.pause ?? 0) > 32) setTimeout(() => requestAnimationFrame(draw), this.pause);
    else requestAnimationFrame(draw);
  }

  #tell(notice) {
    if (notice && notice !== this.told) say(notice.text);
    this.told = notice;
  }

  #ended(conversation, node) {
    if (this.conversation === conversation) this.draw();
    else this.page.changed();
    if (node.error?.kind === "key") this.#askForKey(conversation, node);
    if (this.conversation !== conversation) return;
    const words = node.text.length > READ_OUT ? `${node.text.slice(0, READ_OUT)} …` : node.text;
    say(node.state === "done" ? `Answer: ${words}` : node.state === "stopped" ? "The answer was stopped." : "");
  }

  async #askForKey(conversation, node) {
    const isGiven = await this.page.askForKey(node.error.message);
    if (isGiven && this.conversation === conversation) this.retry(node.id);
  }

  /** The view follows the text until the reader scrolls up, and again from when they are back at the end. */
  #followEnd() {
    const { scroll } = this;
    const button = byId("to-end");
    const distance = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight;
    let before = 0;
    scroll.addEventListener("scroll", () => {
      const wentUp = scroll.scrollTop < before - 1;
      before = scroll.scrollTop;
      if (distance() < NEAR_END) this.follows = !wentUp || distance() < 2;
      else if (wentUp) this.follows = false;
      button.hidden = distance() < 2 * NEAR_END;
    });
    scroll.addEventListener("wheel", ({ deltaY }) => {
      if (deltaY < 0 && scroll.scrollHeight > scroll.clientHeight) this.follows = false;
    }, { passive: true });
    button.addEventListener("click", () => {
      this.follows = true;
      this.toEnd();
      byId("prompt").focus();
    });
    new ResizeObserver(() => this.messages.children.length && this.toEnd()).observe(scroll);
  }
}

/** For those who hear the page. */
function say(text) {
  byId("status").textContent = text;
}
