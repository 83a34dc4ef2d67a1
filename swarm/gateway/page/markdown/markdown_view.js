// Shows Markdown as DOM nodes that are created one by one: a model's text is never parsed as HTML.

import { parseBlocks } from "./block_parser.js";
import { element, icon } from "../ui/dom.js";
import { parseInline } from "./inline_parser.js";

const MAY_CONTAIN_CODE = new Set(["code", "quote", "list"]); // where white space at the end is visible

/** A text that grows. Only the blocks at its end are parsed again, and only changed ones are drawn again. */
export class MarkdownView {
  constructor(container) {
    this.container = container;
    this.clear();
  }

  clear() {
    this.container.replaceChildren();
    this.settled = 0; // characters before the blocks that may still change
    this.text = "";
    this.tail = []; // {source, block, node} of the blocks after `settled`
  }

  /** Show this text. Cheap if it continues the last one. */
  update(written) {
    const text = written.replaceAll("\r", "");
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    const lines = text.slice(this.settled).split("\n");
    const blocks = parseBlocks(lines);
    const before = this.tail;
    this.tail = blocks.map((block, index) => {
      const source = lines.slice(block.start, blocks[index + 1]?.start).join("\n");
      return this.#draw({ source: MAY_CONTAIN_CODE.has(block.type) ? source : source.trimEnd(), block }, before[index]);
    });
    for (const { node } of before.slice(blocks.length)) node.remove();
    this.#settle(lines);
  }

  #draw(entry, before) {
    if (before?.source === entry.source) return { ...entry, node: before.node };
    if (before && appendToCode(before, entry)) return { ...entry, node: before.node };
    const node = drawBlock(entry.block);
    if (before) before.node.replaceWith(node);
    else this.container.append(node);
    return { ...entry, node };
  }

  #settle(lines) {
    if (this.tail.length <= 2) return;
    const first = this.tail.at(-2).block.start;
    this.settled += lines.slice(0, first).reduce((sum, line) => sum + line.length + 1, 0);
    this.tail = this.tail.slice(-2);
  }
}

/** If a code block only got longer, append the new characters to its text node. */
function appendToCode(before, { block }) {
  const same = before.block.type === "code" && block.type === "code" && before.block.language === block.language;
  if (!same || before.block.text === "" || !block.text.startsWith(before.block.text)) return false;
  before.node.querySelector("code").firstChild.appendData(block.text.slice(before.block.text.length));
  return true;
}

function drawBlock(block) {
  switch (block.type) {
    case "heading": // the page uses h1 and h2 itself
      return element(`h${Math.min(block.level + 2, 6)}`, { class: `level-${block.level}` }, ...drawInline(block.text));
    case "code":
      return drawCode(block);
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(drawBlock));
    case "list":
      return drawList(block);
    case "table":
      return drawTable(block);
    case "rule":
      return element("hr");
    default:
      return element("p", {}, ...drawInline(block.text));
  }
}

function drawCode({ text, language }) {
  const code = element("code", { text });
  const label = element("span", { text: "Copy" });
  const listener = { click: () => copyText(code.textContent, label) };
  const copy = element("button", { type: "button", class: "copy-code", on: listener }, icon("copy"), label);
  const bar = element("div", { class: "code-bar" }, element("span", { text: language || "text" }), copy);
  return element("div", { class: "code" }, bar, element("pre", { tabindex: "0" }, code));
}

function drawList({ ordered, first, items }) {
  const list = element(ordered ? "ol" : "ul", { start: ordered && first !== 1 ? first : null });
  for (const { done, blocks } of items) {
    const box = done === null ? null : element("input", { type: "checkbox", disabled: true, checked: done });
    const isPlain = blocks[0]?.type === "paragraph";
    const lead = isPlain ? element("span", {}, ...drawInline(blocks[0].text)) : null;
    list.append(element("li", { class: box && "task" }, box, lead, ...blocks.slice(isPlain ? 1 : 0).map(drawBlock)));
  }
  return list;
}

function drawTable({ head, align, rows }) {
  const row = (tag, texts) =>
    element("tr", {}, ...texts.map((text, column) => element(tag, { class: align[column] }, ...drawInline(text))));
  const table = element(
    "table",
    {},
    element("thead", {}, row("th", head)),
    element("tbody", {}, ...rows.map((texts) => row("td", texts))),
  );
  return element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}

function drawInline(text) {
  return parseInline(text).map((node) => drawNode(node, false));
}

const TAGS = { strong: "strong", emphasis: "em", deleted: "del" };

function drawNode(node, insideLink) {
  if (node.type === "text") return document.createTextNode(node.text);
  if (node.type === "code") return element("code", { text: node.text });
  if (node.type === "break") return element("br");
  const isLink = node.type === "link" && !insideLink;
  const children = node.children.map((child) => drawNode(child, insideLink || isLink));
  if (!isLink) return element(TAGS[node.type] ?? "span", {}, ...children);
  const attributes = { href: node.address, title: node.address, target: "_blank", rel: "noopener noreferrer nofollow" };
  return element("a", attributes, ...(children.length ? children : [node.address]));
}

/** Copy text to the clipboard, and confirm it in `label` for a moment. */
export async function copyText(text, label) {
  const before = label.dataset.before ?? label.textContent;
  label.dataset.before = before;
  try {
    await navigator.clipboard.writeText(text);
    label.textContent = "Copied";
  } catch {
    label.textContent = "Not allowed here"; // only local pages may do this without HTTPS
  }
  setTimeout(() => (label.textContent = before), 1500);
}
