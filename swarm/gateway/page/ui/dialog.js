// Asks the user in the browser's own dialog, which keeps the focus inside and closes with Esc.

import { byId, element, textButton } from "./dom.js";

/**
 * Ask a question. `field`, if given, holds the attributes of an input; `verb` is the text of the button that confirms.
 *
 * Returns the input's text ("" without a field), or null if the user cancels.
 */
export function ask({ title, text = null, field = null, verb, isDangerous = false }) {
  const dialog = byId("dialog");
  if (dialog.open) return Promise.resolve(null); // one question at a time
  const input = field && element("input", { ...field, "aria-labelledby": "dialog-title" });
  return new Promise((resolve) => {
    let answer = null;
    const form = element(
      "form",
      {},
      element("h2", { id: "dialog-title", text: title }),
      text === null ? null : element("p", { text }),
      input,
      element(
        "div",
        { class: "row" },
        textButton("Cancel", () => dialog.close()),
        element("button", { type: "submit", class: isDangerous ? "primary danger" : "primary", text: verb }),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      answer = input ? input.value.trim() : "";
      dialog.close();
    });
    dialog.replaceChildren(form);
    dialog.addEventListener("close", () => resolve(answer), { once: true });
    dialog.showModal();
    input?.select();
  });
}
