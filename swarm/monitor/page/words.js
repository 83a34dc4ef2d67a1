// Formats numbers and facts as text. Pure.

const plain = new Intl.NumberFormat("en");
const signedPercent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1, signDisplay: "always" });

/** Formats a rate with two to three digits: `0.52`, `43`, `1,240`. */
export function rate(value) {
  if (value >= 100) return plain.format(Math.round(value));
  return String(Number(value.toPrecision(2)));
}

export function milliseconds(seconds) {
  if (seconds === null) return "–";
  const value = seconds * 1000;
  return value >= 1000 ? `${seconds.toFixed(1)} s` : `${value >= 10 ? Math.round(value) : Number(value.toPrecision(2))} ms`;
}

export function count(number, one, many) {
  return `${plain.format(number)} ${number === 1 ? one : many}`;
}

export function whole(number) {
  return plain.format(number);
}

/** Formats how long ago a moment was; `seconds` is its age. */
export function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

/** The name to show for a server. */
export function serverName(server) {
  return server.name || server.short_id;
}

export function precision(server) {
  const words = [server.quantization === "none" ? server.dtype : `${server.quantization} (${server.dtype})`];
  if (server.sparse) {
    const loss = server.perplexity_loss;
    words.push(loss === null ? "sparse" : `sparse (${signedPercent.format(loss)} perplexity)`);
  }
  if (server.exit_blocks.length > 0) words.push(`exits at ${server.exit_blocks.join(", ")}`);
  return words.join(", ");
}

/** What audits have said of a server. */
export function audits(server) {
  if (!server.audits) return "–";
  const { agreed, differed, quarantined } = server.audits;
  return `${whole(agreed)} of ${whole(agreed + differed)} agree${quarantined ? ", not used" : ""}`;
}

export function reach(server) {
  return server.relayed ? "relayed" : "direct";
}

const MOBILITY = { pinned: "keeps its blocks", cooling: "moved recently", free: "may move to other blocks" };

/** The state of a server. */
export function stateOf(server) {
  if (server.excluded) return `not used: ${server.excluded}`;
  if (server.disputed) return server.disputed;
  if (server.state === "joining") return "loading its blocks";
  if (server.state === "offline") return "has left";
  return MOBILITY[server.mobility] ?? server.mobility;
}

/** Blocks `[start, end)`. */
export function range(start, end) {
  return end - start === 1 ? `block ${start}` : `blocks ${start}:${end}`;
}

/** A sentence about one block, for the pointer and for screen readers. */
export function blockSentence(model, block) {
  const { servers, joining, throughput } = model.coverage[block];
  const loading = joining ? `, ${count(joining, "server is", "servers are")} loading it` : "";
  if (!servers) return `Block ${block} is missing: no server holds it${loading}`;
  const weakest = block === model.weakest ? ", the weakest block" : "";
  return `Block ${block}: ${rate(throughput)} tokens/s from ${count(servers, "server", "servers")}${weakest}${loading}`;
}

/** A sentence about the missing blocks of a model, or null. */
export function missingSentence(model) {
  if (!model.missing.length) return null;
  const ranges = model.missing.map(({ start, end }) => range(start, end));
  const list = ranges.length > 1 ? `${ranges.slice(0, -1).join(", ")} and ${ranges.at(-1)}` : ranges[0];
  const joining = model.missing.some(({ joining }) => joining) ? " Servers are loading some of them." : "";
  return `No server holds ${list}, so this model cannot answer now.${joining}`;
}
