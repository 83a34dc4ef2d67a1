// Creates DOM nodes. Nothing in this page is created from a string of HTML.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. `properties`: `class`, `text`, `dataset`, `on` (listeners by event), anything else is an attribute: true
 * gives an empty one; false, null and undefined give none. Children may be nodes, strings or null.
 */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") Object.entries(value).forEach(([event, listener]) => node.addEventListener(event, listener));
    else if (name === "dataset") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An icon that index.html defines as a symbol. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button with a text. */
export function textButton(text, onClick, properties = {}) {
  return element("button", { type: "button", class: "plain", text, on: { click: onClick }, ...properties });
}

/** A button with an icon; its label is the tooltip and the accessible name. */
export function iconButton(name, label, onClick, properties = {}) {
  return element(
    "button",
    { type: "button", class: "icon-button", title: label, "aria-label": label, on: { click: onClick }, ...properties },
    icon(name),
  );
}

/** The element of index.html with this id. */
export function byId(id) {
  return document.getElementById(id);
}
