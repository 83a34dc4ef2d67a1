// A conversation: a tree of messages, of which one path is shown. Editing or regenerating adds a version and never
// removes one. All objects are plain, so that they can be stored as JSON.

export const ROOT = "root";
const MAX_TITLE_CHARACTERS = 60;
const MAX_MESSAGES = 10_000;

/** A conversation without messages. */
export function newConversation(model, now = Date.now()) {
  const root = { id: ROOT, parent: null, children: [], chosen: null };
  return { id: newId(), title: "", named: false, created: now, updated: now, model, nodes: { [ROOT]: root } };
}

/** Add a message below `parent`, and show it there. */
export function addMessage(conversation, parent, role, text, more = {}) {
  const node = { id: newId(), parent, children: [], chosen: null, role, text, state: "done", ...more };
  conversation.nodes[node.id] = node;
  conversation.nodes[parent].children.push(node.id);
  conversation.nodes[parent].chosen = node.id;
  conversation.updated = Date.now();
  if (!conversation.named && role === "user" && parent === ROOT) conversation.title = titleOf(text);
  return node;
}

/** The shown messages, in their order. */
export function shownPath(conversation) {
  const path = [];
  let node = conversation.nodes[ROOT];
  while (node.chosen !== null) {
    node = conversation.nodes[node.chosen];
    path.push(node);
  }
  return path;
}

/** The messages from the first to this one, whether they are shown or not. */
export function pathTo(conversation, id) {
  const path = [];
  for (let node = conversation.nodes[id]; node.id !== ROOT; node = conversation.nodes[node.parent]) path.unshift(node);
  return path;
}

/** Which version of its message this node is: `{number, count, before, after}`; the last two are ids or null. */
export function versionOf(conversation, id) {
  const siblings = conversation.nodes[conversation.nodes[id].parent].children;
  const index = siblings.indexOf(id);
  const [before, after] = [siblings[index - 1] ?? null, siblings[index + 1] ?? null];
  return { number: index + 1, count: siblings.length, before, after };
}

/** Show this version of its message. */
export function chooseVersion(conversation, id) {
  conversation.nodes[conversation.nodes[id].parent].chosen = id;
}

/** Remove a message without answers, such as an answer that failed before its first token. */
export function removeLeaf(conversation, id) {
  const node = conversation.nodes[id];
  if (node.children.length) throw new Error("only a message without answers can be removed");
  const parent = conversation.nodes[node.parent];
  parent.children = parent.children.filter((child) => child !== id);
  if (parent.chosen === id) parent.chosen = parent.children.at(-1) ?? null;
  delete conversation.nodes[id];
}

/** A title from the first message's first line. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  return line.length <= MAX_TITLE_CHARACTERS ? line : `${line.slice(0, MAX_TITLE_CHARACTERS - 1).trimEnd()}…`;
}

/**
 * A conversation from the browser's storage, or null if it is not valid: anything may have been written there. An
 * unfinished answer is marked as stopped.
 */
export function restoreConversation(value) {
  if (!isRecord(value) || typeof value.id !== "string" || !isRecord(value.nodes)) return null;
  const nodes = Object.entries(value.nodes);
  if (nodes.length > MAX_MESSAGES) return null;
  if (!nodes.every(([id, node]) => isNode(value, id, node)) || !isTree(value)) return null;
  for (const [, node] of nodes) {
    if (node.state === "running") node.state = "stopped";
    if (typeof node.thought !== "string") delete node.thought;
    if (!Array.isArray(node.images) || !node.images.every((url) => typeof url === "string")) delete node.images;
  }
  const numbers = [value.created, value.updated].map((time) => (Number.isFinite(time) ? time : 0));
  const [title, model] = [value.title, value.model].map((text) => (typeof text === "string" ? text : ""));
  return { ...value, title, model, named: value.named === true, created: numbers[0], updated: numbers[1] };
}

function isNode(conversation, id, node) {
  if (!isRecord(node) || node.id !== id || !Array.isArray(node.children)) return false;
  const isOfNode = (child) => isRecord(conversation.nodes[child]) && conversation.nodes[child].parent === id;
  if (!node.children.every(isOfNode)) return false;
  if (node.chosen !== null && !node.children.includes(node.chosen)) return false;
  if (id === ROOT) return node.parent === null;
  return typeof node.text === "string" && (node.role === "user" || node.role === "assistant");
}

/** Whether every message is reachable from the root exactly once. */
function isTree(conversation) {
  const seen = new Set();
  const pending = [ROOT];
  while (pending.length) {
    const id = pending.pop();
    if (seen.has(id) || !conversation.nodes[id]) return false;
    seen.add(id);
    pending.push(...conversation.nodes[id].children);
  }
  return seen.size === Object.keys(conversation.nodes).length;
}

function isRecord(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function newId() {
  // crypto.randomUUID exists on secure origins only; a gateway in a home network often has no certificate.
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");
}
