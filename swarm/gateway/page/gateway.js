// What the page asks of the gateway. Failures become a GatewayError that says what to do next.

import { readEvents } from "./sse.js";
import { keep, recall } from "./storage.js";

/** Something that the reader is told: `kind` is key, busy, unavailable, network or request. */
export class GatewayError extends Error {
  constructor(kind, message, { retryAfter = null, status = null } = {}) {
    super(message);
    this.kind = kind;
    this.retryAfter = retryAfter; // seconds
    this.status = status;
  }
}

export const apiKey = {
  read: () => recall("key"),
  keep: (key) => keep("key", key || null),
};

/** The models that can be asked: OpenAI's fields, and `swarm` with what this gateway knows of them. */
export async function fetchModels() {
  const reply = await send("v1/models", {});
  const { data } = await reply.json();
  return Array.isArray(data) ? data.filter(({ id }) => typeof id === "string") : [];
}

/** The monitor's view of the swarm, or null if this gateway has none to show. */
export async function fetchSwarm() {
  try {
    const reply = await send("monitor/api/v1/swarm", {});
    return await reply.json();
  } catch {
    return null;
  }
}

/**
 * The answer to a request as it comes: `{kind: "text", text}`, `{kind: "finish", reason}` and the gateway's own events
 * (`route`, `lost`, `missing`, `recovered`, `done`).
 *
 * Throws a GatewayError; an AbortError if `signal` was aborted.
 */
export async function* askForAnswer({ path, body }, signal) {
  const reply = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Swarm-Details": "1" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  let isWhole = false;
  try {
    for await (const { event, data } of readEvents(reply.body)) {
      if (data === "[DONE]") isWhole = true;
      else if (event === "swarm") yield JSON.parse(data);
      else if (event === "message") yield* readChunk(JSON.parse(data));
    }
  } catch (error) {
    if (error instanceof GatewayError || signal.aborted) throw error;
    throw lostConnection();
  }
  if (!isWhole) throw lostConnection();
}

function* readChunk(chunk) {
  if (chunk.error) throw new GatewayError("unavailable", sentence(chunk.error.message ?? "The answer broke off"));
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? choice?.text;
  if (typeof text === "string" && text !== "") yield { kind: "text", text };
  if (choice?.finish_reason) yield { kind: "finish", reason: choice.finish_reason };
}

async function send(path, options) {
  const key = apiKey.read();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let reply;
  try {
    reply = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new GatewayError("network", "The gateway cannot be reached. Is it running, and are you online?");
  }
  if (!reply.ok) throw await failure(reply);
  return reply;
}

async function failure(reply) {
  const said = await reply.json().then(({ error }) => error?.message, () => null);
  const message = reply.status === 401 ? whichKey() : sentence(said ?? `The gateway answered ${reply.status}`);
  const seconds = Number(reply.headers.get("Retry-After") ?? NaN);
  const retryAfter = Number.isFinite(seconds) ? Math.min(Math.max(Math.ceil(seconds), 1), 3600) : null;
  return new GatewayError(kindOf(reply.status), message, { retryAfter, status: reply.status });
}

function kindOf(status) {
  if (status === 401 || status === 403) return "key";
  if (status === 429) return "busy";
  return status >= 500 ? "unavailable" : "request";
}

function whichKey() {
  if (apiKey.read()) return "This gateway does not know this key.";
  return "This gateway asks who you are. Whoever runs it can give you a key.";
}

function lostConnection() {
  return new GatewayError("network", "The connection to the gateway was lost in mid-answer. What had arrived is kept.");
}

function sentence(text) {
  const trimmed = String(text).trim();
  const whole = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?…]$/.test(whole) ? whole : `${whole}.`;
}
