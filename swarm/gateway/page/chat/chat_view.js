// The conversation that is shown: its messages, sending and request, and scrolling.

import { AnswerRequest } from "./answer_request.js";
import { addMessage, chooseVersion, removeLeaf, ROOT, shownPath, versionOf } from "./conversation.js";
import { byId } from "../ui/dom.js";
import { MessageView } from "./message_view.js";

const NEAR_END_PX = 48;
const MAX_DRAW_PAUSE_MS = 500; // between two drawings of an answer that is slow to draw
const MAX_ANNOUNCED_CHARACTERS = 600; // of an answer that screen readers announce at its end

/** `page` offers `model()`, `save(conversation)`, `changed()`, `askForKey()`. */
export class Chat {
  constructor(page) {
    this.page = page;
    this.running = new Map(); // unfinished answers by conversation; they continue while another conversation is shown
    this.views = new Map();
    this.conversation = null;
    this.follows = true;
    this.scroll = byId("scroll");
    this.messages = byId("messages");
    this.actions = {
      edit: (id, text) => this.send(text, this.conversation.nodes[id].parent, this.conversation.nodes[id].images),
      regenerate: (id) => this.answer(this.conversation.nodes[id].parent),
      retry: (id) => this.retry(id),
      continueAnswer: (id) => this.answer(id),
      canContinue: (node) => !node.error && !node.children.length && this.page.model()?.swarm?.chat_template === false,
      choose: (id, direction) => this.choose(id, direction),
    };
    this.#connectScrolling();
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

  /** Add a message of the user at the end, or as another version below `parent`, and request its answer. */
  send(text, parent = null, images = []) {
    if (this.isRunning()) return;
    const { conversation } = this;
    const place = parent ?? shownPath(conversation).at(-1)?.id ?? ROOT;
    const message = addMessage(conversation, place, "user", text, images.length ? { images } : {});
    this.answer(message.id);
  }

  /** Request an answer to a message, another one if there is one already. */
  async answer(parent) {
    const model = this.page.model();
    if (this.isRunning() || !model) return;
    const { conversation } = this;
    conversation.model = model.id;
    const save = () => this.page.save(conversation);
    const request = new AnswerRequest(conversation, parent, model, () => this.#scheduleDraw(request), save);
    this.running.set(conversation.id, request);
    this.follows = true;
    save();
    this.draw();
    announce("The swarm is answering.");
    const node = await request.run();
    this.running.delete(conversation.id);
    this.#onEnd(conversation, node);
  }

  stop() {
    this.running.get(this.conversation?.id)?.stop();
  }

  /** The conversation was deleted. */
  drop(id) {
    this.running.get(id)?.discard();
  }

  /** Request an answer that failed again. The text that had arrived stays as a version. */
  retry(id) {
    const { parent, text } = this.conversation.nodes[id];
    if (this.isRunning()) return;
    if (text === "") removeLeaf(this.conversation, id);
    this.answer(parent);
  }

  choose(id, direction) {
    const version = versionOf(this.conversation, id);
    const target = direction === "left" ? version.before : version.after;
    if (target === null) return;
    chooseVersion(this.conversation, target);
    this.follows = false;
    this.page.save(this.conversation);
    this.draw();
    const buttons = [...this.views.get(target).element.querySelectorAll("[data-direction]:not(:disabled)")];
    (buttons.find((button) => button.dataset.direction === direction) ?? buttons[0])?.focus();
  }

  /** Draw all shown messages; elements that exist already are kept. */
  draw() {
    const nodes = shownPath(this.conversation);
    const elements = nodes.map((node) => {
      if (!this.views.has(node.id)) this.views.set(node.id, new MessageView(node, this.actions));
      this.#drawMessage(node);
      return this.views.get(node.id).element;
    });
    const isSame = elements.length === this.messages.children.length
      && elements.every((node, index) => this.messages.children[index] === node);
    if (!isSame) this.messages.replaceChildren(...elements);
    this.page.changed();
    if (nodes.length) this.scrollToEnd();
    else this.scroll.scrollTop = 0;
  }

  scrollToEnd() {
    if (this.follows) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  #drawMessage(node) {
    const request = this.running.get(this.conversation.id);
    const notice = request?.node === node ? request.notice : null;
    this.views.get(node.id).update(versionOf(this.conversation, node.id), notice);
  }

  /** Draw an answer once a frame, less often if drawing is slow. */
  #scheduleDraw(request) {
    if (this.isDrawScheduled || request.conversation !== this.conversation) return;
    this.isDrawScheduled = true;
    const draw = () => {
      this.isDrawScheduled = false;
      const isShown = this.conversation === request.conversation && this.views.has(request.node.id);
      if (!isShown) return;
      this.#announceNotice(request.notice);
      const before = performance.now();
      this.#drawMessage(request.node);
      this.scrollToEnd();
      this.pause = Math.min(MAX_DRAW_PAUSE_MS, 4 * (performance.now() - before));
    };
    if ((this.pause ?? 0) > 32) setTimeout(() => requestAnimationFrame(draw), this.pause);
    else requestAnimationFrame(draw);
  }

  #announceNotice(notice) {
    if (notice && notice !== this.announcedNotice && notice.kind !== "waiting") announce(notice.text);
    this.announcedNotice = notice;
  }

  #onEnd(conversation, node) {
    if (this.conversation === conversation) this.draw();
    else this.page.changed();
    if (node.error?.kind === "key") this.#askForKey(conversation, node);
    if (this.conversation !== conversation) return;
    const isLong = node.text.length > MAX_ANNOUNCED_CHARACTERS;
    const text = isLong ? `${node.text.slice(0, MAX_ANNOUNCED_CHARACTERS)} …` : node.text;
    announce(node.state === "done" ? `Answer: ${text}` : node.state === "stopped" ? "The answer was stopped." : "");
  }

  async #askForKey(conversation, node) {
    const isGiven = await this.page.askForKey(node.error.message);
    if (isGiven && this.conversation === conversation) this.retry(node.id);
  }

  /** The view follows the text until the user scrolls up, and again once they have scrolled back to the end. */
  #connectScrolling() {
    const { scroll } = this;
    const button = byId("to-end");
    const distance = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight;
    let before = 0;
    scroll.addEventListener("scroll", () => {
      const wentUp = scroll.scrollTop < before - 1;
      before = scroll.scrollTop;
      if (distance() < NEAR_END_PX) this.follows = !wentUp || distance() < 2;
      else if (wentUp) this.follows = false;
      button.hidden = distance() < 2 * NEAR_END_PX;
    });
    scroll.addEventListener("wheel", ({ deltaY }) => {
      if (deltaY < 0 && scroll.scrollHeight > scroll.clientHeight) this.follows = false;
    }, { passive: true });
    button.addEventListener("click", () => {
      this.follows = true;
      this.scrollToEnd();
      byId("prompt").focus();
    });
    new ResizeObserver(() => this.messages.children.length && this.scrollToEnd()).observe(scroll);
  }
}

/** Announce a text to screen readers. */
function announce(text) {
  byId("status").textContent = text;
}
