// Makes and updates DOM nodes. Texts of peers become text nodes and attributes, never HTML.

/** Makes an element. `class`, `text` and `on` (listeners by event) are special; any other key is an attribute. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  fill(node, properties);
  node.append(...children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** Makes an SVG element in the same way. */
export function shape(tag, properties = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  fill(node, properties);
  node.append(...children);
  return node;
}

function fill(node, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else node.setAttribute(name, value);
  }
}

/** Sets the text only if it differs, so that nothing flickers and no selection is lost. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets an attribute only if it differs; null removes it. */
export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/**
 * Make the children of `parent` those of `items`, in their order. Children are known by `key(item)` and kept.
 *
 * `make(item)` makes a new child, `update(child, item)` is called for every one.
 */
export function reconcile(parent, items, key, make, update) {
  const known = new Map([...parent.children].map((child) => [child.itemKey, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    let child = known.get(key(item));
    if (child === undefined) {
      child = make(item);
      child.itemKey = key(item);
    }
    known.delete(key(item));
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place); // moving only what is out of place preserves the focus
  }
  for (const child of known.values()) child.remove();
}
