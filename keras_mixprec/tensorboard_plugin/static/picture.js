import { hatchPattern } from "./canvas.js";
import { element } from "./dom.js";
import { themeColor } from "./theme.js";

const EDGE = 12;
const LINE = 18;
const HATCHED = ["beyond", "zero", "passed", "input"];
const FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

// What the card says of its picture: title, runs, what was chosen in it, and its caption.
function linesOf(root, runs) {
  const chosen = [...root.querySelectorAll(".card-head select")].map((select) => {
    return select.selectedOptions[0]?.text ?? "";
  });
  const pressed = [...root.querySelectorAll(".segments [aria-pressed=true]")]
    .map((button) => button.textContent);
  const caption = root.querySelector(".hint:not([hidden])")?.textContent ?? "";
  return [
    [root.querySelector("h2").textContent, ...pressed, ...chosen].filter(Boolean).join(": "),
    runs.join(" and "), caption,
  ].filter(Boolean);
}

// The keys that a page has beside a canvas: a glyph or a colour, and what it stands for.
function keysOf(root) {
  const keys = root.querySelectorAll(".legend-item, .legend .key, .swatches li");
  return [...keys].filter((key) => key.offsetParent).map((key) => {
    const [mark] = key.children;
    const { color, backgroundColor } = getComputedStyle(mark);
    const glyph = mark.textContent;
    return {
      glyph, color: glyph ? color : backgroundColor, text: key.textContent.slice(glyph.length),
      hatched: HATCHED.find((level) => mark.classList.contains(level)),
    };
  });
}

function drawKeys(pen, keys, left, top, width) {
  let [x, y] = [left, top];
  for (const { glyph, color, text, hatched } of keys) {
    const size = 22 + pen.measureText(text).width + 14;
    if (x > left && x + size > left + width) [x, y] = [left, y + LINE];
    pen.fillStyle = hatched ? hatchPattern(pen, hatched) : color;
    if (glyph) pen.fillText(glyph, x, y + LINE / 2);
    else pen.fillRect(x, y + LINE / 2 - 5, 14, 10);
    pen.fillStyle = themeColor("--muted");
    pen.fillText(text, x + 22, y + LINE / 2);
    x += size;
  }
  return y + LINE;
}

/**
 * A card as a picture: what it is of, its canvases where the page has them, and their keys.
 * @param {HTMLElement} root
 * @param {HTMLCanvasElement[]} canvases
 * @param {string[]} runs Names of the runs that it shows.
 */
export function pictureOf(root, canvases, runs) {
  const ratio = window.devicePixelRatio || 1;
  const boxes = canvases.map((canvas) => canvas.getBoundingClientRect());
  const left = Math.min(...boxes.map((box) => box.left));
  const top = Math.min(...boxes.map((box) => box.top));
  const width = Math.max(...boxes.map((box) => box.right)) - left;
  const height = Math.max(...boxes.map((box) => box.bottom)) - top;
  const [lines, keys] = [linesOf(root, runs), keysOf(root)];
  const head = EDGE + lines.length * LINE;
  const picture = element("canvas");
  picture.width = Math.round((width + 2 * EDGE) * ratio);
  // Each key may need a line of its own.
  picture.height = Math.round((head + height + EDGE + keys.length * LINE) * ratio);
  const pen = picture.getContext("2d");
  pen.scale(ratio, ratio);
  pen.fillStyle = themeColor("--card");
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.textBaseline = "middle";
  lines.forEach((line, index) => {
    pen.font = index ? `12px ${FONTS}` : `600 14px ${FONTS}`;
    pen.fillStyle = themeColor(index ? "--muted" : "--ink");
    pen.fillText(line, EDGE, EDGE + (index + 0.5) * LINE, width);
  });
  pen.font = `12px ${FONTS}`;
  canvases.forEach((canvas, index) => {
    const { left: x, top: y, width: wide, height: high } = boxes[index];
    pen.drawImage(canvas, EDGE + x - left, head + y - top, wide, high);
  });
  const bottom = drawKeys(pen, keys, EDGE, head + height + 4, width);
  return cut(picture, Math.min(picture.height, Math.round((bottom + EDGE) * ratio)));
}

function cut(picture, height) {
  const rest = element("canvas", { width: picture.width, height });
  rest.getContext("2d").drawImage(picture, 0, 0);
  return rest;
}
