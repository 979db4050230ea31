import { element } from "./dom.js";
import { ANY_PASSED, BAD_INPUT } from "./metrics.js";
import { cssColor, LEGENDS, valueColor } from "./palette.js";

function swatch(level, label) {
  const color = element("span", { class: `swatch ${level}`, "aria-hidden": "true" });
  return element("li", {}, color, label);
}

/**
 * @param {HTMLElement} parent
 * @param {HTMLElement} others The parent of the entries that are not on the color scale.
 * @param {{kind: () => string | undefined, format: () => string, isAsIf: () => boolean, hasBadInput: () => boolean,
 *   hasPassed: () => boolean, hasRoomy: () => boolean}} of The heatmap. `kind` is the kind of its metric, and `format` the
 *   format that headroom refers to. `isAsIf` is true if no layer ever computed in that format. `hasBadInput`
 *   is true if any reading is on a non-finite batch, `hasPassed` if any is non-finite or zero because of another layer, and
 *   `hasRoomy` if any has a dtype of larger range.
 */
export function createHeatLegend(parent, others, of) {
  function redraw() {
    const kind = of.kind();
    const wider = `beyond ${of.format()}, computed in a wider format`;
    const shown = [
      ["zero", "all zero", kind === "headroom" || kind === "share"],
      ["beyond", wider, kind === "headroom"],
      ["roomy", "in a wider format, with over 100 bits left", kind === "headroom" && of.hasRoomy()], ["passed", ANY_PASSED, of.hasPassed()],
      ["input", BAD_INPUT, of.hasBadInput()],
    ].filter(([, , isShown]) => isShown);
    drawScale(kind);
    others.hidden = !shown.length;
    others.replaceChildren(...shown.map(([level, label]) => swatch(level, label)));
  }

  function drawScale(kind) {
    const { stops, labels, unit } = LEGENDS[kind] ?? { stops: [], labels: [], unit: "" };
    const asIf = kind === "headroom" && of.isAsIf() ? ` if ${of.format()}` : "";
    parent.replaceChildren(unit + asIf, ...stops.map((stop, place) => {
      const color = element("i");
      color.style.background = cssColor(valueColor(kind, stop));
      return element("div", {}, color, labels[place]);
    }));
  }

  return { redraw };
}
