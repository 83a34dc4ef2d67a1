// Puts the page together: which conversation is shown, which model is asked, what the keys do.

import { Chat } from "./chat.js";
import { newConversation, shownPath } from "./conversation.js";
import { ask } from "./dialogs.js";
import { byId, element, textButton } from "./dom.js";
import { apiKey, fetchModels, fetchSwarm } from "./gateway.js";
import { connectSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { ConversationStore, keep, recall } from "./storage.js";
import { shortName, Welcome } from "./welcome.js";

const SWARM_EVERY = 30_000; // milliseconds

class Page {
  constructor() {
    this.store = new ConversationStore();
    this.models = [];
    this.swarm = null;
    this.chat = new Chat(this);
    this.sidebar = new Sidebar(this);
    this.welcome = new Welcome((text) => this.#suggest(text));
    this.prompt = byId("prompt");
    connectSettings();
    this.#connectComposer();
    this.#connectKeys();
    this.#connectRest();
    this.show(this.store.get(location.hash.slice(1)) ?? newConversation(""));
    this.loadModels();
    setInterval(() => document.hidden || byId("welcome").hidden || this.#lookAtSwarm(), SWARM_EVERY);
  }

  /** The model that is asked, or null if there is none. */
  model() {
    return this.models.find(({ id }) => id === byId("model").value) ?? null;
  }

  async loadModels() {
    try {
      this.models = await fetchModels();
      this.#banner(null);
      this.#lookAtSwarm();
    } catch (error) {
      this.models = [];
      this.#banner(error.message, "Try again", () => this.loadModels());
      if (error.kind === "key" && (await this.askForKey(error.message))) return this.loadModels();
    }
    const select = byId("model");
    const wanted = this.chat.conversation.model || recall("model");
    const options = this.models.map(({ id }) => element("option", { value: id, text: shortName(id) }));
    select.replaceChildren(...(options.length ? options : [element("option", { value: "", text: "no model" })]));
    if (this.models.some(({ id }) => id === wanted)) select.value = wanted;
    select.disabled = !this.models.length;
    this.chat.draw();
  }

  /** Show a conversation, which need not be kept yet. */
  show(conversation) {
    const isKept = this.store.get(conversation.id) !== null;
    history.replaceState(null, "", isKept ? `#${conversation.id}` : location.pathname);
    if (this.models.some(({ id }) => id === conversation.model)) byId("model").value = conversation.model;
    this.chat.show(conversation);
    document.title = conversation.title ? `${conversation.title} · swarm` : "swarm";
    if (!matchMedia("(pointer: coarse)").matches) this.prompt.focus(); // on a telephone the keyboard would come up
  }

  open(id) {
    const conversation = this.store.get(id);
    if (conversation) this.show(conversation);
  }

  startNew() {
    this.sidebar.closeDrawer();
    this.show(newConversation(byId("model").value));
  }

  save(conversation) {
    const isKept = this.store.save(conversation);
    if (this.chat.conversation === conversation && location.hash.slice(1) !== conversation.id) {
      history.replaceState(null, "", `#${conversation.id}`);
    }
    if (!isKept) this.#tellFull(conversation);
    else if (this.isFull && !this.store.unsaved.size) this.#banner(null);
    this.changed();
  }

  renamed(conversation) {
    this.save(conversation);
    document.title = `${conversation.title} · swarm`;
  }

  deleted(id) {
    this.chat.drop(id);
    this.store.delete(id);
    if (this.chat.conversation.id === id) this.startNew();
    else this.changed();
  }

  isRunning(id) {
    return this.chat.running.has(id);
  }

  /** Bring everything around the messages up to date. */
  changed() {
    const { conversation } = this.chat;
    const isRunning = this.chat.isRunning();
    byId("stop").hidden = !isRunning;
    byId("send").hidden = isRunning;
    byId("send").disabled = !this.prompt.value.trim() || !this.model();
    const chats = this.model()?.swarm?.chat_template !== false;
    this.prompt.placeholder = chats ? "Write to the swarm" : "Begin a text, or add to it";
    this.welcome.draw(!shownPath(conversation).length, this.model(), this.swarm);
    this.sidebar.draw(conversation.id);
  }

  /** Ask for a key. True if one was given. */
  async askForKey(reason) {
    const field = { type: "password", value: apiKey.read() ?? "", placeholder: "sk-swarm-…", autocomplete: "off" };
    const text = `${reason} The key stays in this browser.`;
    const key = await ask({ title: "API key", text, field, verb: "Use this key" });
    if (key === null) return false;
    apiKey.keep(key);
    return true;
  }

  #suggest(text) {
    this.prompt.value = text;
    this.prompt.dispatchEvent(new Event("input"));
    this.prompt.focus();
  }

  #send() {
    const text = this.prompt.value.trim();
    if (!text || this.chat.isRunning() || !this.model()) return;
    this.prompt.value = "";
    this.prompt.dispatchEvent(new Event("input"));
    this.chat.send(text);
    document.title = `${this.chat.conversation.title} · swarm`;
  }

  #connectComposer() {
    const { prompt } = this;
    prompt.addEventListener("input", () => {
      prompt.style.height = "auto";
      prompt.style.height = `${prompt.scrollHeight}px`;
      this.changed();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => {
      this.chat.stop();
      prompt.focus();
    });
  }

  #connectKeys() {
    document.addEventListener("keydown", (event) => {
      const isOver = document.querySelector("dialog[open], :popover-open");
      if (event.key === "Escape" && !isOver) this.chat.stop();
      if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
        event.preventDefault();
        if (!isOver) this.startNew();
      }
    });
  }

  #connectRest() {
    byId("new-chat").addEventListener("click", () => this.startNew());
    byId("model").addEventListener("change", ({ target }) => {
      keep("model", target.value);
      this.chat.draw();
    });
    byId("key-button").addEventListener("click", async () => {
      const reason = "Gateways that several people use ask for one.";
      if (await this.askForKey(reason)) this.loadModels();
    });
    addEventListener("storage", ({ key }) => {
      if (!this.store.changedElsewhere(key)) return;
      const shown = this.chat.conversation;
      const fresh = this.store.get(shown.id);
      if (fresh && fresh !== shown && !this.isRunning(shown.id)) this.chat.show(fresh);
      else this.changed();
    });
    addEventListener("hashchange", () => this.open(location.hash.slice(1)));
    addEventListener("pagehide", () => {
      for (const answering of this.chat.running.values()) {
        this.store.save(answering.conversation);
        answering.discard(); // that the connection ends now is no failure
      }
    });
    addEventListener("online", () => this.models.length || this.loadModels());
  }

  async #lookAtSwarm() {
    this.swarm = await fetchSwarm();
    this.changed();
  }

  #tellFull(conversation) {
    this.#banner(
      "This browser has no room left: the conversation is not kept when you leave. Save it as a file, or make room.",
      "Delete the five oldest",
      () => {
        this.store.makeRoom(5, conversation.id);
        if (!this.store.unsaved.size) this.#banner(null);
        this.changed();
      },
    );
    this.isFull = true;
  }

  #banner(text, verb, action) {
    const banner = byId("banner");
    this.isFull = false;
    banner.hidden = text === null;
    if (text === null || banner.dataset.text === text) return;
    banner.dataset.text = text;
    banner.replaceChildren(element("span", { text }), textButton(verb, action));
  }
}

new Page();
