// Asks the monitor for views and the history. Tries again automatically.

const MIN_RETRY_MS = 1000;
const MAX_RETRY_MS = 30_000;
const MIN_PERIOD_MS = 500;
const ANSWER_TIMEOUT_MS = 40_000; // the first look at a swarm takes a while

/** The monitor needs an API key, and this browser has none or a wrong one. */
export class KeyNeeded extends Error {}

/** The API key, stored under the same name as by the chat page, because both may be served together. */
export const apiKey = {
  read() {
    try {
      return JSON.parse(localStorage.getItem("swarm.key"));
    } catch {
      return null;
    }
  },
  keep(key) {
    try {
      localStorage.setItem("swarm.key", JSON.stringify(key));
    } catch {
      // without storage, the page asks for the key again
    }
  },
};

async function request(path, signal) {
  const key = apiKey.read();
  const headers = typeof key === "string" && key ? { Authorization: `Bearer ${key}` } : {};
  const reply = await fetch(path, { signal, headers, cache: "no-store" });
  if (reply.status === 401) throw new KeyNeeded();
  if (!reply.ok) throw new Error(`the monitor answered ${reply.status}`);
  return reply;
}

/** Fetches the history of one model as columns, or null if there is none. */
export async function fetchHistory(model, hours) {
  const query = new URLSearchParams({ model, hours });
  const { models, end, seconds_per_point } = await (await request(`api/v1/history?${query}`)).json();
  return models[model] ? { ...models[model], end, step: seconds_per_point } : null;
}

/** Calls `listener.view(view)` once in its period while the page is visible, or `lost(reason)` or `needsKey()` on errors. */
export class Live {
  constructor(listener) {
    this.listener = listener;
    this.retryDelay = MIN_RETRY_MS;
    this.controller = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  start() {
    this.stop();
    this.controller = new AbortController();
    this.#run(this.controller);
  }

  stop() {
    clearTimeout(this.timer);
    this.controller?.abort();
  }

  async #run(controller) {
    try {
      const signal = AbortSignal.any([controller.signal, AbortSignal.timeout(ANSWER_TIMEOUT_MS)]);
      const view = await (await request("api/v1/swarm", signal)).json();
      if (controller !== this.controller || document.hidden) return;
      this.retryDelay = MIN_RETRY_MS;
      this.listener.view(view);
      this.timer = setTimeout(() => this.start(), Math.max(view.period * 1000, MIN_PERIOD_MS));
    } catch (error) {
      if (controller !== this.controller || document.hidden) return;
      if (error instanceof KeyNeeded) return this.listener.needsKey();
      this.listener.lost(error.message);
      this.timer = setTimeout(() => this.start(), this.retryDelay);
      this.retryDelay = Math.min(this.retryDelay * 2, MAX_RETRY_MS);
    }
  }
}
