import { chooseStep } from "./actions.js";
import {
  createSurface, drawAxisName, drawLine, drawMarker, drawRows, drawStepAxis, pointerIn,
} from "./canvas.js";
import { courseOf, headroomOfPart } from "./course.js";
import { dataTable } from "./data_table.js";
import { card, element, legendItem } from "./dom.js";
import { formatInteger, formatNumber, formatPower, momentInWords, plural, readable } from "./format.js";
import { seenFirst } from "./frames.js";
import { clamp, exponentTicks, linearScale } from "./scales.js";
import { themeColor } from "./theme.js";
import { stepTicks } from "./step_axis.js";
import { hideTooltip, showTooltip } from "./tooltip.js";
import { histogramLayer, whyShown } from "./wanted.js";

// The margins of the plot in pixels. The names of the limits are in the right margin.
const PLACE = { left: 54, right: 100, top: 12, axis: 30 };
// The minimum and maximum height of the plot. Between them, the plot fills the height of the card
// next to it.
const HEIGHTS = [260, 480];
/** @type {["largest" | "median" | "smallest", string, number][]} */
const LINES = [
  ["largest", "--line-1", 2], ["median", "--line-2", 1.5], ["smallest", "--line-3", 1.5],
];
const NOT_FINITE = "infinite or NaN";
const NO_COURSE = "No range of this part of the layer: it was not measured, or all its numbers are zero. " +
  "MixPrecMonitor measures ranges every probe_every steps, within max_overhead of the time.";

function limitsOf(format) {
  return [
    ["maximum", format.maximum_bits, "--bad"], ["smallest normal", format.normal_exponent, "--warning"],
    ["smallest", format.subnormal_exponent, "--muted"],
  ];
}

function inPowers(bits) {
  return `2^${formatNumber(Number(bits.toFixed(1)))}`;
}

