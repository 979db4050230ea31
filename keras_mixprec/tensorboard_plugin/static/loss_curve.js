import { drawAxisName, drawLine, drawMarker } from "./canvas.js";
import { formatInteger, formatNumber, toNumber } from "./format.js";
import { linearScale, niceTicks, valueAtStep } from "./scales.js";
import { themeColor } from "./theme.js";

// The width of the loss axis, on the right of the plot.
export const LOSS_AXIS = 58;
// The loss axis spans at least this share of the loss. Otherwise a change of 1% would look like a
// large fall.
const LEAST_SPAN = 0.1;
const TICKS = 4;

/** Returns the style of a run's loss curve, and its sample in the legend. */
export function lossStyle(place) {
  return place ? { color: "--loss", glyph: "- -", width: 1.75, dash: [5, 3] } :
    { color: "--loss", glyph: "━", width: 1.25, dash: [] };
}

export const WHY_READINGS = "The monitor reads the loss at most every update_freq steps. A value is " +
  "the mean since the previous reading. Marks along the top show where it was NaN or infinite.";

/**
 * Returns the ranges of steps in which a loss is not finite. A range begins at the reading
 * before the first non-finite reading.
 * @param {{steps: number[], values: (number | string | null)[]} | null | undefined} loss
 * @returns {[number, number][]}
 */
function lossGaps(loss) {
  const gaps = [];
  (loss?.steps ?? []).forEach((step, index) => {
    if (Number.isFinite(toNumber(loss.values[index]))) return;
    const before = loss.steps[index - 1] ?? 0;
    if (gaps.at(-1)?.[1] === before) gaps.at(-1)[1] = step;
    else gaps.push([before, step]);
  });
  return gaps;
}

/**
 * Returns the finite stretches of a loss, each a list of steps and losses.
 * @param {{steps: number[], values: (number | string | null)[]} | null | undefined} loss
 * @returns {[number, number][][]}
 */
export function finiteStretches(loss) {
  const stretches = [[]];
  (loss?.steps ?? []).forEach((step, index) => {
    const value = toNumber(loss.values[index]);
    if (Number.isFinite(value)) stretches.at(-1).push([step, value]);
    else stretches.push([]);
  });
  return stretches.filter((stretch) => stretch.length);
}

/**
 * Returns the loss at a step in words, with the last step of its mean. The first mean also
 * covers the steps before the curve begins.
 * @param {{steps: number[], values: (number | string | null)[]} | null | undefined} loss
 * @param {number} step
 * @returns {string | null}
 */
export function lossInWords(loss, step) {
  if (!loss?.steps.length) return null;
  const until = valueAtStep(loss.steps, loss.steps, step);
  return `${formatNumber(valueAtStep(loss.steps, loss.values, step))}, ` +
    `mean up to step ${formatInteger(until)}`;
}

/**
 * Returns the range of the losses in view. The first losses of a run are often much larger.
 * @returns {[number, number] | null}
 */
function lossRange(curves, domain) {
  let [low, high] = [Infinity, -Infinity];
  for (const [step, value] of curves.flat(2)) {
    if (step < domain[0] || step > domain[1]) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : null;
}

/**
 * Returns the ends of the loss axis.
 * @param {[number, number]} range
 * @returns {[number, number]}
 */
function lossAxis([low, high]) {
  const least = LEAST_SPAN * Math.max(Math.abs(low), Math.abs(high));
  const more = Math.max(0, least - (high - low)) / 2;
  return [low - more, high + more];
}

// Returns the loss curves of the runs in a plot. If any loss is finite, they share an axis that
// fits all losses. Returns null if no run has a loss.
export function placeLosses(runs, { scale, left, right, top, bottom }) {
  const known = runs.map((data) => data.loss);
  if (!known.some(Boolean)) return null;
  const curves = known.map(finiteStretches);
  const range = lossRange(curves, [left, right].map(scale.invert));
  const axis = range && lossAxis(range);
  const y = axis && linearScale(axis, [bottom - 8, top + 8]);
  const gaps = known.map(lossGaps);
  return { curves, gaps, axis, scale, right, top, y, middle: (top + bottom) / 2 };
}

function drawGaps(context, { gaps, scale, top }) {
  gaps.forEach((own, place) => {
    const y = top + 2 + 5 * place;
    for (const [from, until] of own) {
      const [left, right] = [from, until].map(scale);
      const { color, dash } = lossStyle(place);
      drawLine(context, [[left, y], [right, y]], themeColor(color), 3, dash);
    }
  });
}

export function drawLosses(context, losses) {
  const { curves, axis, scale, y } = losses;
  drawGaps(context, losses);
  if (!axis) return;
  curves.forEach((stretches, place) => {
    for (const stretch of stretches) {
      const points = stretch.map(([step, value]) => [scale(step), y(value)]);
      const { color, width, dash } = lossStyle(place);
      drawLine(context, points, themeColor(color), width, dash);
      // Draw a single reading as a circle, because a line needs two readings.
      if (points.length === 1) drawMarker(context, "circle", ...points[0], themeColor(color));
    }
  });
}

export function drawLossAxis(context, { axis, right, y, middle }) {
  if (!axis) return;
  context.textAlign = "left";
  for (const tick of niceTicks(axis[0], axis[1], TICKS, 0)) {
    drawLine(context, [[right, y(tick)], [right + 4, y(tick)]], themeColor("--loss"));
    context.fillStyle = themeColor("--loss");
    context.fillText(formatNumber(tick), right + 7, y(tick));
  }
  drawAxisName(context, "loss", right + LOSS_AXIS - 6, middle, true);
}
