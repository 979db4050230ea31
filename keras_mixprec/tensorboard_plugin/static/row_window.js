import { element } from "./dom.js";
import { drawLater } from "./frames.js";
import { clamp } from "./scales.js";

// The maximum number of table rows in the document. Thousands of rows would slow each layout.
const KEPT_ROWS = 110;
const NEAR_END = 20;
const IN_VIEW = 5;

/**
 * Keeps only the table rows near the view in the document, each with
 * `data-index`. The height of all other rows is estimated as the mean.
 */
export function createRowWindow(table, body, makeRow) {
  const above = element("div", { "aria-hidden": "true" });
  const below = element("div", { "aria-hidden": "true" });
  const scroller = element("div", { class: "table-scroll" }, above, table, below);
  let items = [];
  // The made rows by item, so that rows in the document are reused.
  let made = new Map();
  let first = 0;
  let last = 0;
  let height = 26;
  // The index of the row that is the table's only tab stop. Arrow keys move between rows.
  let stop = 0;

  const rowAt = (index) => body.children[index - first] ?? null;

  function rowOf(item, index) {
    const row = made.get(item) ?? makeRow(item);
    row.dataset.index = index;
    row.setAttribute("aria-rowindex", index + 2);
    return row;
  }

  function draw(from) {
    /** @type {HTMLElement | null} */
    const focused = body.querySelector(":focus");
    const control = focused?.dataset.control;
    const place = focused ? Number(focused.closest("tr").dataset.index) : -1;
    first = clamp(from, 0, Math.max(0, items.length - KEPT_ROWS));
    last = Math.min(first + KEPT_ROWS, items.length);
    stop = clamp(stop, 0, Math.max(0, items.length - 1));
    const tabbed = stop >= first && stop < last ? stop : first;
    made = new Map(items.slice(first, last).map((item, at) => {
      const row = rowOf(item, first + at);
      row.tabIndex = first + at === tabbed ? 0 : -1;
      return [item, row];
    }));
    keepOnly([...made.values()]);
    table.setAttribute("aria-rowcount", items.length + 1);
    if (last > first && body.offsetHeight) height = body.offsetHeight / (last - first);
    above.style.height = `${first * height}px`;
    below.style.height = `${(items.length - last) * height}px`;
    if (place < 0) return;
    const row = rowAt(clamp(place, first, Math.max(first, last - 1)));
    const target = control ? row?.querySelector(`[data-control="${control}"]`) : row;
    (target ?? row)?.focus({ preventScroll: true });
  }

  // Replaces the rows in the document. Rows that stay in place need no new layout.
  function keepOnly(rows) {
    const stay = new Set(rows);
    for (const row of [...body.children]) if (!stay.has(row)) row.remove();
    rows.forEach((row, at) => {
      if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
    });
  }

  // Draws the rows from an index on. Rows that stay must not move on the screen.
  function shift(from) {
    const top = () => scroller.getBoundingClientRect().top;
    const anchor = [...body.children].find((row) => {
      return row.getBoundingClientRect().bottom > top();
    });
    const index = anchor ? Number(anchor.dataset.index) : -1;
    const before = anchor?.getBoundingClientRect().top;
    draw(from);
    const same = index >= 0 ? rowAt(index) : null;
    if (same) scroller.scrollTop += same.getBoundingClientRect().top - before;
  }

  // Makes new rows if fewer than `least` rows are left above or below the view.
  function follow(least = NEAR_END) {
    const seen = Math.floor(scroller.scrollTop / height);
    const until = seen + Math.ceil(scroller.clientHeight / height);
    const near = (first > 0 && seen < first + least) ||
      (last < items.length && until > last - least);
    if (near) shift(seen - Math.floor((KEPT_ROWS - (until - seen)) / 2));
  }

  // Makes rows in or near the view at once, and all other rows later.
  function followSoon() {
    follow(IN_VIEW);
    drawLater(follow);
  }

  function bring(index) {
    if (index < first || index >= last) {
      draw(index - Math.floor(KEPT_ROWS / 2));
      scroller.scrollTop = index * height;
    }
    return rowAt(index);
  }

  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    if (event.target !== row) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      row.click();
      return;
    }
    const at = Number(row.dataset.index);
    const page = Math.max(1, Math.floor(scroller.clientHeight / height) - 2);
    const targets = {
      ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1,
      PageDown: Math.min(at + page, items.length - 1), PageUp: Math.max(at - page, 0),
    };
    const target = targets[event.key];
    if (target === undefined || !items[target]) return;
    event.preventDefault();
    bring(target)?.focus();
  });
  body.addEventListener("focusin", (event) => {
    for (const other of body.querySelectorAll("tr[tabindex='0']")) other.tabIndex = -1;
    const row = event.target.closest("tr");
    row.tabIndex = 0;
    stop = Number(row.dataset.index);
  });
  scroller.addEventListener("scroll", followSoon);

  return {
    scroller, rowAt, bring,
    show(next) {
      items = next;
      made = new Map();
      draw(first);
    },
  };
}
