// The page's requests to the gateway. Errors become a GatewayError that says what to do next.

import { readEvents } from "./event_stream.js";
import { loadValue, storeValue } from "../chat/storage.js";

/** An error to show to the user: `kind` is key, busy, unavailable, network or request. */
export class GatewayError extends Error {
  constructor(kind, message, { retryAfter = null, status = null } = {}) {
    super(message);
    this.kind = kind;
    this.retryAfter = retryAfter; // in seconds
    this.status = status;
  }
}

export const apiKey = {
  read: () => loadValue("key"),
  store: (key) => storeValue("key", key || null),
};

/** The gateway's models: OpenAI's fields, and this project's own under `swarm`. */
export async function fetchModels() {
  const response = await send("v1/models", {});
  const { data } = await response.json();
  return Array.isArray(data) ? data.filter(({ id }) => typeof id === "string") : [];
}

/** The monitor's view of the swarm, or null if this gateway does not have the monitor. */
export async function fetchSwarm() {
  try {
    const response = await send("monitor/api/v1/swarm", {});
    return await response.json();
  } catch {
    return null;
  }
}

/**
 * The events of an answer as they come: `{kind: "thought", text}`, `{kind: "text", text}`, `{kind: "finish", reason}` and
 * the gateway's own events (`route`, `lost`, `missing`, `recovered`, `done`).
 *
 * Throws a GatewayError; an AbortError if `signal` was aborted.
 */
export async function* streamAnswer({ path, body }, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Swarm-Details": "1" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  let isComplete = false;
  try {
    for await (const { event, data } of readEvents(response.body)) {
      if (data === "[DONE]") isComplete = true;
      else if (event === "swarm") yield JSON.parse(data);
      else if (event === "message") yield* readChunk(JSON.parse(data));
    }
  } catch (error) {
    if (error instanceof GatewayError || signal.aborted) throw error;
    throw lostConnection();
  }
  if (!isComplete) throw lostConnection();
}

function* readChunk(chunk) {
  if (chunk.error) throw new GatewayError("unavailable", toSentence(chunk.error.message ?? "The answer ended early"));
  const choice = chunk.choices?.[0];
  const thought = choice?.delta?.reasoning_content;
  if (typeof thought === "string" && thought !== "") yield { kind: "thought", text: thought };
  const text = choice?.delta?.content ?? choice?.text;
  if (typeof text === "string" && text !== "") yield { kind: "text", text };
  if (choice?.finish_reason) yield { kind: "finish", reason: choice.finish_reason };
}

async function send(path, options) {
  const key = apiKey.read();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new GatewayError("network", "The gateway cannot be reached. Is it running, and are you online?");
  }
  if (!response.ok) throw await responseError(response);
  return response;
}

async function responseError(response) {
  const reason = await response.json().then(({ error }) => error?.message, () => null);
  const message = response.status === 401 ? keyMessage() : toSentence(reason ?? `The gateway answered ${response.status}`);
  const seconds = Number(response.headers.get("Retry-After") ?? NaN);
  const retryAfter = Number.isFinite(seconds) ? Math.min(Math.max(Math.ceil(seconds), 1), 3600) : null;
  return new GatewayError(kindOf(response.status), message, { retryAfter, status: response.status });
}

function kindOf(status) {
  if (status === 401 || status === 403) return "key";
  if (status === 429) return "busy";
  return status >= 500 ? "unavailable" : "request";
}

function keyMessage() {
  if (apiKey.read()) return "This gateway does not know this key.";
  return "This gateway requires an API key. Its operator can give you one.";
}

function lostConnection() {
  return new GatewayError("network", "The connection to the gateway was lost during the answer. The text so far is kept.");
}

function toSentence(text) {
  const trimmed = String(text).trim();
  const whole = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?…]$/.test(whole) ? whole : `${whole}.`;
}
