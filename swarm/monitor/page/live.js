// What the monitor sends: views as they come, and the history. Reconnects by itself.

const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 30_000;
const SILENCE = 40_000; // the monitor gives a sign of life every 15 s
const LONGEST_EVENT = 20_000_000;

/** The monitor wants a key that this browser has not, or has a wrong one. */
export class KeyNeeded extends Error {}

/** The key is kept under the chat page's name, as both may be served together. */
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
      // a browser that keeps nothing asks again
    }
  },
};

async function ask(path, signal) {
  const key = apiKey.read();
  const headers = typeof key === "string" && key ? { Authorization: `Bearer ${key}` } : {};
  const reply = await fetch(path, { signal, headers, cache: "no-store" });
  if (reply.status === 401) throw new KeyNeeded();
  if (!reply.ok) throw new Error(`the monitor answered ${reply.status}`);
  return reply;
}

/** Points of the last hours of one model: columns, or null if there are none. */
export async function fetchHistory(model, hours) {
  const query = new URLSearchParams({ model, hours });
  const { models, end, seconds_per_point } = await (await ask(`api/v1/history?${query}`)).json();
  return models[model] ? { ...models[model], end, step: seconds_per_point } : null;
}

/** Calls `listener.view(view)` for every look while the page is seen, `lost(reason)` and `needsKey()` when it cannot. */
export class Live {
  constructor(listener) {
    this.listener = listener;
    this.pause = FIRST_PAUSE;
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
      const reply = await ask("api/v1/live", controller.signal);
      for await (const data of events(reply.body, controller)) {
        this.pause = FIRST_PAUSE;
        this.listener.view(JSON.parse(data));
      }
      throw new Error("the monitor ended the connection");
    } catch (error) {
      if (controller !== this.controller || document.hidden) return;
      if (error instanceof KeyNeeded) return this.listener.needsKey();
      this.listener.lost(error.message);
      this.timer = setTimeout(() => this.start(), this.pause);
      this.pause = Math.min(this.pause * 2, LONGEST_PAUSE);
    }
  }
}

/** The data of the events named `swarm`. A stream that is silent for long is given up. */
async function* events(body, controller) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let watchdog;
  try {
    for (;;) {
      watchdog = setTimeout(() => controller.abort(new Error("the monitor is silent")), SILENCE);
      const { value, done } = await reader.read();
      clearTimeout(watchdog);
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      if (rest.length > LONGEST_EVENT) throw new Error("the monitor sent nonsense");
      for (const part of parts) if (part.startsWith("event: swarm\ndata: ")) yield part.slice("event: swarm\ndata: ".length);
    }
  } finally {
    clearTimeout(watchdog);
    reader.cancel().catch(() => {});
  }
}
