export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function card(id, title, controls, ...content) {
  const heading = element("h2", { id: `${id}-title` }, title);
  const head = element("div", { class: "card-head" }, heading, ...controls);
  const attributes = { id, class: "card", "aria-labelledby": heading.id };
  return element("section", attributes, head, ...content);
}

/** Returns an entry of a legend: a mark and its meaning. */
export function legendItem(mark, color, label) {
  const glyph = element("span", { class: "glyph", "aria-hidden": "true" }, mark);
  glyph.style.color = `var(${color})`;
  return element("span", { class: "legend-item" }, glyph, label);
}

/**
 * Returns a text in which long names may break between their parts.
 * @param {string} text
 */
export function breakable(text) {
  return text.split(/(?<=[/_])(?=[^/_])|(?<=[a-z0-9])(?=[A-Z])/).flatMap((part, index) => {
    return index ? [element("wbr"), part] : [part];
  });
}

export function fillSelect(select, options, chosen) {
  const nodes = options.map(([value, label]) => {
    return element("option", { value }, label);
  });
  select.replaceChildren(...nodes);
  select.value = chosen ?? "";
}

// Makes a whole list one tab stop. Arrow keys move between the rows of the list.
export function walkRows(list, selector) {
  const rowsOf = () => [...list.querySelectorAll(selector)];
  list.addEventListener("keydown", (event) => {
    const row = event.target.closest(selector);
    if (!row) return;
    if (event.target === row && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      row.click();
      return;
    }
    const rows = rowsOf();
    const at = rows.indexOf(row);
    const targets = {
      ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1,
    };
    const target = rows[targets[event.key]];
    if (!target) return;
    event.preventDefault();
    target.focus();
  });
  list.addEventListener("focusin", (event) => {
    const row = event.target.closest(selector);
    if (!row) return;
    for (const other of list.querySelectorAll(`${selector}[tabindex="0"]`)) {
      other.tabIndex = -1;
    }
    row.tabIndex = 0;
  });
}

/** Scrolls the page to a row, or to the start of a row that is taller than its scroller. */
export function bringIntoView(row, scroller = null) {
  if (!row) return;
  const isTall = scroller && row.offsetHeight > scroller.clientHeight;
  (isTall ? scroller : row).scrollIntoView({ block: "center" });
  if (isTall) revealIn(scroller, row);
  row.focus({ preventScroll: true });
}

// Scrolls only the list: scrollIntoView would move the whole page as well.
export function revealIn(scroller, row, margin = 0) {
  const outer = scroller.getBoundingClientRect();
  const inner = row.getBoundingClientRect();
  if (inner.top < outer.top + margin) {
    scroller.scrollTop -= outer.top + margin - inner.top;
  } else if (inner.bottom > outer.top + scroller.clientHeight) {
    // Keep the start of a row in view if the row is taller than the list.
    const below = inner.bottom - outer.top - scroller.clientHeight;
    scroller.scrollTop += Math.min(below, inner.top - outer.top - margin);
  }
}
