// Settings of the chat: read from their form, stored in the browser, and turned into requests.

import { byId } from "../ui/dom.js";
import { loadValue, storeValue } from "./storage.js";

/** The range of each number. An empty field is not sent, so that the gateway's default applies. */
export const NUMBERS = {
  temperature: { min: 0, max: 2 },
  top_p: { min: 0, max: 1 },
  max_tokens: { min: 1, max: 1_000_000, isInteger: true },
  seed: { min: 0, max: 2 ** 31 - 1, isInteger: true },
};

const COMPLETION_MAX_TOKENS = 256; // models that continue texts rarely end by themselves, and OpenAI's default is 16

/** The stored settings: `{system, temperature, top_p, max_tokens, seed}`; those that are not set are absent. */
export function readSettings() {
  const stored = loadValue("settings", {});
  const settings = typeof stored?.system === "string" && stored.system ? { system: stored.system } : {};
  for (const name of Object.keys(NUMBERS)) {
    const value = parseSetting(name, stored?.[name]);
    if (value !== null) settings[name] = value;
  }
  return settings;
}

/** The value as a number if it is valid for this setting, else null. */
export function parseSetting(name, value) {
  const { min, max, isInteger } = NUMBERS[name];
  if (value === "" || value === null || value === undefined) return null;
  const number = Number(value);
  const isValid = Number.isFinite(number) && number >= min && number <= max && (!isInteger || Number.isInteger(number));
  return isValid ? number : null;
}

/**
 * The request for an answer to these messages. A model without a chat template continues the text so far.
 *
 * Returns `{path, body}` for `streamAnswer`.
 */
export function makeRequest(model, messages, settings, hasChatTemplate) {
  const { system, ...sampling } = settings;
  const base = { model, ...sampling };
  if (!hasChatTemplate) {
    return { path: "v1/completions", body: { max_tokens: COMPLETION_MAX_TOKENS, ...base, prompt: textSoFar(messages) } };
  }
  const first = system ? [{ role: "system", content: system }] : [];
  const parts = (images, text) => [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
  const rest = messages.map(({ role, text, images }) => ({ role, content: images ? parts(images, text) : text }));
  return { path: "v1/chat/completions", body: { ...base, messages: [...first, ...rest] } };
}

/** The text of all messages: an answer continues exactly where its text ends, and a new message begins a new line. */
function textSoFar(messages) {
  return messages.map(({ role, text }, index) => (role === "user" && index > 0 ? `\n${text}` : text)).join("");
}

/** Fill the form, and store what is entered. An invalid value is marked and not stored. */
export function connectSettings() {
  const form = byId("settings-form");
  const settings = readSettings();
  for (const [name, value] of Object.entries(settings)) form.elements[name].value = value;
  const markButton = () => byId("settings-button").classList.toggle("has-settings", Object.keys(readSettings()).length > 0);
  form.addEventListener("input", () => {
    const values = { system: form.elements.system.value };
    for (const name of Object.keys(NUMBERS)) {
      const field = form.elements[name];
      values[name] = parseSetting(name, field.value);
      const isInvalid = values[name] === null && (field.value !== "" || field.validity.badInput);
      field.setAttribute("aria-invalid", String(isInvalid));
    }
    storeValue("settings", values);
    markButton();
  });
  byId("settings-reset").addEventListener("click", () => {
    form.reset();
    form.dispatchEvent(new Event("input"));
  });
  markButton();
}
