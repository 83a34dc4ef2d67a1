// Saves a conversation as a file: Markdown for people, JSON with all versions for programs.

import { shownPath } from "./conversation.js";
import { element } from "../ui/dom.js";

/** The shown messages as Markdown. */
export function asMarkdown(conversation) {
  const parts = shownPath(conversation).map(({ role, text, model, images }) => {
    const speaker = role === "user" ? "You" : model || "Answer";
    return `## ${speaker}\n\n${"*a picture*\n\n".repeat(images?.length ?? 0)}${text.trim()}\n`;
  });
  return [`# ${conversation.title || "Conversation"}\n`, ...parts].join("\n");
}

/** The whole conversation with all versions. */
export function asJson(conversation) {
  return JSON.stringify(conversation, null, 2);
}

/** Let the browser save a file. */
export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A file name from the title: letters and digits of any script. */
export function fileName(conversation, extension) {
  const words = conversation.title.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
  return `${words.slice(0, 8).join("-").slice(0, 60) || "conversation"}.${extension}`;
}
