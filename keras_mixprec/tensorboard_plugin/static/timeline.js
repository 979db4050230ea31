import {
  clamp, exponentTicks, linearScale, nearestMark, stepDomain, valueAtStep,
} from "./scales.js";
import { chooseEvent, chooseStep } from "./actions.js";
import {
  createSurface, drawAxisName, drawLine, drawMarker, drawRows, drawStepAxis,
} from "./canvas.js";
import { dataTable } from "./data_table.js";
import { card, element, legendItem } from "./dom.js";
import {
  formatInteger, formatNumber, formatPower, formatScale, momentInWords, readable, toNumber,
} from "./format.js";
import { stepGestures } from "./gestures.js";
import { LEVELS } from "./levels.js";
import {
  drawLossAxis, drawLosses, finiteStretches, LOSS_AXIS, lossInWords, lossStyle, placeLosses, WHY_READINGS,
} from "./loss_curve.js";
import { shortRun } from "./names.js";
import { lastStepOf, stepTicks } from "./step_axis.js";
import { themeColor } from "./theme.js";
import { hideTooltip, showTooltip } from "./tooltip.js";

const LEFT = 66;
const RIGHT = 14;
const TOP = 10;
// The minimum and maximum height of the curves. Between them, the timeline fills the height of the
// card next to it.
const PLOT_HEIGHTS = [128, 480];
const LANE_HEIGHT = 20;
const LANES = ["skipped", "verdicts", "changes"];
const LINE_COLORS = ["--line-1", "--line-2", "--line-3"];

function nameOfLine(line, data, other) {
  const optimizer = line.optimizer ? ` ${line.optimizer}` : "";
  return (other ? `loss scale of ${shortRun(data.run, other.run)}` : "loss scale") + optimizer;
}

