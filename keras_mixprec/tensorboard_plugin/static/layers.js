import { chooseLayer } from "./actions.js";
import { bringIntoView, card, element, revealIn, walkRows } from "./dom.js";
import { formatInteger, formatShare, plural } from "./format.js";
import { pathOfCall } from "./heat_data.js";
import { shortNames } from "./names.js";
import {
  describeHeadroom, describeVerdict, layerColumns, matchesFilter, shortType, sortLayers,
} from "./summary.js";

const FULL_HEADROOM = 24;
const PATH_LENGTH = 36;

function typeBadge(dtype) {
  if (!dtype) return "–";
  return element("span", { class: `type ${dtype}`, title: dtype }, shortType(dtype));
}

function verdictBadges(layer) {
  return element("span", {}, ...(layer?.verdicts ?? []).map((verdict) => {
    const { level, text } = describeVerdict({ verdict, layer: layer.path }, [layer]);
    return element("span", { class: `badge ${level}` }, text);
  }));
}

// Long names of classes break where their words begin.
function className(name) {
  const parts = String(name).split(/(?<=[a-z0-9_])(?=[A-Z])/);
  return element("span", { title: name }, ...parts.flatMap((part, index) => {
    return index ? [element("wbr"), part] : [part];
  }));
}

function headroomBar(bits, type, data, step) {
  if (bits === null) return "–";
  const formatName = data.format?.name ?? "float16";
  const { level, text } = describeHeadroom(bits, type, formatName);
  const fill = element("span", { class: `fill ${level}` });
  fill.style.width = `${Math.max(4, Math.min(100, (bits / FULL_HEADROOM) * 100))}%`;
  const at = step === null ? "" : ` at step ${formatInteger(step)}`;
  const title = text + at + (level === "beyond" ? `, computed in ${type}` : "");
  return element(
    "span", { class: "headroom", title }, element("span", { class: "bar" }, fill), text,
  );
}

function pathCell(layer, label) {
  const reason = layer.demoted_because ?? "";
  return element("div", {},
    element("span", { class: "path whole" }, layer.path),
    element("span", { class: "path short", "aria-hidden": "true" }, label),
    element("span", { class: "reason" },
      reason && `${layer.compute_dtype} because: ${reason}`));
}

function demotion(layer) {
  if (layer.demoted_at === null) return "";
  const text = `▼\u00a0step\u00a0${formatInteger(layer.demoted_at)}`;
  return element("span", { title: layer.demoted_because }, text);
}

export function createLayers(store) {
  const filter = element("input", {
    id: "layer-filter", type: "search", placeholder: "Filter layers",
    "aria-label": "Filter layers by path, class, type or verdict",
    oninput: () => store.set({ filter: filter.value }),
  });
  const count = element("span", { class: "hint", "aria-live": "polite" });
  const head = element("thead");
  const rows = element("tbody");
  const table = element("table", {}, head, rows);
  const nothing = element("p", { class: "nothing", role: "status", hidden: true });
  const scroller = element("div", { class: "table-scroll" }, table, nothing);
  let labels = new Map();
  walkRows(rows, "tr[data-layer]");

  const cells = {
    path: (layer) => pathCell(layer, labels.get(layer.path)),
    class: (layer) => className(layer.class),
    dtype: (layer) => typeBadge(layer.compute_dtype),
    parameters: (layer) => formatInteger(layer.parameters ?? 0),
    flops: (layer) => formatShare(layer.share_of_flops ?? NaN),
    headroom: (layer, column) => headroomBar(
      column.of(layer), column.typeOf(layer), store.state.runData, layer.worst_step,
    ),
    verdicts: verdictBadges,
    "other-verdicts": (layer, column) => verdictBadges(column.other(layer)),
    demoted: demotion,
    "other-dtype": (layer, column) => typeBadge(column.of(layer)),
    "other-headroom": (layer, column) => headroomBar(
      column.of(layer), column.typeOf(layer), store.state.compareData, null,
    ),
  };

  function drawHead(columns) {
    const { sort } = store.state;
    const row = element("tr", {}, ...columns.map((column) => {
      const chosen = sort.column === column.id;
      const direction = sort.descending ? "descending" : "ascending";
      const descending = chosen && !sort.descending;
      return element("th", {
        scope: "col", class: column.number ? "number" : null,
        "aria-sort": chosen ? direction : "none",
      }, element("button", {
        type: "button", "data-column": column.id,
        title: column.run ? `in ${column.run}` : null,
        onclick: () => store.set({ sort: { column: column.id, descending } }),
      }, column.label,
      column.run ? element("span", {
        class: column.compares ? "of-run compared" : "of-run",
      }, column.runLabel) : null));
    }));
    const focused = head.querySelector("button:focus")?.dataset.column;
    head.replaceChildren(row);
    if (focused) head.querySelector(`[data-column="${focused}"]`)?.focus();
  }

  function draw() {
    const { runData, compareData, sort, filter: text } = store.state;
    const layers = runData?.layers ?? [];
    const columns = layerColumns(runData, compareData);
    labels = shortNames(layers.map((layer) => layer.path), PATH_LENGTH);
    drawHead(columns);
    const column = columns.find((one) => one.id === sort.column);
    const matching = layers.filter((layer) => matchesFilter(layer, text));
    const shown = column ? sortLayers(matching, column.of, sort.descending) : matching;
    const focused = rows.querySelector(":focus")?.dataset.layer;
    rows.replaceChildren(...shown.map((layer, index) => element("tr", {
      "data-layer": layer.path, tabindex: index ? "-1" : "0",
      title: layer.notes || null,
      onclick: () => chooseLayer(store, layer.path),
    }, ...columns.map((one) => element("td", {
      class: one.number ? "number" : one.id === "path" ? "path-cell" : null,
      title: one.id === "path" ? layer.path : null,
    }, cells[one.id](layer, one))))));
    count.textContent = text ? `${shown.length} of ${layers.length}` :
      plural(layers.length, "layer");
    nothing.hidden = shown.length > 0 || !layers.length;
    nothing.textContent = nothing.hidden ? "" :
      `No match: no layer has “${text}” in its name, class, type or verdicts.`;
    if (focused !== undefined) {
      [...rows.children].find((row) => row.dataset.layer === focused)?.focus();
    }
    mark(false);
  }

  function mark(scroll = true) {
    const { layer, runData } = store.state;
    const paths = new Set((runData?.layers ?? []).map((one) => one.path));
    const path = layer === null ? null : pathOfCall(layer, paths);
    for (const row of rows.children) {
      const chosen = row.dataset.layer === path;
      row.classList.toggle("chosen", chosen);
      row.setAttribute("aria-current", chosen);
      if (chosen && scroll) revealIn(scroller, row, head.offsetHeight);
    }
  }

  store.on(["runData", "compareData", "sort", "filter"], draw);
  store.on(["layer", "shown"], () => mark());
  store.on(["brought"], ({ brought }) => {
    if (brought.panel === "layers") bringIntoView(rows.querySelector(".chosen"));
  });
  return card("layers", "Layers", [count, filter], scroller);
}
