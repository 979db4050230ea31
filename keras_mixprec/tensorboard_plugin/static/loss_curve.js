import { drawLine } from "./canvas.js";
import { formatNumber, toNumber } from "./format.js";
import { linearScale } from "./scales.js";
import { themeColor } from "./theme.js";

/**
 * The stretches of a loss that are finite, each a list of steps and losses.
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

// What is in view decides the scale: the first steps of a run dwarf all others.
export function lossRange(curves, domain) {
  let [low, high] = [Infinity, -Infinity];
  for (const [step, value] of curves.flat(2)) {
    if (step < domain[0] || step > domain[1]) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : null;
}

// The losses of runs, the first solid, with the ends of their scale.
export function drawLosses(context, runs, { scale, left, right, top, bottom }) {
  const curves = runs.map((data) => finiteStretches(data.loss));
  const range = lossRange(curves, [left, right].map(scale.invert));
  if (!range) return;
  const y = linearScale(range, [bottom - 8, top + 8]);
  const color = themeColor("--loss");
  curves.forEach((stretches, place) => {
    for (const stretch of stretches) {
      const points = stretch.map(([step, value]) => [scale(step), y(value)]);
      // One reading between two gaps is seen as well.
      if (points.length === 1) points.push([points[0][0] + 2, points[0][1]]);
      drawLine(context, points, color, 1.25, place ? [2, 2] : []);
    }
  });
  context.textAlign = "right";
  context.fillStyle = color;
  // The line of the loss scale is not to cross the words out.
  context.strokeStyle = themeColor("--card");
  context.lineWidth = 4;
  for (const value of range[0] < range[1] ? range : [range[0]]) {
    // Below the end of a curve that falls, which would cross it out.
    const below = value === range[0] ? 8 : 0;
    const label = `loss ${formatNumber(value)}`;
    context.strokeText(label, right - 4, y(value) + below);
    context.fillText(label, right - 4, y(value) + below);
  }
}
