import { clamp, stepDomain } from "./scales.js";
import { chooseStep } from "./actions.js";
import {
  createSurface, drawLine, drawMarker, drawStepAxis, FONT, hatchPattern,
} from "./canvas.js";
import { element } from "./dom.js";
import { formatInteger, momentInWords } from "./format.js";
import { drawSoon } from "./frames.js";
import { stepGestures } from "./gestures.js";
import { columnAt, columnScale, columnsOfPixels, isOfRun, originAt, pathOfCall } from "./heat_data.js";
import { drawInside, pictureOfCells, stretchesOf } from "./heat_cells.js";
import { GRAVEST, heatRows, isBadSince, poolRows, rowOfCall } from "./heat_rows.js";
import { layerChoice } from "./layer_blocks.js";
import { BAD_INPUT, valueInWords } from "./metrics.js";
import { callName, shortNames } from "./names.js";
import { changedAt, everWider, isAsIf, widerAt } from "./precision.js";
import { lastStepOf } from "./step_axis.js";
import { themeColor } from "./theme.js";
import { hideTooltip, showTooltip } from "./tooltip.js";
import { metricOf } from "./wanted.js";

const LABEL_WIDTHS = [208, 380];
const LABEL_SHARE = 0.25;
const CHARACTER = 5.8;
const VIEW_HEIGHT = 440;
// The minimum and the maximum height of a row in the heatmap.
const ROW_HEIGHTS = [12, 36];
const AXIS_HEIGHT = 24;

