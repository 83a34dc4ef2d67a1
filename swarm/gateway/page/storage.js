// What the browser keeps: conversations, settings and the API key, in localStorage. A browser without room, or one
// that keeps nothing (private windows), costs the memory of this page, never its work.

import { revive } from "./conversation.js";

const PREFIX = "swarm.conversation.";
export const MOST_CONVERSATIONS = 500;

/** The value that is kept under this name, or `otherwise`. */
export function recall(name, otherwise = null) {
  try {
    return JSON.parse(localStorage.getItem(`swarm.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Keep a value (null forgets it). False if there is no room. */
export function keep(name, value) {
  return value === null ? forget(`swarm.${name}`) : write(`swarm.${name}`, value);
}

/** Conversations by id. What could not be kept is held in memory until the page is left. */
export class ConversationStore {
  constructor() {
    this.all = new Map();
    this.unsaved = new Set();
    this.load();
  }

  /** Read everything again; conversations that are held here already stay the same objects. */
  load() {
    for (const key of storedKeys()) {
      const id = key.slice(PREFIX.length);
      if (this.all.has(id)) continue;
      const conversation = revive(recall(key.slice("swarm.".length)));
      if (conversation?.id === id) this.all.set(id, conversation);
    }
  }

  /** The newest first. */
  list() {
    return [...this.all.values()].sort((one, other) => other.updated - one.updated);
  }

  get(id) {
    return this.all.get(id) ?? null;
  }

  /** Keep a conversation. False if the browser has no room for it. */
  save(conversation) {
    const isNew = !this.all.has(conversation.id);
    this.all.set(conversation.id, conversation);
    const hasRoom = !isNew || storedKeys().length < MOST_CONVERSATIONS;
    const isKept = hasRoom && write(PREFIX + conversation.id, conversation);
    if (isKept) this.unsaved.delete(conversation.id);
    else this.unsaved.add(conversation.id);
    return isKept;
  }

  delete(id) {
    this.all.delete(id);
    this.unsaved.delete(id);
    forget(PREFIX + id);
  }

  /** Delete the oldest conversations and try again to keep those that found no room. Returns how many went. */
  makeRoom(count, except) {
    const oldest = this.list().filter(({ id }) => id !== except && !this.unsaved.has(id)).slice(-count);
    for (const { id } of oldest) this.delete(id);
    for (const id of [...this.unsaved]) this.save(this.all.get(id));
    return oldest.length;
  }

  /** Another tab wrote or deleted this key. True if it was a conversation. */
  changedElsewhere(key) {
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

function forget(key) {
  try {
    localStorage.removeItem(key);
    return true;
  } catch {
    return false;
  }
}
