import { hatchPattern } from "./canvas.js";
import { element } from "./dom.js";
import { GRAVEST } from "./heat_rows.js";
import { levelColor, valueColor } from "./palette.js";
import { changedAt } from "./precision.js";

const BAD_WIDTH = 3;
const HARMLESS = ["beyond", "zero"];
// The height of the mark for an overflow inside a layer, as a share of the row's height.
const STRIP = 0.4;

/**
 * Draws the visible rows with one pixel per cell.
 * @param {any[]} rows Results of `poolRows`, with the wider dtype by pixel in `wider`.
 * @param {string} kind The kind of the metric.
 */
export function pictureOfCells(rows, kind) {
  const size = rows[0].values.length;
  const picture = element("canvas", { width: size, height: rows.length });
  const pen = picture.getContext("2d");
  const image = pen.createImageData(size, rows.length);
  const { data } = image;
  rows.forEach(({ values, ranks, wider }, index) => {
    for (let pixel = 0; pixel < size; pixel += 1) {
      const level = GRAVEST[ranks[pixel]];
      const color = level === "input" || level === "passed" ? levelColor(level) :
        valueColor(kind, values[pixel], wider(pixel));
      if (!color) continue;
      const at = (index * size + pixel) * 4;
      [data[at], data[at + 1], data[at + 2]] = color;
      data[at + 3] = 255;
    }
  });
  pen.putImageData(image, 0, 0);
  return picture;
}

/**
 * Returns the stretches of a level in a row.
 * @returns {number[][]} The first pixel and the width of each stretch.
 */
export function stretchesOf({ ranks }, level) {
  const rank = GRAVEST.indexOf(level);
  const found = [];
  for (let pixel = ranks.indexOf(rank); pixel >= 0; pixel = ranks.indexOf(rank, pixel + 1)) {
    const start = pixel;
    while (ranks[pixel + 1] === rank) pixel += 1;
    // A bad stretch gets a minimum width, so that a single step stays visible.
    found.push([start, Math.max(HARMLESS.includes(level) ? 1 : BAD_WIDTH, pixel - start + 1)]);
  }
  return found;
}

/**
 * Marks an overflow inside a layer along the lower edge of its row, from the step at which it
 * was found. The hatching changes when a wider dtype repairs the overflow.
 * @param {{is_open: boolean, step: number}} inside The overflow.
 * @param {{left: number, right: number, scale: (step: number) => number}} plot
 * @param {{top: number, height: number}} place The place of the row.
 */
export function drawInside(context, layer, inside, plot, place) {
  const { top, height } = place;
  const inView = (x) => Math.min(Math.max(x, plot.left), plot.right);
  const found = inView(plot.scale(inside.step));
  const held = inside.is_open ? plot.right : inView(plot.scale(changedAt(layer)));
  const strip = Math.max(2, Math.round(height * STRIP));
  /** @type {[string, number, number][]} */
  const stretches = [["bad", found, held], ["beyond", Math.max(found, held), plot.right]];
  for (const [level, start, end] of stretches) {
    if (end <= start) continue;
    context.fillStyle = hatchPattern(context, level);
    context.fillRect(start, top + height - strip, end - start, strip);
  }
}
