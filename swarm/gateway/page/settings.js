// Sampling settings: read from their form, kept in the browser, turned into a request. Pure but for the form itself.

import { byId } from "./dom.js";
import { keep, recall } from "./storage.js";

/** Each number's range. An empty field is not sent: the gateway's own default holds. */
export const NUMBERS = {
  temperature: { least: 0, most: 2 },
  top_p: { least: 0, most: 1 },
  max_tokens: { least: 1, most: 1_000_000, whole: true },
  seed: { least: 0, most: 2 ** 31 - 1, whole: true },
};

const TEXT_TOKENS = 256; // of a text that is continued; such a model knows no end, and OpenAI's default is 16

/** Kept settings: `{system, temperature, top_p, max_tokens, seed}`; what is not set is absent. */
export function readSettings() {
  const kept = recall("settings", {});
  const settings = typeof kept?.system === "string" && kept.system ? { system: kept.system } : {};
  for (const name of Object.keys(NUMBERS)) {
    const value = acceptNumber(name, kept?.[name]);
    if (value !== null) settings[name] = value;
  }
  return settings;
}

/** The number if it is one that this setting may have, else null. */
export function acceptNumber(name, value) {
  const { least, most, whole } = NUMBERS[name];
  if (value === "" || value === null || value === undefined) return null;
  const number = Number(value);
  const isFine = Number.isFinite(number) && number >= least && number <= most && (!whole || Number.isInteger(number));
  return isFine ? number : null;
}

/**
 * The request for an answer to these messages. A model without chat template continues the text so far.
 *
 * Returns `{path, body}` for `askForAnswer`.
 */
export function makeRequest(model, messages, settings, hasChatTemplate) {
  const { system, ...sampling } = settings;
  const base = { model, ...sampling };
  if (!hasChatTemplate) {
    return { path: "v1/completions", body: { max_tokens: TEXT_TOKENS, ...base, prompt: textSoFar(messages) } };
  }
  const first = system ? [{ role: "system", content: system }] : [];
  const rest = messages.map(({ role, text }) => ({ role, content: text }));
  return { path: "v1/chat/completions", body: { ...base, messages: [...first, ...rest] } };
}

/** What was written so far, by both: an answer goes on exactly where its text ends, further words begin a new line. */
function textSoFar(messages) {
  return messages.map(({ role, text }, index) => (role === "user" && index > 0 ? `\n${text}` : text)).join("");
}

/** Fills the form and keeps what is entered. A value that cannot be is marked and not kept. */
export function connectSettings() {
  const form = byId("settings-form");
  const settings = readSettings();
  for (const [name, value] of Object.entries(settings)) form.elements[name].value = value;
  const note = () => byId("settings-button").classList.toggle("has-settings", Object.keys(readSettings()).length > 0);
  form.addEventListener("input", () => {
    const values = { system: form.elements.system.value };
    for (const name of Object.keys(NUMBERS)) {
      const field = form.elements[name];
      values[name] = acceptNumber(name, field.value);
      const isWrong = values[name] === null && (field.value !== "" || field.validity.badInput);
      field.setAttribute("aria-invalid", String(isWrong));
    }
    keep("settings", values);
    note();
  });
  byId("settings-reset").addEventListener("click", () => {
    form.reset();
    form.dispatchEvent(new Event("input"));
  });
  note();
}
