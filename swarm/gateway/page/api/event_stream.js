// Reads server-sent events from the body of a response. EventSource cannot be used: it supports neither POST nor headers.

const MAX_EVENT_CHARACTERS = 4_000_000; // a longer line is not an event

/** The events of a stream in order: `{event, data}`, `event` being "message" unless it is named. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.feed(value);
    }
  } finally {
    reader.cancel().catch(() => {}); // close the connection if the caller stopped early
  }
}

/** Takes pieces of text, and returns the events that are complete. */
export class EventParser {
  constructor() {
    this.rest = "";
    this.event = "message";
    this.data = [];
  }

  feed(text) {
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop();
    if (this.rest.length > MAX_EVENT_CHARACTERS) throw new Error("the event is too long");
    return lines.map((line) => this.#line(line)).filter((event) => event !== null);
  }

  #line(line) {
    if (line === "") return this.#end();
    const [, field, value] = /^([^:]*):? ?([^]*)$/.exec(line);
    if (field === "event") this.event = value;
    if (field === "data") this.data.push(value);
    return null;
  }

  #end() {
    const event = this.data.length ? { event: this.event, data: this.data.join("\n") } : null;
    this.event = "message";
    this.data = [];
    return event;
  }
}
