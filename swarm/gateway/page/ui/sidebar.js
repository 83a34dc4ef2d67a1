// The list of conversations, newest first, with a menu for each. On narrow screens it is a drawer.

import { ask } from "./dialog.js";
import { byId, element, icon, iconButton } from "./dom.js";
import { asJson, asMarkdown, download, fileName } from "../chat/export.js";

const DAY_MS = 24 * 60 * 60 * 1000;

/** `page` offers `store`, `open(id)`, `renamed(conversation)`, `deleted(id)`, `isRunning(id)`. */
export class Sidebar {
  constructor(page) {
    this.page = page;
    this.list = byId("conversations");
    this.menu = byId("conversation-menu");
    this.drawer = byId("sidebar");
    byId("drawer-open").addEventListener("click", () => this.openDrawer());
    byId("drawer-close").addEventListener("click", () => this.closeDrawer());
    byId("backdrop").addEventListener("click", () => this.closeDrawer());
    this.drawer.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isDrawerOpen()) {
        event.stopPropagation();
        this.closeDrawer();
      }
    });
    this.menu.addEventListener("keydown", (event) => this.#moveInMenu(event));
  }

  isDrawerOpen() {
    return document.body.classList.contains("drawer");
  }

  openDrawer() {
    document.body.classList.add("drawer");
    byId("drawer-close").focus();
  }

  closeDrawer() {
    if (!this.isDrawerOpen()) return;
    document.body.classList.remove("drawer");
    byId("drawer-open").focus();
  }

  /** Draw the list; `current` is the id of the conversation that is shown. */
  draw(current) {
    const conversations = this.page.store.list();
    const lines = conversations.map(({ id, title, updated }) => [id, title, dateGroup(updated), this.page.isRunning(id)]);
    const signature = JSON.stringify([current, lines]);
    if (signature === this.signature) return; // unchanged: the focus stays
    this.signature = signature;
    const groups = Map.groupBy(conversations, ({ updated }) => dateGroup(updated));
    const parts = [...groups].map(([title, members]) => [
      element("h2", { text: title }),
      element("ul", {}, ...members.map((conversation) => this.#item(conversation, conversation.id === current))),
    ]);
    const empty = "Your conversations are listed here. They stay in this browser.";
    this.list.replaceChildren(...(parts.length ? parts.flat() : [element("p", { class: "empty", text: empty })]));
  }

  #item(conversation, isCurrent) {
    const title = conversation.title || "New chat";
    const open = element(
      "button",
      { type: "button", class: "open", title, "aria-current": isCurrent ? "true" : null },
      this.page.isRunning(conversation.id) ? element("i", { class: "busy", "aria-label": "being answered" }) : null,
      element("span", { text: title }),
    );
    open.addEventListener("click", () => {
      this.closeDrawer();
      this.page.open(conversation.id);
    });
    const openMenu = () => this.#openMenu(conversation, more);
    const more = iconButton("more", `More for ${title}`, openMenu, { class: "icon-button more" });
    return element("li", {}, open, more);
  }

  #openMenu(conversation, button) {
    const menuItem = (name, label, action, kind = null) =>
      element("button", {
        type: "button",
        role: "menuitem",
        class: kind,
        on: {
          click: () => {
            this.menu.hidePopover();
            action();
          },
        },
      }, icon(name), label);
    const save = (extension, write, type) => download(fileName(conversation, extension), write(conversation), type);
    this.menu.replaceChildren(
      menuItem("edit", "Rename", () => this.#rename(conversation)),
      menuItem("save", "Save as Markdown", () => save("md", asMarkdown, "text/markdown")),
      menuItem("save", "Save as JSON", () => save("json", asJson, "application/json")),
      menuItem("delete", "Delete", () => this.#delete(conversation), "danger"),
    );
    const place = button.getBoundingClientRect();
    this.menu.showPopover();
    this.menu.style.left = `${Math.max(8, Math.min(place.left, innerWidth - this.menu.offsetWidth - 8))}px`;
    this.menu.style.top = `${Math.max(8, Math.min(place.bottom + 4, innerHeight - this.menu.offsetHeight - 8))}px`;
    this.menu.firstChild.focus();
  }

  #moveInMenu(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const items = [...this.menu.children];
    items.at((items.indexOf(document.activeElement) + step) % items.length).focus();
  }

  async #rename(conversation) {
    const field = { type: "text", value: conversation.title, maxlength: 120, required: true };
    const title = await ask({ title: "Rename this conversation", field, verb: "Rename" });
    if (!title) return;
    conversation.title = title;
    conversation.named = true;
    this.page.renamed(conversation);
  }

  async #delete(conversation) {
    const text = `“${conversation.title || "New chat"}” will be deleted from this browser. There is no other copy.`;
    const answer = await ask({ title: "Delete this conversation?", text, verb: "Delete", isDangerous: true });
    if (answer !== null) this.page.deleted(conversation.id);
  }
}

function dateGroup(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY_MS) return "Yesterday";
  return time >= midnight - 7 * DAY_MS ? "Last seven days" : "Earlier";
}
