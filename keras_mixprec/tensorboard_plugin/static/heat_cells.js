import { element } from "./dom.js";
import { GRAVEST } from "./heat_rows.js";
import { levelColor, valueColor } from "./palette.js";

const BAD_WIDTH = 3;
// Between two readings, of 255.
const PALE = 96;

/**
 * The rows that are in view, a pixel for each cell. What was not measured is pale, and left
 * out where the metric counts: that none is infinite says nothing of other steps.
 * @param {any[]} rows What `poolRows` returned of each, with `wider` and `unread` by pixel.
 * @param {string} kind The metric's.
 */
export function pictureOfCells(rows, kind) {
  const size = rows[0].values.length;
  const picture = element("canvas", { width: size, height: rows.length });
  const pen = picture.getContext("2d");
  const image = pen.createImageData(size, rows.length);
  const { data } = image;
  rows.forEach(({ values, ranks, wider, unread }, index) => {
    for (let pixel = 0; pixel < size; pixel += 1) {
      if (unread[pixel] && kind === "count") continue;
      const color = GRAVEST[ranks[pixel]] === "input" ? levelColor("input") :
        valueColor(kind, values[pixel], wider(pixel));
      if (!color) continue;
      const at = (index * size + pixel) * 4;
      [data[at], data[at + 1], data[at + 2]] = color;
      data[at + 3] = unread[pixel] ? PALE : 255;
    }
  });
  pen.putImageData(image, 0, 0);
  return picture;
}

/**
 * Where a row is of a level, of what was measured.
 * @returns {number[][]} First pixel and width of each stretch.
 */
export function stretchesOf({ ranks, unread }, level) {
  const rank = GRAVEST.indexOf(level);
  const found = [];
  for (let pixel = ranks.indexOf(rank); pixel >= 0; pixel = ranks.indexOf(rank, pixel + 1)) {
    if (unread[pixel]) continue;
    const start = pixel;
    while (ranks[pixel + 1] === rank && !unread[pixel + 1]) pixel += 1;
    // One non-finite step stays visible however narrow it is.
    found.push([start, Math.max(level === "beyond" ? 1 : BAD_WIDTH, pixel - start + 1)]);
  }
  return found;
}
