import { element } from "./dom.js";
import { seenFirst } from "./frames.js";
import { cssColor, levelColor } from "./palette.js";
import { themeColor } from "./theme.js";

export const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

export function createSurface(parent, attributes, draw) {
  const canvas = element("canvas", attributes);
  parent.append(canvas);
  // An observer sets the width, because reading the width from the page would force a layout.
  let width = 0;
  const paint = () => {
    const height = parseInt(canvas.style.height, 10);
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    const size = [Math.round(width * ratio), Math.round(height * ratio)];
    const context = canvas.getContext("2d");
    if (canvas.width === size[0] && canvas.height === size[1]) {
      context.clearRect(0, 0, width, height);
    } else {
      // Do not set an unchanged size again, because setting the size takes up to 10 ms.
      canvas.style.width = `${width}px`;
      [canvas.width, canvas.height] = size;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.font = FONT;
      context.textBaseline = "middle";
    }
    context.save();
    draw(context, width, height);
    context.restore();
  };
  const redraw = seenFirst(parent, paint);
  new ResizeObserver(([report]) => {
    width = Math.round(report.contentRect.width);
    redraw();
  }).observe(parent);
  return {
    canvas,
    redraw,
    setHeight(height) {
      canvas.style.height = `${height}px`;
      redraw();
    },
  };
}

export function drawLine(context, points, color, width = 1, dash = []) {
  context.beginPath();
  points.forEach(([x, y], index) => {
    if (index) context.lineTo(x, y);
    else context.moveTo(x, y);
  });
  context.strokeStyle = color;
  context.lineWidth = width;
  context.setLineDash(dash);
  context.stroke();
  context.setLineDash([]);
}

const OUTLINES = {
  triangle: [[0, -5.5], [5.5, 4.5], [-5.5, 4.5]],
  up: [[0, -5], [5, 4], [-5, 4]],
  down: [[-5, -4], [5, -4], [0, 5]],
  diamond: [[0, -5.5], [5, 0], [0, 5.5], [-5, 0]],
};

export function drawMarker(context, shape, x, y, color) {
  context.fillStyle = color;
  context.strokeStyle = themeColor("--card");
  context.lineWidth = 1;
  if (shape === "tick") {
    context.fillRect(x - 1, y - 6, 2, 12);
    return;
  }
  context.beginPath();
  if (shape === "circle") context.arc(x, y, 4, 0, 2 * Math.PI);
  else {
    OUTLINES[shape].forEach(([dx, dy], index) => {
      if (index) context.lineTo(x + dx, y + dy);
      else context.moveTo(x + dx, y + dy);
    });
    context.closePath();
  }
  if (shape === "up") {
    context.fillStyle = themeColor("--card");
    context.strokeStyle = color;
    context.lineWidth = 2;
  }
  context.fill();
  context.stroke();
}

const HATCHES = {
  bad: "rgba(0,0,0,0.55)", input: "rgba(0,0,0,0.45)", beyond: "rgba(0,0,0,0.28)",
  passed: "rgba(213,94,0,0.75)", zero: "rgba(255,255,255,0.9)",
};

const tiles = new Map();

export function hatchPattern(context, level) {
  if (!tiles.has(level)) tiles.set(level, hatchTile(level));
  return context.createPattern(tiles.get(level), "repeat");
}

function hatchTile(level) {
  const tile = document.createElement("canvas");
  tile.width = 5;
  tile.height = 5;
  const pen = tile.getContext("2d");
  pen.fillStyle = cssColor(levelColor(level));
  pen.fillRect(0, 0, 5, 5);
  pen.strokeStyle = HATCHES[level];
  pen.lineWidth = 1.2;
  for (const shift of [-5, 0, 5]) {
    pen.beginPath();
    pen.moveTo(shift, 5);
    pen.lineTo(shift + 5, 0);
    pen.stroke();
  }
  return tile;
}

/**
 * Draws the step axis below a chart.
 * @param {any[][]} ticks Pairs of a position and a label.
 */
export function drawStepAxis(context, ticks, { start, y, top = null }) {
  drawAxisName(context, "step", start - 24, y + 12);
  context.textAlign = "center";
  for (const [place, label] of ticks) {
    const x = Math.round(place) + 0.5;
    if (top !== null) drawLine(context, [[x, top], [x, y]], themeColor("--grid"));
    drawLine(context, [[x, y], [x, y + 4]], themeColor("--axis"));
    context.fillStyle = themeColor("--muted");
    context.fillText(label, x, y + 12);
  }
}

/**
 * Draws the lines of a grid, with a label at the left end of each.
 * @param {number[]} ticks
 * @param {{y: (tick: number) => number, left: number, right: number, label: (tick: number) => string}} place
 */
export function drawRows(context, ticks, place) {
  const { y, left, right, label } = place;
  context.textAlign = "right";
  for (const tick of ticks) {
    drawLine(context, [[left, y(tick)], [right, y(tick)]], themeColor("--grid"));
    context.fillStyle = themeColor("--muted");
    context.fillText(label(tick), left - 7, y(tick));
  }
}

export function drawAxisName(context, name, x, y, upright = false) {
  context.save();
  context.translate(x, y);
  if (upright) context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillStyle = themeColor("--muted");
  context.fillText(name, 0, 0);
  context.restore();
}

export function pointerIn(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}
