// Server-sent events from the bytes of a reply. EventSource cannot be used: it knows neither POST nor headers.

const LONGEST_EVENT = 4_000_000; // characters; whoever sends more without an end sends no events

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
    reader.cancel().catch(() => {}); // the reader left early: let the gateway know
  }
}

/** Pieces of text in, whole events out. */
export class EventParser {
  constructor() {
    this.rest = "";
    this.event = "message";
    this.data = [];
  }

  feed(text) {
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop();
    if (this.rest.length > LONGEST_EVENT) throw new Error("the event is too long");
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
