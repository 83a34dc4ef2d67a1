// Draws one message: text, versions, figures, the route, notices and errors. Sends no requests.

import { element, icon, iconButton, textButton } from "../ui/dom.js";
import { drawDetails, drawLights } from "./answer_details.js";
import { imageView } from "./images.js";
import { copyText, MarkdownView } from "../markdown/markdown_view.js";

/**
 * The view of one message. `actions`: `edit(id, text)`, `regenerate(id)`, `choose(id, direction)`, `retry(id)`,
 * `continueAnswer(id)`, `canContinue(node)`.
 */
export class MessageView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.isUser = node.role === "user";
    this.body = element("div", { class: this.isUser ? "bubble" : "body" });
    this.notice = element("div", { class: "notice", hidden: true });
    this.foot = element("div", { class: "foot" });
    this.facts = element("div", { class: "facts", role: "group", "aria-label": "How this was computed", hidden: true });
    const label = this.isUser ? "You" : `Answer${node.model ? ` of ${node.model}` : ""}`;
    this.thought = element("p");
    this.thoughts = element("details", { class: "thoughts", hidden: true }, element("summary", { text: "Thoughts" }), this.thought);
    const pictures = node.images ? element("div", { class: "pictures" }, ...node.images.map(imageView)) : null;
    const parts = this.isUser ? [pictures, this.body, this.foot] : [this.thoughts, this.body, this.notice, this.foot, this.facts];
    this.element = element("article", { class: `message ${node.role}`, "aria-label": label }, ...parts);
    this.markdown = this.isUser ? null : new MarkdownView(this.body);
    if (this.isUser) this.body.textContent = node.text;
  }

  /** Show the message as it is now. `notice` is `{kind, text}` or null; `version` comes from `versionOf`. */
  update(version, notice = null) {
    const { node } = this;
    this.element.classList.toggle("running", node.state === "running");
    if (this.markdown) {
      this.element.setAttribute("aria-busy", String(node.state === "running"));
      this.markdown.update(node.text);
      if (this.thought.textContent !== (node.thought ?? "")) this.thought.textContent = node.thought;
      this.thoughts.hidden = !node.thought;
      this.#drawNotice(notice);
    }
    const facts = [node.state, version, node.figures, node.route, node.error, node.recoveries, node.finish];
    const signature = JSON.stringify([...facts, !this.isUser && this.actions.canContinue(node)]);
    if (signature === this.signature) return; // unchanged: the foot stays, and with it the focus
    this.signature = signature;
    this.foot.replaceChildren(...this.#footParts(version));
    if (!this.isUser) this.facts.replaceChildren(...drawDetails(node));
  }

  #drawNotice(notice) {
    const isWaiting = this.node.state === "running" && this.node.text === "" && !notice;
    const kind = notice?.kind ?? (isWaiting ? "waiting" : this.node.error ? "failed" : "");
    const signature = JSON.stringify([kind, notice, this.node.error, Boolean(this.node.thought)]);
    if (signature === this.noticeSignature) return;
    this.noticeSignature = signature;
    this.notice.hidden = kind === "";
    this.notice.className = `notice ${kind}`;
    if (kind === "failed") this.notice.replaceChildren(...this.#failure());
    else if (kind) {
      const text = notice?.text ?? (this.node.thought ? "Thinking" : "Waiting for the first words");
      this.notice.replaceChildren(waitingAnimation(), element("span", { text }));
    }
    if (kind === "failed") this.notice.setAttribute("role", "alert");
    else this.notice.removeAttribute("role");
  }

  #failure() {
    const { message, retryAfter, at } = this.node.error;
    const button = textButton("", () => this.actions.retry(this.node.id), { class: "plain again" });
    countDown(button, retryAfter === null ? 0 : at + retryAfter * 1000);
    return [element("p", { text: message }), button];
  }

  #footParts(version) {
    const { node, actions } = this;
    const parts = [];
    if (version.count > 1) parts.push(this.#versions(version));
    if (node.state === "running") return [...parts, ...this.#figures()];
    if (node.text) parts.push(iconButton("copy", "Copy", ({ currentTarget }) => this.#copy(currentTarget)));
    if (this.isUser) parts.push(iconButton("edit", "Edit", () => this.startEdit()));
    else if (!node.error) parts.push(iconButton("again", "Write another answer", () => actions.regenerate(node.id)));
    if (!this.isUser) parts.push(...this.#figures());
    if (!this.isUser && this.actions.canContinue(node)) {
      parts.push(textButton("Continue", () => actions.continueAnswer(node.id), { class: "figures" }));
    }
    return parts;
  }

  #versions({ number, count, before, after }) {
    const turn = (direction, label, isThere) => {
      const properties = { disabled: !isThere, dataset: { direction } };
      return iconButton(direction, label, () => this.actions.choose(this.node.id, direction), properties);
    };
    return element(
      "span",
      { class: "versions", role: "group", "aria-label": "Versions" },
      turn("left", "Earlier version", before !== null),
      element("span", { text: `${number}/${count}` }),
      turn("right", "Later version", after !== null),
    );
  }

  #figures() {
    const { figures, route, state, finish } = this.node;
    const words = [];
    const rate = figures?.tokens_per_second;
    if (rate !== undefined) words.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
    if (state === "stopped") words.push("stopped");
    if (finish === "length" && state === "done") words.push("cut off at the token limit");
    if (!words.length && !route) return [];
    const button = element(
      "button",
      { type: "button", class: "figures", "aria-expanded": String(!this.facts.hidden), title: routeTitle(route) },
      route ? drawLights(route) : null,
      element("span", { text: words.join(" · ") || `${route.length} ${route.length === 1 ? "hop" : "hops"}` }),
    );
    button.addEventListener("click", () => {
      this.facts.hidden = !this.facts.hidden;
      button.setAttribute("aria-expanded", String(!this.facts.hidden));
      if (!this.facts.hidden) this.facts.scrollIntoView({ block: "nearest" });
    });
    return [button];
  }

  #copy(button) {
    const label = element("span", { class: "copied", text: "" });
    button.append(label);
    copyText(this.node.text, label);
    setTimeout(() => label.remove(), 1500);
  }

  /** Let the user change this message; it is sent again as a new version. */
  startEdit() {
    const rows = Math.min(this.node.text.split("\n").length + 1, 12);
    const field = element("textarea", { "aria-label": "Edit the message", rows });
    field.value = this.node.text;
    const end = () => {
      form.replaceWith(this.body);
      this.foot.hidden = false;
    };
    const send = () => {
      const text = field.value.trim();
      end();
      if (text) this.actions.edit(this.node.id, text);
    };
    const submit = element("button", { type: "submit", class: "primary", text: "Send" });
    const row = element("div", { class: "row" }, textButton("Cancel", end), submit);
    const form = element("form", { class: "edit" }, field, row);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
        this.foot.querySelector("button")?.focus();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === field) {
        event.preventDefault();
        send();
      }
    });
    this.foot.hidden = true;
    this.body.replaceWith(form);
    field.focus();
  }
}

function routeTitle(route) {
  return route ? `Computed by ${route.map(({ name, peer }) => name || peer).join(", ")}` : "How this was computed";
}

function waitingAnimation() {
  return element("span", { class: "wander", "aria-hidden": "true" }, element("i"), element("i"), element("i"));
}

/** Show on the button how long to wait, and enable it afterwards. */
function countDown(button, end) {
  const seconds = Math.ceil((end - Date.now()) / 1000);
  button.disabled = seconds > 0;
  button.replaceChildren(icon("again"), seconds > 0 ? `Try again in ${seconds} s` : "Try again");
  if (seconds > 0) setTimeout(() => countDown(button, end), 250);
}
