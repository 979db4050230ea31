import { element } from "./dom.js";

// A sandboxed frame cannot reach the clipboard, but it can copy a selection.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { class: "offscreen" });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/**
 * Returns a button that copies the result of `read`.
 * @param {string} label
 * @param {() => string} read
 */
export function copyButton(label, read) {
  const button = element("button", {
    type: "button", class: "quiet", "data-control": "copy",
    async onclick(event) {
      event.stopPropagation();
      button.textContent = await copyText(read()) ? "Copied" : "Copy failed";
      setTimeout(() => button.textContent = label, 1500);
    },
  }, label);
  return button;
}
