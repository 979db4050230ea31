import { element } from "./dom.js";

let bubble = null;

export function showTooltip(event, lines) {
  if (!bubble) {
    bubble = element("div", { class: "tooltip", role: "tooltip" });
    document.body.append(bubble);
  }
  bubble.replaceChildren(...lines.map((line) => element("div", {}, line)));
  bubble.hidden = false;
  const room = document.documentElement.clientWidth;
  const floor = document.documentElement.clientHeight;
  const right = event.clientX + 14 + bubble.offsetWidth > room;
  const left = event.clientX + (right ? -14 - bubble.offsetWidth : 14);
  const top = Math.min(event.clientY + 16, floor - bubble.offsetHeight - 4);
  bubble.style.left = `${Math.max(4, left)}px`;
  bubble.style.top = `${Math.max(4, top)}px`;
}

/**
 * What a mouse shows of an element by its title, the keyboard shows where the focus is:
 * names that are cut, above all.
 * @param {HTMLElement} root
 */
export function showTitlesOnFocus(root) {
  root.addEventListener("focusin", ({ target }) => {
    const node = /** @type {HTMLElement} */ (target);
    if (!node.matches(":focus-visible")) return;
    const inner = /** @type {HTMLElement | null} */ (node.querySelector("[title]"));
    const titles = new Set([node.title, inner?.title].filter(Boolean));
    const { left, bottom } = node.getBoundingClientRect();
    if (titles.size) showTooltip({ clientX: left, clientY: bottom - 8 }, [...titles]);
  });
  root.addEventListener("focusout", hideTooltip);
  root.addEventListener("keydown", ({ key }) => {
    if (key === "Escape") hideTooltip();
  });
}

export function hideTooltip() {
  if (bubble) bubble.hidden = true;
}
