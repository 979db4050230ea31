import { chooseRun, compareWith } from "./actions.js";
import { breakable, card, element, revealIn } from "./dom.js";
import { formatInteger, formatNumber, formatScale, formatShare, readable, toNumber } from "./format.js";
import { sortLayers } from "./layer_columns.js";
import { STATES } from "./levels.js";

const RUN_COLUMNS = [
  { id: "run", label: "Run", of: (row) => row.run },
  { id: "state", label: "State", of: (row) => row.gravity },
  { id: "cause", label: "Worst cause", of: (row) => row.cause, text: (row) => row.cause },
  {
    id: "steps", label: "Steps", number: true, of: (row) => row.last_step,
    text: (row) => formatInteger(row.last_step),
  },
  {
    id: "skipped", label: "Skipped", number: true, of: (row) => row.skipped,
    text: (row) => formatInteger(row.skipped),
  },
  {
    id: "scale", label: "Loss scale", number: true, of: (row) => toNumber(row.scales[0] ?? null),
    text: (row) => row.scales.map(formatScale).join(", ") || "–",
  },
  {
    id: "loss", label: "Last loss", number: true, of: (row) => toNumber(row.last_loss ?? null),
    text: (row) => row.last_loss === null ? "–" : formatNumber(row.last_loss),
  },
  {
    id: "demoted", label: "Demoted layers", number: true, of: (row) => row.demoted,
    text: (row) => formatInteger(row.demoted),
  },
  {
    id: "share", label: "FLOPs in 16 bits", number: true, of: (row) => row.share_of_flops.now,
    text: (row) => formatShare(row.share_of_flops.now ?? NaN),
  },
];

/**
 * Returns the table of runs, in which the user chooses and compares runs. Each run has a row.
 */
export function createRuns(store) {
  const head = element("thead");
  const body = element("tbody");
  const scroller = element("div", { class: "run-scroll" },
    element("table", {}, head, body));
  const root = card("runs", "Runs", [], scroller);
  // The most severe run comes first.
  let sort = { column: "state", descending: false };
  let revealed = null;

  function drawHead() {
    const focused = head.querySelector("button:focus")?.dataset.runColumn;
    head.replaceChildren(element("tr", {}, ...RUN_COLUMNS.map(({ id, label, number }) => {
      const chosen = sort.column === id;
      const direction = sort.descending ? "descending" : "ascending";
      return element("th", {
        scope: "col", class: number ? "number" : null, "aria-sort": chosen ? direction : "none",
      }, element("button", {
        type: "button", "data-run-column": id,
        onclick() {
          sort = { column: id, descending: chosen && !sort.descending };
          draw();
        },
      }, label));
    }), element("th", { scope: "col" }, "")));
    if (focused) head.querySelector(`[data-run-column="${focused}"]`)?.focus();
  }

  function contentOf(column, row) {
    if (column.id !== "run" && !row.headline) return "…";
    if (column.text) return element("span", {}, ...breakable(column.text(row)));
    if (column.id === "run") {
      return element("button", {
        type: "button", class: "link", onclick: () => chooseRun(store, row.run),
      }, ...breakable(row.run));
    }
    const { glyph, word, level } = STATES[row.headline.state] ?? STATES.warning;
    return element("span", { class: `badge ${level}`, title: readable(row.headline.text) },
      `${glyph} ${word}`);
  }

  function comparing(row) {
    const { run, compare } = store.state;
    if (row.run === run) return "shown";
    const chosen = row.run === compare;
    return element("button", {
      type: "button", class: "quiet", "aria-pressed": String(chosen),
      "aria-label": `Compare with ${row.run}`,
      onclick: () => compareWith(store, chosen ? null : row.run),
    }, chosen ? "compared" : "compare");
  }

  function draw() {
    const { run, compare, summaries } = store.state;
    const rows = summaries ?? [];
    root.hidden = rows.length < 2;
    drawHead();
    const column = RUN_COLUMNS.find(({ id }) => id === sort.column);
    // Rows with only a name belong to runs that the server has not read yet.
    const read = rows.filter((row) => row.headline);
    const unread = rows.filter((row) => !row.headline);
    const sorted = [...sortLayers(read, column.of, sort.descending), ...unread];
    root.setAttribute("aria-busy", String(rows.some((row) => row.unread)));
    const place = [...body.querySelectorAll("button")].indexOf(
      /** @type {any} */ (document.activeElement),
    );
    body.replaceChildren(...sorted.map((row) => element("tr", {
      "data-run": row.run, title: row.headline ? readable(row.headline.text) : null,
      class: row.run === run ? "chosen" : row.run === compare ? "about" : null,
      "aria-current": String(row.run === run),
      onclick: (event) => event.target.closest("button") || chooseRun(store, row.run),
    }, ...RUN_COLUMNS.map((one) => {
      return element("td", { class: one.number ? "number" : null }, contentOf(one, row));
    }), element("td", {}, comparing(row)))));
    if (place >= 0) body.querySelectorAll("button")[place]?.focus({ preventScroll: true });
    reveal(run);
  }

  // Scrolls to a run only once, because the user may scroll on.
  function reveal(run) {
    const row = body.querySelector("tr.chosen");
    if (revealed === run || !row?.offsetParent) return;
    // The row of the run may still move while the server reads more rows.
    if (!store.state.summaries.some((one) => one.unread)) revealed = run;
    revealIn(scroller, row, head.offsetHeight);
  }

  store.on(["summaries", "run", "compare"], draw);
  draw();
  return root;
}