export function createTimeline(store) {
  const legend = element("div", { class: "legend" });
  const reset = element("button", {
    type: "button", class: "quiet", hidden: true,
    onclick: () => store.set({ zoom: null }),
  }, "Reset zoom");
  const body = element("div", { class: "canvas-box" });
  const table = dataTable("Loss scale");
  const losses = dataTable("Loss");
  const root = card("timeline", "Loss scale and events", [legend, reset], body, table.root, losses.root);
  const surface = createSurface(body, {
    tabindex: "0", role: "slider", "aria-valuemin": "0",
    "aria-label": "Timeline: arrow keys move the step, Enter selects the event, " +
      "plus and minus zoom",
  }, draw);
  const runsOf = ({ runData, compareData }) => [runData, compareData].filter(Boolean);
  // A lane has one row of marks for each run.
  const laneHeight = () => LANE_HEIGHT * Math.max(1, runsOf(store.state).length);
  let plotHeight = PLOT_HEIGHTS[0];
  const lanesTop = () => TOP + plotHeight + 6;
  const axisY = () => lanesTop() + LANES.length * laneHeight();
  const resize = (room = 0) => {
    const others = axisY() + 24 - plotHeight;
    body.style.minHeight = `${others + PLOT_HEIGHTS[0]}px`;
    plotHeight = clamp(room - others, ...PLOT_HEIGHTS);
    surface.setHeight(others + plotHeight);
  };
  resize();
  new ResizeObserver(([{ contentRect }]) => resize(Math.floor(contentRect.height))).observe(body);
  const plot = { left: LEFT, right: 0, scale: null, cursor: null, marks: [], blocks: [] };

  const limits = () => stepDomain(lastStepOf(store.state), null);
  const gestures = stepGestures(surface, plot, {
    limits,
    onZoom: (zoom) => store.set({ zoom }),
    onHover: hover,
    onClick(at) {
      const mark = markAt(at);
      if (mark) chooseEvent(store, mark.row, mark.step);
      else if (at.x >= plot.left) chooseStep(store, stepAt(at.x));
    },
  });

  function runOf(row) {
    return runsOf(store.state).find((data) => data.told.includes(row)).run;
  }

  function markAt(at) {
    return nearestMark(plot.marks, at, 9) ?? plot.blocks.find((block) => {
      return at.x >= block.left && at.x <= block.right &&
        Math.abs(at.y - block.y) <= LANE_HEIGHT / 2;
    });
  }

  function stepAt(x) {
    const last = store.state.runData?.last_step ?? 0;
    return clamp(Math.round(plot.scale.invert(x)), 0, last);
  }

  function hover(event, at) {
    const { runData, compareData } = store.state;
    if (!runData || at.x < plot.left || at.x > plot.right) return hideTooltip();
    const mark = markAt(at);
    if (mark) {
      return showTooltip(event, [
        `${mark.row.title} · ${momentInWords(mark.step, "")}` + (compareData ? ` · ${runOf(mark.row)}` : ""),
        readable(mark.row.text),
      ]);
    }
    const step = stepAt(at.x);
    const lines = [momentInWords(step, "")];
    for (const data of runsOf(store.state)) {
      for (const line of data.scale) {
        const [scale, skipped, at] = [line.scale, line.skipped, line.steps]
          .map((values) => valueAtStep(line.steps, values, step));
        const other = data === runData ? compareData : runData;
        lines.push(`${nameOfLine(line, data, other)}: ${formatScale(scale)}, ` +
          `${formatInteger(skipped)} skipped up to step ${formatInteger(at)}`);
      }
      const loss = lossInWords(data.loss, step);
      if (loss) lines.push(`loss${compareData ? ` of ${data.run}` : ""}: ${loss}`);
    }
    return showTooltip(event, lines);
  }

  function draw(context, width) {
    const { runData, compareData, step, zoom, event: chosen } = store.state;
    if (!runData) return;
    const last = lastStepOf(store.state);
    const hasLoss = runsOf(store.state).some((data) => finiteStretches(data.loss).length);
    plot.right = width - (hasLoss ? LOSS_AXIS : RIGHT);
    plot.scale = linearScale(stepDomain(last, zoom), [LEFT, plot.right]);
    plot.cursor = step;
    const lines = runsOf(store.state).flatMap((data) => data.scale.map((line) => {
      return { ...line, until: data.last_step, dashed: data !== runData };
    }));
    const logs = lines.flatMap((line) => line.scale.map((scale) => {
      return Math.log2(toNumber(scale));
    })).filter(Number.isFinite);
    const [low, high] = logs.reduce(([least, most], log) => [Math.min(least, log), Math.max(most, log)],
      [Infinity, -Infinity]);
    const y = linearScale([low - 1, high + 1], [TOP + plotHeight, TOP]);

    // A run without a loss scale has no axis for the loss scale.
    const ticks = logs.length ? exponentTicks(Math.floor(low), Math.ceil(high), 6) : [];
    drawRows(context, ticks, { y, left: LEFT, right: plot.right, label: formatPower });
    context.textAlign = "right";
    LANES.forEach((lane, index) => {
      const top = lanesTop() + index * laneHeight();
      context.fillStyle = themeColor(index % 2 ? "--card" : "--stripe");
      context.fillRect(LEFT, top, plot.right - LEFT, laneHeight());
      context.fillStyle = themeColor("--muted");
      context.fillText(lane, LEFT - 8, top + LANE_HEIGHT / 2);
      if (!compareData) return;
      const middle = top + 1.5 * LANE_HEIGHT;
      drawLine(context, [[LEFT, middle], [plot.right, middle]], themeColor("--compare"),
        0.5, [5, 3]);
    });
    const domain = [LEFT, plot.right].map(plot.scale.invert);
    drawStepAxis(context, stepTicks(plot.scale, domain, width / 110), { start: LEFT, y: axisY(), top: TOP });
    if (logs.length) drawAxisName(context, "loss scale", 8, TOP + plotHeight / 2, true);
    const losses = placeLosses(runsOf(store.state), {
      scale: plot.scale, left: LEFT, right: plot.right, top: TOP, bottom: TOP + plotHeight,
    });
    if (losses) drawLossAxis(context, losses);

    context.save();
    context.beginPath();
    context.rect(LEFT, 0, plot.right - LEFT, axisY());
    context.clip();
    let solid = 0;
    for (const line of [...lines].sort((one, two) => two.dashed - one.dashed)) {
      const points = [];
      line.steps.forEach((at, index) => {
        const log = Math.log2(toNumber(line.scale[index]));
        if (!Number.isFinite(log)) return;
        const x = plot.scale(at);
        if (points.length) points.push([x, points.at(-1)[1]]);
        points.push([x, y(log)]);
      });
      // The log has rows only for changes, so the last value continues to the end.
      if (points.length) points.push([plot.scale(line.until), points.at(-1)[1]]);
      if (line.dashed) {
        drawLine(context, points, themeColor("--compare"), 1.5, [5, 3]);
      } else {
        const color = LINE_COLORS[solid % LINE_COLORS.length];
        drawLine(context, points, themeColor(color), 2);
        solid += 1;
      }
    }
    if (losses) drawLosses(context, losses);
    drawFits(context, runData.events);
    Object.assign(plot, { marks: [], blocks: [] });
    runsOf(store.state).forEach((data, place) => {
      drawBlocks(context, data, domain, place);
      drawMarks(context, data, domain, place);
    });
    if (step !== null) {
      const x = plot.scale(step);
      drawLine(context, [[x, TOP - 6], [x, axisY()]], themeColor("--cursor"), 1.5);
    }
    const selected = [...plot.marks, ...plot.blocks].find((mark) => mark.row.key === chosen);
    if (selected) {
      context.beginPath();
      context.arc(selected.x, selected.y, 9, 0, 2 * Math.PI);
      context.strokeStyle = themeColor("--cursor");
      context.lineWidth = 2;
      context.stroke();
    }
    gestures.drawBrush(context, TOP, axisY());
    context.restore();
    const canvas = surface.canvas;
    canvas.setAttribute("aria-valuemax", last);
    canvas.setAttribute("aria-valuenow", step ?? 0);
    canvas.setAttribute("aria-valuetext", step === null ? "no step" : `step ${step}`);
  }

  function drawFits(context, events) {
    for (const event of events) {
      if (event.kind !== "train_begin" || !(event.fit > 1)) continue;
      const x = Math.round(plot.scale(event.step)) + 0.5;
      drawLine(context, [[x, TOP], [x, axisY()]], themeColor("--axis"), 1, [1, 3]);
      context.textAlign = "left";
      context.fillStyle = themeColor("--muted");
      context.fillText(`fit ${event.fit}`, x + 3, TOP + 6);
    }
  }

  // Draws blocks for skipped steps that the log does not list, with their number.
  function drawBlocks(context, data, domain, place) {
    for (const row of data.told) {
      const { count, first_step: first, last_step: last } = data.events[row.events[0]];
      if (row.kind !== "skipped_steps_not_kept" || first === undefined) continue;
      if (last < domain[0] || first > domain[1]) continue;
      const [start, end] = [first, last].map(plot.scale);
      const left = Math.max(Math.min(start, end - 2), LEFT);
      const right = Math.min(end, plot.right);
      const lane = lanesTop() + LANES.indexOf("skipped") * laneHeight();
      const y = lane + (place + 0.5) * LANE_HEIGHT;
      plot.blocks.push({ row, step: first, left, right, x: (left + right) / 2, y });
      context.fillStyle = themeColor("--skip");
      context.fillRect(left, y - 6, right - left, 12);
      const label = `${formatInteger(count)} skipped`;
      if (context.measureText(label).width + 6 > right - left) continue;
      context.textAlign = "center";
      context.fillStyle = themeColor("--card");
      context.fillText(label, (left + right) / 2, y);
    }
  }

  function drawMarks(context, data, domain, place) {
    const taken = new Set();
    const drawn = [];
    const steps = data.told.flatMap((row) => row.steps.map((step) => ({ row, step })));
    for (const { row, step } of steps) {
      const lane = LANES.indexOf(row.lane);
      // `drawBlocks` has already drawn the skipped steps that the log does not list.
      if (lane < 0 || row.kind === "skipped_steps_not_kept") continue;
      if (step < domain[0] || step > domain[1]) continue;
      const x = plot.scale(step);
      const { shape, color } = LEVELS[row.level];
      // Thousands of skipped steps share a few hundred pixels, so draw only one mark per pixel.
      const spot = `${lane} ${Math.round(x)} ${shape}`;
      if (taken.has(spot)) continue;
      taken.add(spot);
      const y = lanesTop() + lane * laneHeight() + (place + 0.5) * LANE_HEIGHT;
      const mark = { row, step, x, y, shape, color };
      plot.marks.push(mark);
      if (shape === "triangle" && !place) {
        drawLine(context, [[x, TOP], [x, mark.y]], themeColor(color), 1, [2, 3]);
      }
      drawn.push(mark);
    }
    // Draw severe marks last, so that no other mark hides them.
    const isSevere = ({ shape }) => shape === "triangle";
    for (const { shape, x, y, color } of drawn.sort((one, two) => Number(isSevere(one)) - Number(isSevere(two)))) {
      drawMarker(context, shape, x, y, themeColor(color));
    }
  }

  function updateTable() {
    const step = ["step", formatInteger];
    const heads = ["run", "optimizer", step, ["loss scale", formatScale], ["skipped so far", formatInteger]];
    table.fill(runsOf(store.state).some((data) => data.scale.length) ?
      () => [heads, runsOf(store.state).flatMap((data) => data.scale.flatMap((line) => line.steps.map((at, index) => {
        return [data.run, line.optimizer, at, line.scale[index], line.skipped[index]];
      })))] : null);
    losses.fill(runsOf(store.state).some((data) => data.loss) ?
      () => [["run", step, ["loss", formatNumber]], runsOf(store.state).flatMap(({ run, loss }) => {
        return (loss?.steps ?? []).map((at, index) => [run, at, loss.values[index]]);
      })] : null);
  }

  function updateLegend() {
    const { runData, compareData, zoom } = store.state;
    const items = (runData?.scale ?? []).map((line, index) => {
      const color = LINE_COLORS[index % LINE_COLORS.length];
      return legendItem("━", color, nameOfLine(line, runData, compareData));
    });
    if (compareData?.scale.length) {
      const name = shortRun(compareData.run, runData.run);
      items.push(legendItem("- -", "--compare", `loss scale of ${name}`));
    }
    runsOf(store.state).forEach((data, place) => {
      if (!data.loss) return;
      const other = place ? runData : compareData;
      const whose = other ? ` of ${shortRun(data.run, other.run)}` : "";
      const { glyph, color } = lossStyle(place);
      const item = legendItem(glyph, color, `loss${whose}`);
      item.title = WHY_READINGS;
      items.push(item);
    });
    const rows = runsOf(store.state).flatMap(({ told }) => told);
    /** @type {Set<string>} */
    const present = new Set(rows.filter(({ lane }) => lane).map(({ level }) => level));
    for (const [level, { glyph, color, label }] of Object.entries(LEVELS)) {
      if (present.has(level)) items.push(legendItem(glyph, color, label));
    }
    legend.replaceChildren(...items);
    reset.hidden = !zoom;
  }

  surface.canvas.addEventListener("keydown", (event) => {
    const { runData, step } = store.state;
    if (!runData) return;
    const size = event.shiftKey ? Math.max(1, Math.round(runData.last_step / 50)) : 1;
    // If no step is chosen, Right begins at the first step and Left at the last step.
    const from = step ?? 0;
    const targets = {
      ArrowLeft: step === null ? runData.last_step : step - size,
      ArrowRight: step === null ? 0 : step + size,
      Home: 0, End: runData.last_step,
    };
    if (event.key in targets) {
      event.preventDefault();
      chooseStep(store, clamp(targets[event.key], 0, runData.last_step));
    } else if (event.key === "Enter" && plot.marks.length) {
      const away = (mark) => Math.abs(mark.step - from);
      const { row, step: at } = plot.marks.reduce((best, mark) => (away(mark) < away(best) ? mark : best));
      chooseEvent(store, row, at);
    }
  });

  store.on(["runData", "compareData", "zoom"], updateLegend);
  store.on(["runData", "compareData"], () => {
    resize(body.clientHeight);
    updateTable();
  });
  store.on(
    ["runData", "compareData", "zoom", "step", "event", "theme"], surface.redraw,
  );
  return root;
}