// Draws only the rows in view, because a canvas cannot be as tall as 1,000 rows.
export function createHeatmap(store, heatSlot, dataSlot) {
  const spacer = element("div", { class: "heat-spacer" });
  const scroller = element("div", { class: "heat-scroll" }, spacer);
  const surface = createSurface(spacer, {
    tabindex: "0", role: "application", "aria-roledescription": "heatmap",
    "aria-label": "Heatmap of layers and steps: arrow keys move the chosen cell, " +
      "plus and minus zoom",
  }, draw);
  const plot = { left: LABEL_WIDTHS[0], right: 0, scale: null, cursor: null };
  let layers = new Map();
  let repairedAt = -1;
  let asIf = false;
  let rows = [];
  let pooled = { of: null, rows: new Map() };
  let rowHeight = 12;
  let revealedRows = 0;

  const heatOf = () => store.state[heatSlot];
  const limits = () => stepDomain(lastStepOf(store.state), null);
  const gestures = stepGestures(surface, plot, {
    limits,
    onZoom: (zoom) => store.set({ zoom }),
    onHover: hover,
    onClick(at) {
      const cell = cellAt(at);
      if (cell) chooseStep(store, cell.step, cell.layer);
    },
  });

  const formatName = () => store.state[dataSlot]?.format?.name ?? "float16";

  const spell = (call) => callName(call, layers);

  function layerOf(call) {
    return layers.get(pathOfCall(call, layers)) ?? null;
  }

  function readLayers() {
    const rows = store.state[dataSlot]?.layers ?? [];
    layers = new Map(rows.map((layer) => [layer.path, layer]));
    repairedAt = Math.max(-1, ...rows.map(changedAt));
    asIf = isAsIf(rows, formatName());
  }

  // Returns an overflow inside a layer, which the headroom of its outputs does not show.
  function insideOf(layer) {
    const { metric } = heatOf();
    return metric === "activation_headroom_bits" ? layer?.inside ?? null : null;
  }

  // Returns the columns under each pixel, starting at the pixel `left`.
  function pixelsOf(left, width) {
    return columnsOfPixels((pixel) => plot.scale.place(pixel + left), heatOf().from.length, width);
  }

  // Returns the pooled values and levels of a row.
  function pooledRow(place, pixels) {
    if (!pooled.rows.has(place)) pooled.rows.set(place, poolOf(rows[place], pixels));
    return { row: place, ...pooled.rows.get(place) };
  }

  function poolOf({ calls, block }, pixels) {
    const heat = heatOf();
    const kind = metricOf(store.state[dataSlot], heat.metric)?.kind;
    const ever = new Set(calls.filter((call) => {
      return everWider(layerOf(heat.layers[call]), formatName());
    }));
    // Show values of a float32 run as if they were float16, unless float16 cannot hold them.
    const isHeld = (call, column) => !asIf || heat.values[call * heat.from.length + column] <= 0;
    const isWider = (call, column) => ever.has(call) && isHeld(call, column) &&
      Boolean(widerAt(layerOf(heat.layers[call]), heat.until[column], formatName()));
    const found = poolRows(heat, calls, pixels, kind, isWider);
    const { columns, source } = found;
    const wider = (pixel) => source[pixel] >= 0 && isWider(source[pixel], columns[pixel]);
    const layer = block ? null : layerOf(heat.layers[calls[0]]);
    return { ...found, layer, wider };
  }

  // Keeps the pooled rows until different columns are under the pixels.
  function keepPooled(size) {
    const ends = [plot.left, plot.right].map(plot.scale.invert);
    const of = [...ends, size].join();
    if (pooled.of !== of) pooled = { of, rows: new Map() };
  }

  function choose() {
    const heat = heatOf();
    rows = heat ? heatRows(heat.layers, layers, layerChoice(store.state)) : [];
    pooled = { of: null, rows: new Map() };
  }

  function measure() {
    choose();
    const fitting = Math.floor(VIEW_HEIGHT / Math.max(1, rows.length));
    rowHeight = clamp(fitting, store.state.fit ? 1 : ROW_HEIGHTS[0], ROW_HEIGHTS[1]);
    const height = rows.length * rowHeight + AXIS_HEIGHT;
    const view = Math.min(height, VIEW_HEIGHT + AXIS_HEIGHT);
    spacer.style.height = `${height}px`;
    scroller.style.height = `${view}px`;
    surface.setHeight(view);
  }

  function rowAt(y) {
    const heat = heatOf();
    const row = Math.floor((y + scroller.scrollTop) / rowHeight);
    const visible = y < scroller.clientHeight - AXIS_HEIGHT;
    return heat && visible && row < rows.length ? row : -1;
  }

  // Returns the worst cell under a pixel, because the color of the pixel shows that cell.
  function cellAt({ x, y }) {
    const heat = heatOf();
    const row = rowAt(y);
    if (row < 0 || !plot.scale) return null;
    const { name, calls } = rows[row];
    if (x < plot.left) {
      return { name, layer: heat.layers[calls[0]], step: store.state.step, value: NaN };
    }
    const pixels = pixelsOf(x, 1);
    const { values, columns, source, ranks, wider: isWide } = poolOf(rows[row], pixels);
    const layer = heat.layers[source[0] < 0 ? calls[0] : source[0]];
    const column = Math.max(columns[0], pixels.first[0]);
    const [from, until] = [heat.from[column], heat.until[column]];
    const step = clamp(Math.round(plot.scale.invert(x)), from, until);
    const wider = isWide(0) || asIf ? widerAt(layerOf(layer), until, formatName()) : null;
    const isBad = GRAVEST[ranks[0]] === "input";
    const origin = GRAVEST[ranks[0]] === "passed" ? originAt(heat, source[0], columns[0]) : null;
    return { name, layer, step, value: values[0], from, until, wider, isBad, origin };
  }

  function hover(event, at) {
    const cell = cellAt(at);
    const metric = metricOf(store.state[dataSlot], heatOf()?.metric);
    if (!cell || !metric) return hideTooltip();
    if (at.x < plot.left) return showTooltip(event, [spell(cell.name)]);
    const steps = cell.from === cell.until ? momentInWords(cell.from, "after") :
      `steps ${formatInteger(cell.from)} to ${formatInteger(cell.until)}`;
    const words = cell.isBad ? BAD_INPUT : cell.origin ? cell.origin.long :
      valueInWords(metric.kind, cell.value, cell.wider, formatName());
    const block = cell.name === cell.layer ? [] : [`worst of ${cell.name}`];
    const inside = insideOf(layerOf(cell.layer));
    return showTooltip(event, [
      ...block, spell(cell.layer), steps, metric.title, words,
      ...inside ? [inside.long] : [],
    ]);
  }

  function draw(context, width, height) {
    const heat = heatOf();
    const metric = metricOf(store.state[dataSlot], heatOf()?.metric);
    const bottom = height - AXIS_HEIGHT;
    plot.left = clamp(Math.round(width * LABEL_SHARE), ...LABEL_WIDTHS);
    plot.right = width - 22;
    const domain = stepDomain(lastStepOf(store.state), store.state.zoom);
    plot.cursor = store.state.step;
    if (!heat || !metric) return;
    plot.scale = columnScale(heat, domain, [plot.left, plot.right]);
    const size = Math.floor(plot.right - plot.left);
    const pixels = pixelsOf(plot.left, size);
    const first = Math.floor(scroller.scrollTop / rowHeight);
    const last = Math.min(
      rows.length, Math.ceil((scroller.scrollTop + bottom) / rowHeight),
    );
    context.save();
    context.beginPath();
    context.rect(0, 0, width, bottom);
    context.clip();
    keepPooled(size);
    const seen = [];
    for (let row = first; row < last; row += 1) seen.push(pooledRow(row, pixels));
    drawCells(context, seen, metric.kind);
    drawLabels(context, seen);
    drawDemotions(context, seen);
    drawChosen(context, bottom);
    gestures.drawBrush(context, 0, bottom);
    context.restore();
    drawStepAxis(context, plot.scale.ticks(size / 50), { start: plot.left, y: bottom });
  }

  const topOf = (row) => row * rowHeight - scroller.scrollTop;

  function drawCells(context, seen, kind) {
    if (!seen.length) return;
    // Reuse the picture until different rows or steps are in view.
    const view = `${seen[0].row} ${seen.length}`;
    if (pooled.view !== view) Object.assign(pooled, { view, picture: pictureOfCells(seen, kind) });
    const { picture } = pooled;
    const size = picture.width;
    context.imageSmoothingEnabled = false;
    const height = seen.length * rowHeight;
    context.drawImage(picture, plot.left, topOf(seen[0].row), size, height);
    if (rowHeight >= 6) {
      context.fillStyle = themeColor("--card");
      for (const { row } of seen) context.fillRect(plot.left, topOf(row), size, 1);
    }
    for (const level of ["zero", "beyond", "input", "passed", "bad"]) {
      context.fillStyle = hatchPattern(context, level);
      for (const row of seen) hatch(context, row, level, topOf(row.row));
    }
    for (const { row, layer } of seen) {
      const inside = insideOf(layer);
      const place = { top: topOf(row), height: rowHeight };
      if (inside) drawInside(context, layer, inside, plot, place);
    }
  }

  // A wide page has room for longer names.
  function namesOf(heat) {
    const blocks = rows.filter((row) => row.block).map((row) => row.name);
    const names = shortNames([...blocks, ...heat.layers.map(spell)], Math.floor((plot.left - 22) / CHARACTER) - 2);
    return ({ name, block }) => (block ? `▸ ${names.get(name)}` : names.get(spell(name)));
  }

  function hatch(context, row, level, top) {
    const gap = rowHeight >= 6 ? 1 : 0;
    for (const [start, width] of stretchesOf(row, level)) {
      context.fillRect(plot.left + start, top + gap, width, rowHeight - gap);
    }
  }

  function drawLabels(context, seen) {
    const stride = Math.max(1, Math.ceil(11 / rowHeight));
    const heat = heatOf();
    const nameOf = namesOf(heat);
    const chosenRow = rowOfCall(rows, heat.layers, store.state.layer);
    context.textAlign = "right";
    context.font = FONT;
    for (const found of seen) {
      const { row } = found;
      const y = Math.max(topOf(row) + rowHeight / 2, row ? -Infinity : 6);
      const bad = insideOf(found.layer)?.is_open || isBadSince(found, heat, repairedAt);
      const chosen = row === chosenRow;
      const crowded = chosenRow >= 0 && Math.abs(row - chosenRow) < stride;
      if (bad && rowHeight >= 6) {
        drawMarker(context, "triangle", plot.left - 9, y, themeColor("--bad"));
      }
      if (!chosen && (row % stride || crowded)) continue;
      context.fillStyle = themeColor(bad || chosen ? "--ink" : "--muted");
      context.fillText(nameOf(rows[row]), plot.left - 18, y, plot.left - 22);
    }
  }

  function drawDemotions(context, rows) {
    for (const { row, layer } of rows) {
      if (!layer || layer.demoted_at === null) continue;
      const x = Math.max(plot.left, plot.scale(layer.demoted_at));
      const y = topOf(row) + rowHeight;
      const color = themeColor("--demote");
      if (x > plot.right) continue;
      drawLine(context, [[x, y - 1], [plot.right, y - 1]], color, 2);
      drawLine(context, [[x, topOf(row)], [x, y]], color, 2);
      if (rowHeight >= 9) drawMarker(context, "down", x, y - rowHeight / 2, color);
    }
  }

  function drawChosen(context, bottom) {
    const { step, layer } = store.state;
    const heat = heatOf();
    if (step !== null) {
      const x = plot.scale(step);
      if (x >= plot.left && x <= plot.right) {
        drawLine(context, [[x, 0], [x, bottom]], themeColor("--card"), 3);
        drawLine(context, [[x, 0], [x, bottom]], themeColor("--cursor"), 1.5);
      }
    }
    const row = rowOfCall(rows, heat.layers, layer);
    if (row < 0) return;
    context.strokeStyle = themeColor("--cursor");
    context.lineWidth = 2;
    // In a thin row, the frame must leave out the label, because its lines would cross the label.
    const left = rowHeight < 12 ? plot.left : 2;
    context.strokeRect(left, topOf(row) + 0.5, plot.right - left + 1, rowHeight);
  }

  function reveal() {
    const heat = heatOf();
    const row = heat ? rowOfCall(rows, heat.layers, store.state.layer) : -1;
    if (row < 0) return;
    const view = scroller.clientHeight - AXIS_HEIGHT;
    const top = row * rowHeight;
    const visible = top >= scroller.scrollTop &&
      top + rowHeight <= scroller.scrollTop + view;
    if (!visible) scroller.scrollTop = top - view / 2;
  }

  surface.canvas.addEventListener("keydown", (event) => {
    const heat = heatOf();
    if (!heat || !rows.length || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const [layer, step] = [store.state.layer, store.state.step];
    const size = event.shiftKey ? 10 : 1;
    const down = { ArrowDown: size, ArrowUp: -size }[event.key] ?? 0;
    const right = { ArrowRight: size, ArrowLeft: -size }[event.key] ?? 0;
    const row = rowOfCall(rows, heat.layers, layer);
    const newRow = clamp(row + down, 0, rows.length - 1);
    const columns = heat.from.length;
    const at = step === null ? columns - 1 : columnAt(heat.from, step);
    const column = clamp(at + right, 0, columns - 1);
    const newStep = right || step === null ? heat.from[column] : step;
    chooseStep(store, newStep, down || row < 0 ? heat.layers[rows[newRow].calls[0]] : layer);
  });
  scroller.addEventListener("scroll", surface.redraw);

  // Keeps the picture of the previous run until the new data is loaded.
  const unlessOld = (act) => () => {
    if (!heatOf() || isOfRun(heatOf(), store.state[dataSlot])) act();
  };

  // A live reload must not scroll away from the rows that the user reads.
  const shape = () => {
    measure();
    if (rows.length !== revealedRows) drawSoon(reveal);
    revealedRows = rows.length;
  };
  store.on([dataSlot], readLayers);
  store.on([heatSlot, dataSlot, "filter", "onlyProblems", "folded"], unlessOld(shape));
  store.on(["fit"], unlessOld(() => {
    measure();
    drawSoon(reveal);
  }));
  store.on(["layer"], unlessOld(reveal));
  store.on(
    ["runData", "compareData", "zoom", "step", "layer", "theme"],
    unlessOld(surface.redraw),
  );
  return scroller;
}
