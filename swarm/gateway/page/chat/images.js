// Pictures of a message: taken from files or the clipboard, made smaller, and shown. They are drawn, because the page may
// load no image from a data URL.

import { byId, element, iconButton } from "../ui/dom.js";

const MAX_SIDE_PX = 2048; // models see less
const SHOWN_SIDE_PX = 480;
const JPEG_QUALITY = 0.9;

/** An element that shows the picture of this data URL; empty if it is none. */
export function imageView(url) {
  const canvas = element("canvas", { class: "picture", role: "img", "aria-label": "Picture" });
  fetchBytes(url).then((bytes) => draw(bytes, canvas, SHOWN_SIDE_PX)).catch(() => {});
  return canvas;
}

/** The pictures that are sent with the next message, above the field for its text. */
export class ImageTray {
  constructor() {
    this.urls = [];
    const file = byId("picture-file");
    byId("attach").addEventListener("click", () => file.click());
    file.addEventListener("change", () => {
      this.#add([...file.files]);
      file.value = ""; // so that the same file can be chosen again
    });
    byId("prompt").addEventListener("paste", (event) => {
      const pictures = [...event.clipboardData.files].filter(({ type }) => type.startsWith("image/"));
      if (!pictures.length || byId("attach").hidden) return;
      event.preventDefault();
      this.#add(pictures);
    });
  }

  /** Whether the chosen model takes pictures. */
  offer(isOffered) {
    byId("attach").hidden = !isOffered;
  }

  /** The pictures, as data URLs. They leave the tray. */
  take() {
    const { urls } = this;
    this.#show([]);
    return urls;
  }

  async #add(files) {
    for (const file of files) {
      const canvas = element("canvas");
      const isRead = await draw(file, canvas, MAX_SIDE_PX).then(() => true, () => false);
      this.#show(isRead ? [...this.urls, canvas.toDataURL("image/jpeg", JPEG_QUALITY)] : this.urls);
      if (!isRead) byId("pictures").append(element("span", { role: "alert", text: "This browser cannot read the file as a picture." }));
    }
    byId("prompt").focus();
  }

  #show(urls) {
    this.urls = urls;
    const drop = (url) => this.#show(this.urls.filter((other) => other !== url));
    const draw = (url) => element("figure", {}, imageView(url), iconButton("close", "Remove the picture", () => drop(url)));
    byId("pictures").replaceChildren(...urls.map(draw));
  }
}

async function fetchBytes(url) {
  const text = atob(url.slice(url.indexOf(",") + 1));
  return new Blob([Uint8Array.from(text, (character) => character.charCodeAt(0))]);
}

/** Draw a picture that is at most so large, on white where it is transparent. */
async function draw(blob, canvas, maxSide) {
  const picture = await createImageBitmap(blob);
  const scale = Math.min(1, maxSide / Math.max(picture.width, picture.height));
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
}