export function createCourse(store) {
  const caption = element("p", { class: "hint" });
  const nothing = element("p", { class: "absent" });
  const legend = element("p", { class: "legend" });
  const box = element("div", { class: "canvas-box" });
  const surface = createSurface(box, { role: "img", tabindex: "0" }, draw);
  const table = dataTable("Range");
  const root = card("course", "Range by step", [], caption, nothing, box, legend,
    table.root);
  root.classList.add("wide");
  let shown = null;
  let height = HEIGHTS[0];
  const others = PLACE.top + PLACE.axis;
  box.style.minHeight = `${others + height}px`;
  const resize = (room) => {
    height = clamp(room - others, ...HEIGHTS);
    surface.setHeight(others + height);
  };
  resize(0);
  new ResizeObserver(([{ contentRect }]) => resize(Math.floor(contentRect.height))).observe(box);

  function current() {
    const { runData, histogram, layer, part, awaited } = store.state;
    const name = layer ?? histogramLayer(store.state);
    if (!runData?.format || name === null) return null;
    const { format } = runData;
    const fits = headroomOfPart(store.state);
    const isTaken = histogramLayer(store.state) === name && !awaited.histogram;
    const taken = isTaken ? histogram : null;
    const course = courseOf(fits, taken, name, format.maximum_bits);
    const isBad = (step) => runData.bad_input.includes(step);
    return {
      ...course, nonfinite: course.nonfinite.filter((step) => !isBad(step)),
      badInput: course.nonfinite.filter(isBad), name, format, last: runData.last_step, part,
    };
  }

  function update() {
    shown = current();
    const measured = shown && steps().length > 0;
    box.hidden = legend.hidden = !measured;
    nothing.hidden = Boolean(measured);
    nothing.textContent = measured ? "" : readable([NO_COURSE, store.state.runData?.withheld].filter(Boolean).join(" "));
    caption.textContent = shown ? sentenceOf(shown) : "";
    table.fill(measured ? rowsOf : null);
    if (!measured) return;
    legend.replaceChildren(...LINES.filter(([name]) => shown[name].length)
      .map(([name, color]) => legendItem("━", color, name)),
    ...shown.nonfinite.length ? [legendItem("▲", "--bad", NOT_FINITE)] : []);
    surface.canvas.setAttribute("aria-label", `Range by step. ${caption.textContent}`);
    surface.redraw();
  }

  function sentenceOf({ name, part, format, nonfinite, readings, badInput }) {
    const scaled = part === "gradient" ? ", loss scale included" : "";
    const lost = nonfinite.length ? ` Some are ${NOT_FINITE} in ${formatInteger(nonfinite.length)} of ${
      plural(readings, "reading")}, first ${momentInWords(nonfinite[0], "after")}.` : "";
    const left = badInput.length ? ` ${store.state.runData.left_out}` : "";
    return `${name}${whyShown(store.state)}, ${part}s${scaled}, against ${format.name}.${lost}${left}`;
  }

  /** @returns {[any[], any[][]]} */
  function rowsOf() {
    const { largest, median, smallest, nonfinite } = shown;
    const steps = new Map(nonfinite.map((step) => [step, [Infinity, null, null]]));
    [largest, median, smallest].forEach((points, place) => {
      for (const [step, bits] of points) {
        if (!steps.has(step)) steps.set(step, [null, null, null]);
        const cells = steps.get(step);
        cells[place] ??= bits;
      }
    });
    const rows = [...steps].sort(([one], [other]) => one - other)
      .map(([step, cells]) => [step, ...cells]);
    const write = (bits) => (bits === Infinity ? NOT_FINITE : inPowers(bits));
    return [["Step", ["Largest (log2)", write], ["Median (log2)", write], ["Smallest (log2)", write]], rows];
  }

  function draw(context, width) {
    if (!shown) return;
    const { format, last } = shown;
    const bottom = PLACE.top + height;
    const values = LINES.flatMap(([name]) => shown[name].map(([, bits]) => bits));
    const low = Math.min(format.subnormal_exponent, ...values) - 2;
    const high = Math.max(format.maximum_bits, ...values) + 2;
    const x = linearScale([0, Math.max(1, last)], [PLACE.left, width - PLACE.right]);
    const y = linearScale([low, high], [bottom, PLACE.top]);
    shown.scale = x;
    const [left, right] = [PLACE.left, width - PLACE.right];
    drawRows(context, exponentTicks(low, high, 9), { y, left, right, label: formatPower });
    drawAxisName(context, "magnitude", 8, PLACE.top + height / 2, true);
    drawStepAxis(context, stepTicks(x, [0, last], width / 90), { start: PLACE.left, y: bottom });
    for (const [label, bits, color] of limitsOf(format)) {
      drawLine(context, [[PLACE.left, y(bits)], [width - PLACE.right, y(bits)]],
        themeColor(color), 1, [2, 3]);
      context.textAlign = "left";
      context.fillStyle = themeColor("--muted");
      context.fillText(label, width - PLACE.right + 6, y(bits));
    }
    for (const [name, color, thick] of LINES) {
      const points = shown[name].map(([step, bits]) => [x(step), y(bits)]);
      if (points.length === 1) points.unshift([points[0][0] - 6, points[0][1]]);
      drawLine(context, points, themeColor(color), thick);
    }
    for (const step of shown.nonfinite) {
      drawMarker(context, "triangle", x(step), PLACE.top + 6, themeColor("--bad"));
    }
    const { step } = store.state;
    if (step !== null) {
      drawLine(context, [[x(step), PLACE.top], [x(step), bottom]], themeColor("--cursor"));
    }
  }

  function steps() {
    const drawn = LINES.flatMap(([name]) => shown[name].map(([step]) => step));
    return [...new Set([...drawn, ...shown.nonfinite])].sort((one, other) => one - other);
  }

  function nearest(event) {
    const at = shown?.scale?.invert(pointerIn(surface.canvas, event).x);
    if (at === undefined) return null;
    return steps().reduce((best, step) => {
      return best === null || Math.abs(step - at) < Math.abs(best - at) ? step : best;
    }, null);
  }

  surface.canvas.addEventListener("click", (event) => {
    const step = nearest(event);
    if (step !== null) chooseStep(store, step);
  });
  surface.canvas.addEventListener("pointermove", (event) => {
    const step = nearest(event);
    if (step === null) return;
    const lines = LINES.flatMap(([name]) => shown[name]
      .filter(([at]) => at === step).map(([, bits]) => `${name}: ${inPowers(bits)}`));
    const lost = shown.nonfinite.includes(step) ? [`some ${NOT_FINITE}`] : [];
    showTooltip(event, [`step ${formatInteger(step)}`, ...lost, ...lines]);
  });
  surface.canvas.addEventListener("pointerleave", hideTooltip);
  surface.canvas.addEventListener("keydown", (event) => {
    const ahead = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!ahead || !shown) return;
    event.preventDefault();
    const known = steps();
    const now = store.state.step;
    const next = ahead > 0 ? known.find((step) => now === null || step > now) :
      known.findLast((step) => now === null || step < now);
    if (next !== undefined) chooseStep(store, next);
  });
  store.on(
    ["runData", "histogram", "layer", "part", "heat", "partHeat"], seenFirst(root, update),
  );
  store.on(["theme", "step"], surface.redraw);
  return root;
}
