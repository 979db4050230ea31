import { clamp, zoomedDomain } from "./scales.js";
import { pointerIn } from "./canvas.js";
import { drawSoon } from "./frames.js";
import { themeColor } from "./theme.js";
import { hideTooltip } from "./tooltip.js";

const DRAG_STARTS = 5;

// Handles click, hover, drag to zoom and the zoom keys, for a canvas with steps on its x axis.
export function stepGestures(surface, plot, { onClick, onHover, onZoom, limits }) {
  const { canvas } = surface;
  let pressed = null;
  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !plot.scale) return;
    pressed = pointerIn(canvas, event).x;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!plot.scale) return;
    const at = pointerIn(canvas, event);
    if (pressed !== null && Math.abs(at.x - pressed) > DRAG_STARTS) {
      dragged = [pressed, at.x]
        .sort((one, other) => one - other)
        .map((x) => clamp(x, plot.left, plot.right));
      hideTooltip();
      surface.redraw();
    } else drawSoon(() => onHover(event, at));
  });
  canvas.addEventListener("pointerleave", () => drawSoon(hideTooltip));
  canvas.addEventListener("pointercancel", () => {
    pressed = dragged = null;
    surface.redraw();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (pressed === null) return;
    if (!dragged) onClick(pointerIn(canvas, event));
    else {
      const range = dragged.map(plot.scale.invert);
      if (range[1] - range[0] >= 1) onZoom(range);
    }
    pressed = dragged = null;
    surface.redraw();
  });
  canvas.addEventListener("dblclick", () => onZoom(null));
  canvas.addEventListener("keydown", (event) => {
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (!factor || !plot.scale) return;
    const domain = [plot.left, plot.right].map(plot.scale.invert);
    const center = plot.cursor ?? (domain[0] + domain[1]) / 2;
    onZoom(zoomedDomain(domain, center, factor, limits()));
  });
  return {
    drawBrush(context, top, bottom) {
      if (!dragged) return;
      context.fillStyle = themeColor("--brush");
      context.fillRect(dragged[0], top, dragged[1] - dragged[0], bottom - top);
    },
  };
}
