import { createSurface, hatchPattern } from "./canvas.js";
import { element } from "./dom.js";
import { BAD_INPUT } from "./metrics.js";
import { ANY_PASSED } from "./passed_on.js";
import { alarmLevel, cssColor, LEGENDS, valueColor } from "./palette.js";
import { themeColor } from "./theme.js";

const LEGEND_TOP = 30;
const LEGEND_HEIGHT = 190;
const LEGEND_BAR = 14;

function between(from, until, part, logarithmic) {
  if (logarithmic) return from * (until / from) ** part;
  return from + (until - from) * part;
}

function swatch(level, label) {
  const color = element("span", { class: `swatch ${level}`, "aria-hidden": "true" });
  return element("li", {}, color, label);
}

/**
 * @param {HTMLElement} parent
 * @param {HTMLElement} others What is not on the scale.
 * @param {{kind: () => string | undefined, format: () => string, isAsIf: () => boolean, hasBadInput: () => boolean,
 *   hasPassed: () => boolean, hasRoomy: () => boolean, isSparse: () => boolean}} of What is shown: the metric's kind, the format that is referred
 *   to, whether no layer ever computed in it, whether readings are left out because the batch was not finite, whether any
 *   is not finite or all zero through no fault of its layer, whether any computes in a dtype of more range than the format's, and whether there are steps between the readings.
 */
export function createHeatLegend(parent, others, of) {
  const surface = createSurface(parent, {
    role: "img", "aria-label": "Colour scale of the heatmap",
  }, (context) => {
    const kind = of.kind();
    if (!kind) return;
    const { stops, labels, unit } = LEGENDS[kind];
    const band = LEGEND_HEIGHT / (stops.length - 1);
    const hatch = hatchPattern(context, "bad");
    for (let y = 0; y < LEGEND_HEIGHT; y += 1) {
      const index = Math.floor(y / band);
      const part = (y + 0.5) / band - index;
      const logarithmic = kind === "share" || kind === "error";
      const value = between(stops[index], stops[index + 1], part, logarithmic);
      const bad = alarmLevel(kind, value) === "bad";
      context.fillStyle = bad ? hatch : cssColor(valueColor(kind, value));
      context.fillRect(0, LEGEND_TOP + y, LEGEND_BAR, 1.5);
    }
    context.textAlign = "left";
    context.fillStyle = themeColor("--muted");
    context.fillText(unit, 0, 8);
    if (kind === "headroom" && of.isAsIf()) context.fillText(`if ${of.format()}`, 0, 20);
    labels.forEach((label, index) => {
      const y = LEGEND_TOP + index * band;
      context.fillText(label, LEGEND_BAR + 6, y);
    });
  });
  surface.setHeight(LEGEND_TOP + LEGEND_HEIGHT + 14);

  function redraw() {
    const kind = of.kind();
    const wider = `beyond ${of.format()}, computed in a wider format`;
    const shown = [
      ["zero", "all zero", kind === "headroom" || kind === "share"],
      ["beyond", wider, kind === "headroom"],
      ["roomy", "in a wider format, with over 100 bits left", kind === "headroom" && of.hasRoomy()], ["passed", ANY_PASSED, of.hasPassed()],
      ["input", BAD_INPUT, of.hasBadInput()],
      kind === "count" ? ["blank", "not measured", of.isSparse()] :
        ["pale", "not measured: as the nearest reading", of.isSparse()],
    ].filter(([, , isShown]) => isShown);
    others.hidden = !shown.length;
    others.replaceChildren(...shown.map(([level, label]) => swatch(level, label)));
    surface.redraw();
  }

  return { redraw };
}
