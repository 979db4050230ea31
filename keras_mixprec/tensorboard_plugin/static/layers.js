import { chooseLayer } from "./actions.js";
import { bringIntoView, card, element, revealIn } from "./dom.js";
import { plural } from "./format.js";
import { pathOfCall } from "./heat_data.js";
import {
  allBlocks, blocksToFold, layerChoice, layerRows, layerTree, treeLabels,
} from "./layer_blocks.js";
import { cell, pathCell } from "./layer_cells.js";
import { layerColumns } from "./layer_columns.js";
import { foldersOf } from "./names.js";
import { createRowWindow } from "./row_window.js";

const PATH_LENGTH = 36;
const INDENT = 12;

export function createLayers(store) {
  const filter = element("input", {
    id: "layer-filter", type: "search", placeholder: "Filter layers",
    "aria-label": "Filter layers by path, class, type or verdict",
    oninput: () => store.set({ filter: filter.value }),
  });
  const problems = element("input", {
    type: "checkbox", id: "only-problems",
    onchange: () => store.set({ onlyProblems: problems.checked }),
  });
  const problemsLabel = element("label", { class: "check" }, problems, "only problems");
  const fold = element("button", {
    type: "button", class: "quiet", id: "fold-blocks", hidden: true,
    onclick: () => store.set({ folded: store.state.folded.size ? new Set() : allFolded() }),
  });
  const count = element("span", { class: "hint", "aria-live": "polite" });
  const head = element("thead");
  const body = element("tbody");
  const table = element("table", {}, head, body);
  const nothing = element("p", { class: "nothing", role: "status", hidden: true });
  let columns = [];
  let tree = [];
  let labels = treeLabels([], PATH_LENGTH);
  let shown = [];
  let paths = new Set();
  let chosen = null;
  const list = createRowWindow(table, body, makeRow);
  list.scroller.append(nothing);

  function allFolded() {
    return new Set(blocksToFold(tree, store.state.runData.layers.length));
  }

  function toggle(block) {
    const folded = new Set(store.state.folded);
    if (!folded.delete(block)) folded.add(block);
    store.set({ folded });
  }

  function blockCell({ block, folded }) {
    const label = labels.block.get(block);
    return element("button", {
      type: "button", class: "fold", "data-control": "fold", tabindex: "-1",
      "aria-expanded": String(!folded), title: block,
      "aria-label": `Block ${block}`,
    }, `${folded ? "▸" : "▾"} ${label}`);
  }

  function makeRow(row) {
    const { layer, block, depth } = row;
    const cells = columns.map((column) => {
      const isPath = column.id === "path";
      const content = !isPath ? cell(column, row) :
        layer ? pathCell(layer, labels.layer.get(layer.path)) : blockCell(row);
      const node = element("td", {
        class: column.number ? "number" : isPath && layer ? "path-cell" : null,
        title: isPath ? layer?.path : null,
      }, content);
      if (isPath && depth) node.style.paddingLeft = `${6 + depth * INDENT}px`;
      return node;
    });
    const node = layer ? element("tr", {
      "data-layer": layer.path, title: layer.notes || null,
      onclick: () => chooseLayer(store, layer.path),
    }, ...cells) : element("tr", {
      "data-block": block, class: "block", onclick: () => toggle(block),
    }, ...cells);
    markRow(node);
    return node;
  }

  function drawHead() {
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

  function read({ runData }) {
    tree = layerTree(runData?.layers ?? []);
    labels = treeLabels(tree, PATH_LENGTH);
    paths = new Set((runData?.layers ?? []).map((layer) => layer.path));
    choose();
  }

  function draw() {
    const { state } = store;
    const { runData, compareData, sort, filter: text, onlyProblems, folded } = state;
    const layers = runData?.layers ?? [];
    const choice = layerChoice(state);
    columns = layerColumns(runData, compareData);
    drawHead();
    const column = columns.find((one) => one.id === sort.column);
    shown = layerRows(tree, choice, column, sort.descending);
    list.show(shown);
    const kept = layers.filter(choice.keeps).length;
    filter.value = text;
    problems.checked = onlyProblems;
    fold.hidden = !allBlocks(tree).length;
    fold.textContent = folded.size ? "Unfold blocks" : "Fold blocks";
    count.textContent = text || onlyProblems ? `${kept} of ${layers.length}` :
      plural(layers.length, "layer");
    nothing.hidden = kept > 0 || !layers.length;
    nothing.textContent = nothing.hidden ? "" : !text ?
      "All findings about layers are repaired, and no layer has less than 2 bits of headroom." :
      `No match: no layer${onlyProblems ? " with a problem" : ""} has “${text}” ` +
      "in its name, class, type or verdicts.";
  }

  function choose() {
    const { layer } = store.state;
    chosen = layer === null ? null : pathOfCall(layer, paths);
  }

  function markRow(row) {
    const isChosen = chosen !== null && row.dataset.layer === chosen;
    row.classList.toggle("chosen", isChosen);
    row.setAttribute("aria-current", isChosen);
  }

  // Returns the row of a layer, or of the folded block that contains the layer.
  function indexOf(path) {
    if (path === null) return -1;
    const index = shown.findIndex(({ layer }) => layer?.path === path);
    const folders = foldersOf(path);
    return index >= 0 ? index : shown.findIndex(({ block, folded }) => {
      return folded && folders.includes(block);
    });
  }

  function mark() {
    const before = body.querySelector("tr.chosen");
    choose();
    if (before) markRow(before);
    const index = indexOf(chosen);
    if (index < 0) return;
    const row = list.bring(index);
    if (row) markRow(row);
    if (row) revealIn(list.scroller, row, head.offsetHeight);
  }

  body.addEventListener("keydown", (event) => {
    const block = event.target.closest("tr")?.dataset.block;
    const opens = { ArrowRight: true, ArrowLeft: false }[event.key];
    if (block === undefined || opens === undefined) return;
    event.preventDefault();
    if (store.state.folded.has(block) === opens) toggle(block);
  });
  store.on(["runData"], (state) => read(state));
  store.on(["runData", "compareData", "sort", "filter", "onlyProblems", "folded"], draw);
  store.on(["layer", "shown"], mark);
  store.on(["brought"], ({ brought }) => {
    if (brought.panel === "layers") bringIntoView(body.querySelector(".chosen"));
  });
  return card("layers", "Layers", [count, fold, problemsLabel, filter], list.scroller);
}
