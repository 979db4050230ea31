import { element } from "./dom.js";

let bubble = null;

export function showTooltip(event, lines) {
  if (!bubble) {
    bubble = element("div", { class: "tooltip", role: "tooltip" });
    document.body.append(bubble);
  }
  bubble.replaceChildren(...lines.map((line) => element("div", {}, line)));
  bubble.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = bubble;
  const { clientWidth, clientHeight } = document.documentElement;
  const left = beside(event.clientX, 14, width, clientWidth);
  const top = beside(event.clientY, 16, height, clientHeight);
  bubble.style.left = `${left}px`;
  bubble.style.top = `${top}px`;
}

// Places a tooltip after the pointer, or before it, or as close as the window allows.
function beside(at, gap, size, last) {
  if (at + gap + size <= last) return at + gap;
  if (at - gap - size >= 4) return at - gap - size;
  return Math.max(4, Math.min(at + gap, last - size - 4));
}

/**
 * Shows the title of the focused element, so that keyboard users can read shortened names.
 * @param {HTMLElement} root
 */
export function showTitlesOnFocus(root) {
  // A click also moves the focus, but does not ask for a title.
  let isByClick = false;
  root.addEventListener("click", () => {
    isByClick = true;
  }, true);
  root.addEventListener("keydown", () => {
    isByClick = false;
  }, true);
  root.addEventListener("focusin", ({ target }) => {
    const node = /** @type {HTMLElement} */ (target);
    if (isByClick || !node.matches(":focus-visible")) return;
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
