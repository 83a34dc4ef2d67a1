// Parses Markdown within one paragraph: text -> a tree of plain objects. Pure, and linear in the length of the text.

/** Characters. A longer paragraph stays plain text, since it would be parsed again with every token. */
export const MAX_FORMATTED = 20_000;

const MAX_DEPTH = 12;
const SAFE_SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ADDRESS = /[^\s<>()]{1,2000}(?:\([^\s<>()]{0,500}\)[^\s<>()]{0,500})?/.source; // may contain one (pair)
const TITLE = /(?:[ \n]{1,4}"[^"\n]{0,500}")?/.source;
const LINK_TARGET = new RegExp(`\\]\\([ \\n]{0,4}<?(${ADDRESS})>?${TITLE}[ \\n]{0,4}\\)`, "y");
const BARE_LINK = /https?:\/\/[^\s<>"'`\])}*]{1,2000}/y;
const PLAIN = /[^\\`*_~[\]!h\n]+/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const MARKS = { "**": "strong", __: "strong", "*": "emphasis", _: "emphasis", "~~": "deleted" };

/** The address if it is safe as a link (a full http, https or mailto address), else null. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return SAFE_SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null; // also relative addresses, which would lead into this gateway
  }
}

/**
 * The tree of one paragraph: nodes are `{type: "text", text}`, `{type: "code", text}`, `{type: "break"}` and, with
 * `children`, `strong`, `emphasis`, `deleted` and `link` (which has an `address`).
 */
export function parseInline(text) {
  if (text.length > MAX_FORMATTED) return [{ type: "text", text }];
  return buildTree(new InlineScanner(text).tokens());
}

/** Splits a paragraph into tokens; `open` and `close` are set on markers that have a partner. */
class InlineScanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.out = [];
    this.openers = []; // markers and brackets that may still find their partner, the innermost last
    this.openCounts = new Map(); // how many of each kind are among them, so that no search is in vain
    this.backticks = findBackticks(text);
  }

  tokens() {
    while (this.at < this.text.length) this.step();
    return this.out;
  }

  step() {
    const { text, at } = this;
    const char = text[at];
    PLAIN.lastIndex = at;
    const plain = PLAIN.exec(text);
    if (plain) this.add(plain[0]);
    else if (char === "\n") this.lineBreak();
    else if (char === "\\" && PUNCTUATION.test(text[at + 1] ?? "")) this.add(text[at + 1], 2);
    else if (char === "`") this.code();
    else if (char === "*" || char === "_" || char === "~") this.mark(char);
    else if (char === "!" && text[at + 1] === "[") this.bracket(2); // an image becomes a link: nothing is loaded
    else if (char === "[") this.bracket(1);
    else if (char === "]") this.closeBracket();
    else if (char === "h") this.bareLink();
    else this.add(char);
  }

  add(text, length = text.length) {
    const last = this.out.at(-1);
    if (last?.type === "text" && !last.mark) last.text += text;
    else this.out.push({ type: "text", text });
    this.at += length;
  }

  lineBreak() {
    this.out.push({ type: "break" });
    this.at += 1;
  }

  code() {
    const start = this.at;
    const length = this.backticks.runs.get(start);
    if (length === undefined) return this.add("`"); // the rest of a run that began with an escaped one
    const ends = this.backticks.byLength.get(length);
    while (ends.length && ends.at(-1) <= start) ends.pop();
    if (!ends.length) return this.add("`".repeat(length));
    const end = ends.at(-1);
    const inner = this.text.slice(start + length, end).replaceAll("\n", " ");
    const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
    this.out.push({ type: "code", text: padded ? inner.slice(1, -1) : inner });
    this.at = end + length;
  }

  mark(char) {
    const { text, at } = this;
    const innermost = this.openers.at(-1);
    const double = text[at + 1] === char && !(text[at + 2] === char && innermost?.kind === char); // ***both***
    if (char === "~" && !double) return this.add(char);
    const mark = double ? char + char : char;
    const before = text[at - 1] ?? " ";
    const after = text[at + mark.length] ?? " ";
    const inWord = char === "_" && WORD.test(before) && WORD.test(after); // snake_case
    const isEmpty = innermost !== undefined && this.out.at(-1) === innermost.token; // **** is not an empty bold text
    const token = { type: "text", text: mark, mark: true };
    this.out.push(token);
    this.at += mark.length;
    if (inWord) return;
    const opener = isEmpty || /\s/.test(before) ? null : this.takeOpener(mark);
    if (opener) {
      opener.token.open = { type: MARKS[mark] };
      token.close = true;
    } else if (!/\s/.test(after)) this.push(mark, token);
  }

  bracket(length) {
    const token = { type: "text", text: this.text.slice(this.at, this.at + length), mark: true };
    this.out.push(token);
    this.at += length;
    this.push("[", token);
  }

  closeBracket() {
    LINK_TARGET.lastIndex = this.at;
    const opener = this.takeOpener("[");
    const target = opener && LINK_TARGET.exec(this.text);
    const address = target && safeAddress(target[1]);
    if (!address) return this.add("]");
    opener.token.open = { type: "link", address };
    this.out.push({ type: "text", text: "", mark: true, close: true });
    this.at += target[0].length;
  }

  bareLink() {
    BARE_LINK.lastIndex = this.at;
    const found = WORD.test(this.text[this.at - 1] ?? " ") ? null : BARE_LINK.exec(this.text);
    const shown = found?.[0].replace(/[.,;:!?]{1,20}$/, "");
    const address = shown && !this.openCounts.get("[") ? safeAddress(shown) : null;
    if (!address) return this.add("h");
    this.out.push({ type: "link", address, children: [{ type: "text", text: shown }] });
    this.at += shown.length;
  }

  push(kind, token) {
    this.openers.push({ kind, token });
    this.openCounts.set(kind, (this.openCounts.get(kind) ?? 0) + 1);
  }

  /** Remove and return the innermost opener of this kind, or null. Openers within it cannot find a partner any more. */
  takeOpener(kind) {
    if (!this.openCounts.get(kind)) return null;
    for (;;) {
      const opener = this.openers.pop();
      this.openCounts.set(opener.kind, this.openCounts.get(opener.kind) - 1);
      if (opener.kind === kind) return opener;
    }
  }
}

/** All runs of backticks: their lengths by position, and the positions of each length, last first. */
function findBackticks(text) {
  const runs = new Map();
  const byLength = new Map();
  for (const match of text.matchAll(/`+/g)) {
    const length = match[0].length;
    runs.set(match.index, length);
    if (!byLength.has(length)) byLength.set(length, []);
    byLength.get(length).push(match.index);
  }
  for (const places of byLength.values()) places.reverse();
  return { runs, byLength };
}

/** Tokens -> a tree. What is nested deeper than `MAX_DEPTH` loses its formatting, not its text. */
function buildTree(tokens) {
  const root = { children: [] };
  const stack = [root];
  let tooDeep = 0;
  for (const token of tokens) {
    if (token.open && stack.length > MAX_DEPTH) tooDeep += 1;
    else if (token.open) {
      const node = { ...token.open, children: [] };
      stack.at(-1).children.push(node);
      stack.push(node);
    } else if (token.close && tooDeep) tooDeep -= 1;
    else if (token.close) stack.pop();
    else stack.at(-1).children.push(token.type === "text" ? { type: "text", text: token.text } : token);
  }
  return root.children;
}
