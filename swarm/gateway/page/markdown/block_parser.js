// Parses Markdown into blocks: text -> a list of plain objects. Pure, and linear in the length of the text.

const MAX_DEPTH = 8;
const MAX_COLUMNS = 50;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]{0,8}([^\s`]{0,40})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})(?:([-*+])|(\d{1,9})([.)]))(?:([ \t]{1,4})(?=\S)|[ \t]*$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*){0,50}\|?[ \t]*$/;
const MAX_MARKUP_LINE = 2000; // characters; longer lines are text only

/**
 * The blocks of a text, in order. Each has `start`, the index of its first line. Types: `paragraph` and `heading`
 * (`text`, `level`), `code` (`text`, `language`), `quote` (`blocks`), `list` (`ordered`, `first`, `items`: each
 * `{blocks, done}`), `table` (`align`, `head`, `rows`), `rule`.
 *
 * Text that is added at the end changes at most the last two blocks (the last line may turn out to belong to the table
 * or list before it). The blocks before these stay as they are.
 */
export function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const [block, next] = readBlock(lines, at, depth);
    blocks.push({ ...block, start: at });
    at = next;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  if (line.length > MAX_MARKUP_LINE || depth > MAX_DEPTH) return readParagraph(lines, at, depth);
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = (heading[2] ?? "").trim().replace(/(?:^|[ \t])#{1,6}$/, "");
    return [{ type: "heading", level: heading[1].length, text }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (QUOTE.test(line)) return readQuote(lines, at, depth);
  if (ITEM.test(line)) return readList(lines, at, depth);
  if (startsTable(lines, at)) return readTable(lines, at);
  return readParagraph(lines, at, depth);
}

function readCode(lines, at, [, fence, language]) {
  const indent = /^ */.exec(lines[at])[0].length;
  const isEnd = (line) => line.length <= MAX_MARKUP_LINE && line.trim().length >= fence.length
    && line.search(/\S/) < 4 && line.trim() === fence[0].repeat(line.trim().length);
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => dedent(line, indent)).join("\n");
  return [{ type: "code", language, text, open: end === lines.length }, end + 1];
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const kind = first[2] ?? first[4];
  const items = [];
  for (;;) {
    const item = at < lines.length && lines[at].length <= MAX_MARKUP_LINE ? ITEM.exec(lines[at]) : null;
    if (!item || (item[2] ?? item[4]) !== kind || RULE.test(lines[at])) break;
    const width = item[0].length + (item[5] ? 0 : 1);
    const inside = Math.min(width, item[1].length + 2); // two spaces are enough, even below "10. "
    const end = endOfItem(lines, at, inside, depth);
    const inner = [lines[at].slice(item[0].length), ...lines.slice(at + 1, end).map((line) => dedent(line, width))];
    items.push(readItem(inner, depth));
    at = end;
    while (at < lines.length && lines[at].trim() === "") at += 1;
  }
  return [{ type: "list", ordered: first[3] !== undefined, first: Number(first[3] ?? 1), items }, at];
}

/** An item includes the lines that are indented to column `inside`, or that continue its paragraph. */
function endOfItem(lines, at, inside, depth) {
  let end = at + 1;
  let blank = false;
  for (let next = end; next < lines.length; next += 1) {
    const line = lines[next];
    const indent = line.search(/\S/);
    if (indent === -1) {
      blank = true;
      continue;
    }
    if (indent < inside && (blank || startsBlock(line.trimStart(), depth))) break;
    blank = false;
    end = next + 1;
  }
  return end;
}

function readItem(inner, depth) {
  const box = /^\[([ xX])\][ \t]+/.exec(inner[0]);
  if (box) inner[0] = inner[0].slice(box[0].length);
  return { done: box ? box[1] !== " " : null, blocks: parseBlocks(inner, depth + 1) };
}

function startsTable(lines, at) {
  const next = lines[at + 1];
  if (!lines[at].includes("|") || next === undefined || next.length > MAX_MARKUP_LINE) return false;
  if (!TABLE_RULE.test(next)) return false;
  return next.includes("-") && cells(lines[at]).length === cells(next).length;
}

function readTable(lines, at) {
  const head = cells(lines[at]);
  const align = cells(lines[at + 1]).map((cell) => {
    const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
    return left && right ? "center" : right ? "end" : "start";
  });
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|") && lines[end].trim() !== ""; end += 1) {
    const row = cells(lines[end]);
    rows.push(head.map((_, column) => row[column] ?? ""));
  }
  return [{ type: "table", head, align, rows }, end];
}

/** The cells of a table's line; `\|` does not separate them. */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/, MAX_COLUMNS).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function startsBlock(line, depth) {
  if (line.length > MAX_MARKUP_LINE || depth > MAX_DEPTH) return false;
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function readParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !interrupts(lines, end, depth)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd();
  return [{ type: "paragraph", text }, end];
}

/** Whether a line ends the paragraph before it. A line such as "1984. It was" does not. */
function interrupts(lines, at, depth) {
  if (lines[at].length > MAX_MARKUP_LINE || depth > MAX_DEPTH) return false;
  const item = ITEM.exec(lines[at]);
  if (item) return item[3] === undefined || item[3] === "1";
  return startsBlock(lines[at], depth) || startsTable(lines, at);
}

function dedent(line, width) {
  const indent = line.search(/\S|$/);
  return line.slice(Math.min(indent, width));
}
