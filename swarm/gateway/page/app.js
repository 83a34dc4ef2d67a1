// Connects the parts of the page: the shown conversation, the chosen model, keyboard shortcuts, banners.

import { Chat } from "./chat/chat_view.js";
import { newConversation, shownPath } from "./chat/conversation.js";
import { ask } from "./ui/dialog.js";
import { byId, element, textButton } from "./ui/dom.js";
import { apiKey, fetchModels, fetchSwarm } from "./api/gateway_client.js";
import { ImageTray } from "./chat/images.js";
import { connectSettings } from "./chat/settings.js";
import { Sidebar } from "./ui/sidebar.js";
import { ConversationStore, loadValue, storeValue } from "./chat/storage.js";
import { shortName, Welcome } from "./ui/welcome.js";

const SWARM_POLL_INTERVAL_MS = 30_000;

class ChatPage {
  constructor() {
    this.store = new ConversationStore();
    this.models = [];
    this.isLoadingModels = false;
    this.waitingText = null; // what was sent before the models were here
    this.swarm = null;
    this.chat = new Chat(this);
    this.sidebar = new Sidebar(this);
    this.welcome = new Welcome((text) => this.#suggest(text));
    this.prompt = byId("prompt");
    this.images = new ImageTray();
    connectSettings();
    this.#connectComposer();
    this.#connectKeys();
    this.#connectEvents();
    this.show(this.store.get(location.hash.slice(1)) ?? newConversation(""));
    this.loadModels();
    setInterval(() => document.hidden || byId("welcome").hidden || this.#pollSwarm(), SWARM_POLL_INTERVAL_MS);
  }

  /** The chosen model, or null if there is none. */
  model() {
    return this.models.find(({ id }) => id === byId("model").value) ?? null;
  }

  async loadModels() {
    this.isLoadingModels = true;
    try {
      this.models = await fetchModels();
      this.#showBanner(null);
      this.#pollSwarm();
    } catch (error) {
      this.models = [];
      this.#showBanner(error.message, "Try again", () => this.loadModels());
      if (error.kind === "key" && (await this.askForKey(error.message))) return this.loadModels();
    }
    const select = byId("model");
    const preferred = this.chat.conversation.model || loadValue("model");
    const options = this.models.map(({ id }) => element("option", { value: id, text: shortName(id) }));
    select.replaceChildren(...(options.length ? options : [element("option", { value: "", text: "no model" })]));
    if (this.models.some(({ id }) => id === preferred)) select.value = preferred;
    select.disabled = !this.models.length;
    this.isLoadingModels = false;
    this.chat.draw();
    if (this.waitingText === this.prompt.value.trim()) this.#send();
    this.waitingText = null;
  }

  /** Show a conversation, whether it is stored or not. */
  show(conversation) {
    const isStored = this.store.get(conversation.id) !== null;
    this.waitingText = null;
    history.replaceState(null, "", isStored ? `#${conversation.id}` : location.pathname);
    if (this.models.some(({ id }) => id === conversation.model)) byId("model").value = conversation.model;
    this.chat.show(conversation);
    document.title = conversation.title ? `${conversation.title} · swarm` : "swarm";
    if (!matchMedia("(pointer: coarse)").matches) this.prompt.focus(); // on a phone this would open the keyboard
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
    const isStored = this.store.save(conversation);
    if (this.chat.conversation === conversation && location.hash.slice(1) !== conversation.id) {
      history.replaceState(null, "", `#${conversation.id}`);
    }
    if (!isStored) this.#showStorageFull(conversation);
    else if (this.isStorageFull && !this.store.unsaved.size) this.#showBanner(null);
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

  /** Update everything around the messages. */
  changed() {
    const { conversation } = this.chat;
    const isRunning = this.chat.isRunning();
    byId("stop").hidden = !isRunning;
    byId("send").hidden = isRunning;
    byId("send").disabled = !this.prompt.value.trim() || !this.model();
    const chats = this.model()?.swarm?.chat_template !== false;
    this.images.offer(this.model()?.architecture?.input_modalities?.includes?.("image") === true);
    this.prompt.placeholder = chats ? "Write to the swarm" : "Start a text, or add to it";
    this.welcome.draw(!shownPath(conversation).length, this.model(), this.swarm);
    this.sidebar.draw(conversation.id);
  }

  /** Ask the user for a key. True if one was entered. */
  async askForKey(reason) {
    const field = { type: "password", value: apiKey.read() ?? "", placeholder: "sk-swarm-…", autocomplete: "off" };
    const text = `${reason} The key stays in this browser.`;
    const key = await ask({ title: "API key", text, field, verb: "Use this key" });
    if (key === null) return false;
    apiKey.store(key);
    return true;
  }

  #suggest(text) {
    this.prompt.value = text;
    this.prompt.dispatchEvent(new Event("input"));
    this.prompt.focus();
  }

  #send() {
    const text = this.prompt.value.trim();
    if (!text || this.chat.isRunning()) return;
    if (!this.model()) {
      if (this.isLoadingModels) this.waitingText = text;
      return;
    }
    this.prompt.value = "";
    this.prompt.dispatchEvent(new Event("input"));
    this.chat.send(text, null, this.images.take());
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
      const isDialogOpen = document.querySelector("dialog[open], :popover-open");
      if (event.key === "Escape" && !isDialogOpen) this.chat.stop();
      if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
        event.preventDefault();
        if (!isDialogOpen) this.startNew();
      }
    });
  }

  #connectEvents() {
    byId("new-chat").addEventListener("click", () => this.startNew());
    byId("model").addEventListener("change", ({ target }) => {
      storeValue("model", target.value);
      this.chat.draw();
    });
    byId("key-button").addEventListener("click", async () => {
      const reason = "Shared gateways require a key.";
      if (await this.askForKey(reason)) this.loadModels();
    });
    addEventListener("storage", ({ key }) => {
      if (!this.store.onStorageChange(key)) return;
      const shown = this.chat.conversation;
      const stored = this.store.get(shown.id);
      if (stored && stored !== shown && !this.isRunning(shown.id)) this.chat.show(stored);
      else this.changed();
    });
    addEventListener("hashchange", () => this.open(location.hash.slice(1)));
    addEventListener("pagehide", () => {
      for (const request of this.chat.running.values()) {
        this.store.save(request.conversation);
        request.discard(); // the connection ends with the page, which is not an error
      }
    });
    addEventListener("online", () => this.models.length || this.loadModels());
  }

  async #pollSwarm() {
    this.swarm = await fetchSwarm();
    this.changed();
  }

  #showStorageFull(conversation) {
    this.#showBanner(
      "The browser's storage is full: this conversation will be lost when you leave. Save it as a file, or free space.",
      "Delete the five oldest",
      () => {
        this.store.freeSpace(5, conversation.id);
        if (!this.store.unsaved.size) this.#showBanner(null);
        this.changed();
      },
    );
    this.isStorageFull = true;
  }

  #showBanner(text, verb, action) {
    const banner = byId("banner");
    this.isStorageFull = false;
    banner.hidden = text === null;
    if (text === null || banner.dataset.text === text) return;
    banner.dataset.text = text;
    banner.replaceChildren(element("span", { text }), textButton(verb, action));
  }
}

new ChatPage();
