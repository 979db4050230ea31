import { chooseLayer } from "./actions.js";
import { dataTable } from "./data_table.js";
import { card, element, walkRows } from "./dom.js";
import { formatInteger, plural } from "./format.js";
import { seenFirst } from "./frames.js";
import { isLeftOut, isOfRun, pathOfCall } from "./heat_data.js";
import { GRAVEST } from "./heat_rows.js";
import {
  describeReading, foldedGraph, gravestOf, holdersIn, worstByLayer,
} from "./model_map.js";
import { shortNames } from "./names.js";
import { cssColor } from "./palette.js";
import { changedAt, isAsIf } from "./precision.js";
import { clamp } from "./scales.js";
import { metricOf } from "./wanted.js";

const NODE = { width: 300, height: 26, right: 24, margin: 10 };
// The minimum and maximum space between two nodes. In deep graphs the space is smaller, so that
// more nodes fit into the view.
const BELOW = [6, 16];
const VIEW_OF_MAP = 500;
// Blocks are folded at first if a model has more layers than OPEN_AT_MOST. The map shows at most
// DRAWN_AT_MOST nodes.
const OPEN_AT_MOST = 60;
const DRAWN_AT_MOST = 400;
const SVG = "http://www.w3.org/2000/svg";
const NESTED = "The log has no graph of this model, because subclassed models have none. Dashed lines lead from a layer to its inner layers.";
const NO_LAYERS = "This log has no table of layers: MixPrecMonitor writes it when training begins.";
const MARKS = { bad: "▲ ", warning: "◆ " };

