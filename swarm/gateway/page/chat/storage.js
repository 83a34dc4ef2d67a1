// Stores conversations, settings and the API key in the browser's localStorage. If it is full or not available (private
// windows), the page keeps them in memory and works as usual.

import { restoreConversation } from "./conversation.js";

const PREFIX = "swarm.conversation.";
export const MAX_CONVERSATIONS = 500;

/** The value that is stored under this name, or `fallback`. */
export function loadValue(name, fallback = null) {
  try {
    return JSON.parse(localStorage.getItem(`swarm.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Store a value (null removes it). False if the storage is full. */
export function storeValue(name, value) {
  return value === null ? remove(`swarm.${name}`) : write(`swarm.${name}`, value);
}

/** Conversations by id. Those that could not be stored stay in memory until the page is closed. */
export class ConversationStore {
  constructor() {
    this.all = new Map();
    this.unsaved = new Set();
    this.load();
  }

  /** Read the storage again; conversations that are loaded already stay the same objects. */
  load() {
    for (const key of storedKeys()) {
      const id = key.slice(PREFIX.length);
      if (this.all.has(id)) continue;
      const conversation = restoreConversation(loadValue(key.slice("swarm.".length)));
      if (conversation?.id === id) this.all.set(id, conversation);
    }
  }

  /** All conversations, the newest first. */
  list() {
    return [...this.all.values()].sort((one, other) => other.updated - one.updated);
  }

  get(id) {
    return this.all.get(id) ?? null;
  }

  /** Store a conversation. False if the storage is full. */
  save(conversation) {
    const isNew = !this.all.has(conversation.id);
    this.all.set(conversation.id, conversation);
    const hasSpace = !isNew || storedKeys().length < MAX_CONVERSATIONS;
    const isKept = hasSpace && write(PREFIX + conversation.id, conversation);
    if (isKept) this.unsaved.delete(conversation.id);
    else this.unsaved.add(conversation.id);
    return isKept;
  }

  delete(id) {
    this.all.delete(id);
    this.unsaved.delete(id);
    remove(PREFIX + id);
  }

  /** Delete the oldest conversations, and store those again that did not fit. Returns the number of deleted ones. */
  freeSpace(count, except) {
    const oldest = this.list().filter(({ id }) => id !== except && !this.unsaved.has(id)).slice(-count);
    for (const { id } of oldest) this.delete(id);
    for (const id of [...this.unsaved]) this.save(this.all.get(id));
    return oldest.length;
  }

  /** Another tab changed or removed this key. True if it is a conversation. */
  onStorageChange(key) {
    if (key !== null && !key.startsWith(PREFIX)) return false;
    for (const id of this.all.keys()) {
      const isGone = (key === null || key === PREFIX + id) && !this.unsaved.has(id);
      if (isGone) this.all.delete(id);
    }
    this.load();
    return true;
  }
}

function storedKeys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function remove(key) {
  try {
    localStorage.removeItem(key);
    return true;
  } catch {
    return false;
  }
}
