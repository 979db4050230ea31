import { chooseLayer } from "./actions.js";
import { dataTable } from "./data_table.js";
import { card, element, walkRows } from "./dom.js";
import { plural } from "./format.js";
import { pathOfCall } from "./heat_data.js";
import { valueInWords } from "./metrics.js";
import { holdersIn, foldedGraph, worseOf, worstByLayer } from "./model_map.js";
import { shortNames } from "./names.js";
import { alarmLevel, cssColor, valueColor } from "./palette.js";
import { everWider } from "./precision.js";
import { metricOf } from "./wanted.js";

const NODE = { width: 300, height: 26, right: 24, below: 16, margin: 10 };
// More than these are folded at first, and more than those are not drawn at all.
const OPEN_AT_MOST = 60;
const DRAWN_AT_MOST = 400;
const SVG = "http://www.w3.org/2000/svg";
const NESTED = "The log has no graph of this model: a subclassed one has none, nor have " +
  "logs of older versions. Dashed lines lead from a layer to those that it holds.";
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
  walkRows(canvas, "button.node");

  function unfold(all) {
    const { layers } = store.state.runData;
    open = all ? holdersIn(layers) : new Set();
    fill();
  }
  fold.addEventListener("click", () => unfold(!open.size));

  function fill() {
    const { runData, metric, heat } = store.state;
    if (!runData) return;
    const { layers } = runData;
    const names = layers.map(({ path }) => path).join("\n");
    if (names !== known) {
      known = names;
      open = layers.length <= OPEN_AT_MOST ? holdersIn(layers) : new Set();
    }
    byPath = new Map(layers.map((layer) => [layer.path, layer]));
    const shown = metricOf(runData, metric);
    const fits = heat && heat.metric === metric;
    worst = fits ? worstByLayer(heat, new Set(byPath.keys()), pathOfCall) : new Map();
    const graph = foldedGraph(layers, open);
    const drawn = graph.nodes.slice(0, DRAWN_AT_MOST);
    fold.hidden = !holdersIn(layers).size;
    fold.textContent = open.size ? "Fold blocks" : "Unfold blocks";
    caption.textContent = !layers.length ? NO_LAYERS : [
      shown ? `Colour: ${shown.title}, the worst of the run.` :
        "Without colours: MixPrecMonitor measured nothing of the layers (`probe_every`).",
      graph.nestedOnly ? NESTED : "",
      graph.nodes.length > drawn.length ? `The first ${DRAWN_AT_MOST} of ${
        plural(graph.nodes.length, "layer")}.` : "",
    ].filter(Boolean).join(" ");
    drawNodes(drawn, graph.edges, shown);
    scroller.hidden = !layers.length;
    table.fill(!layers.length ? null : () => [["Layer", "Receives from", shown?.title ?? "Value"], graph.nodes.map((node) => {
      const before = graph.edges.filter(({ to }) => to === node.path).map(({ from }) => from);
      return [node.path, before.join(", ") || "–", wordsOf(node, shown)];
    })]);
    mark();
  }

  function valueOfNode(node) {
    const { heat } = store.state;
    return node.inside.reduce((value, path) => {
      return worseOf(value, worst.get(path) ?? NaN, heat?.pool);
    }, NaN);
  }

  function widerOf(node) {
    const formatName = store.state.runData.format?.name;
    const found = node.inside.find((path) => everWider(byPath.get(path), formatName));
    return found === undefined ? null : byPath.get(found);
  }

  function wordsOf(node, shown) {
    if (!shown) return "not measured";
    const wide = widerOf(node)?.compute_dtype ?? null;
    return valueInWords(shown.kind, valueOfNode(node), wide, store.state.runData.format?.name);
  }

  function drawNodes(nodes, edges, shown) {
    const labels = shortNames(nodes.map(({ path }) => path), 26);
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
    canvas.replaceChildren(lines, ...nodes.map((node, index) => {
      return buttonOf(node, labels.get(node.path), index, shown);
    }));
    if (focused) [...canvas.querySelectorAll("button")]
      .find((node) => node.dataset.layer === focused)?.focus();
  }

  function placeOf({ depth, column }) {
    return {
      x: NODE.margin + column * (NODE.width + NODE.right),
      y: NODE.margin + depth * (NODE.height + NODE.below), depth,
    };
  }

  // What skips layers goes around them.
  function curve(from, to) {
    const start = [from.x + NODE.width / 2, from.y + NODE.height];
    const end = [to.x + NODE.width / 2, to.y];
    if (to.depth - from.depth < 2) return `M${start} C${start[0]},${end[1]} ${end[0]},${start[1]} ${end}`;
    const side = [from.x + NODE.width, from.y + NODE.height / 2];
    const reach = side[0] + 20 + Math.min(100, 14 * (to.depth - from.depth));
    const aim = [to.x + NODE.width, to.y + NODE.height / 2];
    return `M${side} C${reach},${side[1]} ${reach},${aim[1]} ${aim}`;
  }

  function buttonOf(node, label, index, shown) {
    const { path, inside } = node;
    const more = inside.length > 1 ? ` (${inside.length})` : "";
    const value = valueOfNode(node);
    const words = wordsOf(node, shown);
    const wide = Boolean(widerOf(node));
    const color = shown ? valueColor(shown.kind, value, wide) : null;
    const sign = shown ? MARKS[alarmLevel(shown.kind, value, wide)] ?? "" : "";
    const told = `${path}: ${words}`;
    const name = more ? `${told}; ${plural(inside.length, "layer")}, folded` : told;
    const button = element("button", {
      type: "button", class: "node", "data-layer": path, title: name, "aria-label": name,
      tabindex: index ? "-1" : "0",
      onclick: () => {
        if (more) {
          open = new Set([...open, path]);
          fill();
        }
        chooseLayer(store, path);
      },
    }, element("i", {}), sign + label + more,
    element("em", {}, shown ? words : ""));
    button.querySelector("i").style.background = color ? cssColor(color) : "transparent";
    const { x, y } = placeOf(node);
    button.style.left = `${x}px`;
    button.style.top = `${y}px`;
    return button;
  }

  function mark() {
    const { layer, runData } = store.state;
    const paths = new Set((runData?.layers ?? []).map(({ path }) => path));
    const path = layer === null ? null : pathOfCall(layer, paths);
    for (const node of canvas.querySelectorAll("button.node")) {
      node.setAttribute("aria-current", String(node.dataset.layer === path));
    }
  }

  store.on(["runData", "metric", "heat"], fill);
  store.on(["layer"], mark);
  return root;
}