export function createMap(store) {
  const fold = element("button", { type: "button", class: "quiet" });
  const caption = element("p", { class: "hint" });
  const canvas = element("div", { class: "map-canvas" });
  const scroller = element("div", {
    class: "map-scroll", role: "group", "aria-label": "Layers of the model",
  }, canvas);
  const table = dataTable("Map");
  const root = card("map", "Map of the model", [fold], caption, scroller, table.root);
  root.classList.add("wide");
  let open = new Set();
  let known = null;
  let worst = new Map();
  let byPath = new Map();
  let asIf = false;
  let graph = { nodes: [], edges: [], nestedOnly: false };
  let drawn = new Map();
  let drawnShape = null;
  let below = BELOW[1];
  let broughtOf = null;
  walkRows(canvas, "button.node");

  function unfold(all) {
    const { layers } = store.state.runData;
    open = all ? holdersIn(layers) : new Set();
    fill();
  }
  fold.addEventListener("click", () => unfold(!open.size));

  function fill() {
    const { runData, awaited } = store.state;
    if (!runData) return;
    const { layers } = runData;
    const names = layers.map(({ path }) => path).join("\n");
    if (names !== known) {
      known = names;
      open = layers.length <= OPEN_AT_MOST ? holdersIn(layers) : new Set();
    }
    byPath = new Map(layers.map((layer) => [layer.path, layer]));
    asIf = isAsIf(layers, runData.format?.name);
    graph = foldedGraph(layers, open);
    fold.hidden = !holdersIn(layers).size;
    fold.textContent = open.size ? "Fold blocks" : "Unfold blocks";
    const nodes = graph.nodes.slice(0, DRAWN_AT_MOST);
    const shape = JSON.stringify([nodes, graph.edges]);
    // Runs of the same model differ only in colors, so do not draw the map again.
    const isOther = shape !== drawnShape;
    if (isOther) drawNodes(nodes, graph.edges);
    drawnShape = shape;
    scroller.hidden = !layers.length;
    if (isOther || !awaited.heat) colour();
    mark();
  }

  // Says since when the readings count. Colors show only readings after the last change of dtypes.
  function sinceWhen(layers) {
    const last = Math.max(...layers.map(changedAt));
    return last < 0 ? "" : ` since dtypes last changed, at step ${formatInteger(last)}`;
  }

  function colour() {
    const { runData, metric, heat } = store.state;
    const { layers } = runData;
    const shown = metricOf(runData, metric);
    const fits = shown && isOfRun(heat, runData) && heat.metric === metric;
    worst = fits ? worstByLayer(heat, byPath, pathOfCall, shown.kind) : new Map();
    caption.textContent = !layers.length ? NO_LAYERS : [
      shown ? `Color: ${shown.title}, the worst of all readings${sinceWhen(layers)}.` :
        "No colors, because MixPrecMonitor did not measure the layers (probe_every).",
      heat && isLeftOut(heat) ? runData.left_out : "",
      graph.nestedOnly ? NESTED : "",
      graph.nodes.length > DRAWN_AT_MOST ? `The first ${DRAWN_AT_MOST} of ${
        plural(graph.nodes.length, "layer")}.` : "",
    ].filter(Boolean).join(" ");
    const ranks = graph.nodes.slice(0, DRAWN_AT_MOST).map((node) => {
      return [GRAVEST.indexOf(colourNode(node, shown)), node];
    });
    const of = fits ? `${runData.run} ${metric}` : null;
    // Scroll to the worst node only once, because new data must not undo the user's scrolling.
    if (of && of !== broughtOf) bringGravest(ranks);
    broughtOf = of ?? broughtOf;
    table.fill(!layers.length ? null : () => [["Layer", "Receives from", shown?.title ?? "Value"], graph.nodes.map((node) => {
      const before = graph.edges.filter(({ to }) => to === node.path).map(({ from }) => from);
      return [node.path, before.join(", ") || "–", stateOf(node, shown).words];
    })]);
  }

  function bringGravest(ranks) {
    const alarm = GRAVEST.indexOf("warning");
    const found = ranks.filter(([rank]) => rank >= 0 && rank <= alarm);
    if (!found.length) return;
    const [, node] = found.reduce((one, other) => other[0] < one[0] ? other : one);
    const bottom = placeOf(node).y + NODE.height + NODE.margin;
    scroller.scrollTop = bottom > VIEW_OF_MAP ? bottom - VIEW_OF_MAP / 2 : 0;
  }

  // Returns the state of a node. A folded block has the most severe state of its layers.
  function stateOf(node, shown) {
    if (!shown) return { words: "not measured", level: "none", color: null };
    const { heat, runData } = store.state;
    return gravestOf(node.inside.map((path) => {
      const reading = worst.get(path) ?? { value: NaN, step: null };
      return { reading, ...describeReading(reading, byPath.get(path), shown, runData.format, asIf) };
    }), heat?.pool);
  }

  function drawNodes(nodes, edges) {
    const labels = shortNames(nodes.map(({ path }) => path), 26);
    const deepest = Math.max(0, ...nodes.map(({ depth }) => depth));
    const room = VIEW_OF_MAP - 2 * NODE.margin - (deepest + 1) * NODE.height;
    below = clamp(Math.floor(room / Math.max(1, deepest)), ...BELOW);
    const places = new Map(nodes.map((node) => [node.path, placeOf(node)]));
    const far = (key) => Math.max(0, ...[...places.values()].map((place) => place[key]));
    const width = far("x") + NODE.width + 150;
    const height = far("y") + NODE.height + NODE.margin;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const lines = document.createElementNS(SVG, "svg");
    lines.setAttribute("width", String(width));
    lines.setAttribute("height", String(height));
    lines.setAttribute("aria-hidden", "true");
    for (const { from, to, nested } of edges) {
      if (!places.has(from) || !places.has(to)) continue;
      const line = document.createElementNS(SVG, "path");
      line.setAttribute("d", curve(places.get(from), places.get(to)));
      if (nested) line.setAttribute("stroke-dasharray", "3 4");
      lines.append(line);
    }
    const focused = canvas.querySelector(":focus")?.dataset.layer;
    drawn = new Map(nodes.map((node, index) => {
      return [node.path, buttonOf(node, labels.get(node.path), index)];
    }));
    canvas.replaceChildren(lines, ...[...drawn.values()].map(({ button }) => button));
    if (focused) drawn.get(focused)?.button.focus();
  }

  function placeOf({ depth, column }) {
    return {
      x: NODE.margin + column * (NODE.width + NODE.right),
      y: NODE.margin + depth * (NODE.height + below), depth,
    };
  }

  // Returns the path of an edge. An edge that skips layers goes around them.
  function curve(from, to) {
    const start = [from.x + NODE.width / 2, from.y + NODE.height];
    const end = [to.x + NODE.width / 2, to.y];
    if (to.depth - from.depth < 2) return `M${start} C${start[0]},${end[1]} ${end[0]},${start[1]} ${end}`;
    const side = [from.x + NODE.width, from.y + NODE.height / 2];
    const reach = side[0] + 20 + Math.min(100, 14 * (to.depth - from.depth));
    const aim = [to.x + NODE.width, to.y + NODE.height / 2];
    return `M${side} C${reach},${side[1]} ${reach},${aim[1]} ${aim}`;
  }

  function buttonOf(node, name, index) {
    const { path, inside } = node;
    const more = inside.length > 1 ? ` (${inside.length})` : "";
    const swatch = element("i");
    const label = document.createTextNode("");
    const words = element("em");
    const button = element("button", {
      type: "button", class: "node", "data-layer": path, tabindex: index ? "-1" : "0",
      onclick: () => {
        if (more) {
          open = new Set([...open, path]);
          fill();
        }
        chooseLayer(store, path);
      },
    }, swatch, label, words);
    const { x, y } = placeOf(node);
    button.style.left = `${x}px`;
    button.style.top = `${y}px`;
    button.setAttribute("aria-current", "false");
    return { button, swatch, label, words, text: name + more };
  }

  function colourNode(node, shown) {
    const { button, swatch, label, words, text } = drawn.get(node.path);
    const { path, inside } = node;
    const { words: said, short = said, level, color } = stateOf(node, shown);
    const told = `${path}: ${said}`;
    const name = inside.length > 1 ? `${told}; ${plural(inside.length, "layer")}, folded` : told;
    button.title = name;
    button.setAttribute("aria-label", name);
    label.data = (MARKS[level] ?? "") + text;
    words.textContent = shown ? short.replace("▲ ", "") : "";
    // The style sheet draws the hatching of a level, by the class of the swatch.
    swatch.className = level;
    swatch.style.background = ["zero", "passed"].includes(level) ? "" :
      color ? cssColor(color) : "transparent";
    return level;
  }

  function mark() {
    const { layer } = store.state;
    const path = layer === null ? null : pathOfCall(layer, byPath);
    canvas.querySelector('[aria-current="true"]')?.setAttribute("aria-current", "false");
    drawn.get(path)?.button.setAttribute("aria-current", "true");
  }

  store.on(["runData"], seenFirst(root, fill));
  store.on(["metric", "heat"], seenFirst(root, () => {
    if (store.state.runData && !store.state.awaited.heat) colour();
  }));
  store.on(["layer"], seenFirst(root, mark));
  return root;
}
