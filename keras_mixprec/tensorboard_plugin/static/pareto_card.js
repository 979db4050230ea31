import { createSurface, drawAxisName, drawLine, drawMarker, pointerIn } from "./canvas.js";
import { dataTable } from "./data_table.js";
import { card, element } from "./dom.js";
import { formatNumber, formatShare, listSome, plural } from "./format.js";
import { seenFirst } from "./frames.js";
import { decadesOf, trialsOf } from "./pareto.js";
import { exponentTicks, linearScale, nearestMark } from "./scales.js";
import { themeColor } from "./theme.js";
import { hideTooltip, showTooltip } from "./tooltip.js";

const AREA = { left: 64, right: 24, top: 22, axis: 34, height: 240 };
const NO_SEARCH = "This log has no search for the layers that need float32. " +
  "minimize_float32(model, x, y, log_dir=...) makes one, and logs what it tried.";

const errorInWords = (error) => (Number.isNaN(error) ? "not evaluated" :
  error === Infinity ? "not finite" : formatNumber(error));

export function createPareto(store) {
  const caption = element("p", { class: "hint" });
  const nothing = element("p", { class: "absent" }, NO_SEARCH);
  const box = element("div", { class: "canvas-box" });
  const surface = createSurface(box, { role: "img" }, draw);
  const table = dataTable("Trials");
  const root = card("pareto", "Error by share of FLOPs in 16 bits", [], caption, nothing, box,
    table.root);
  root.classList.add("wide");
  let trials = [];
  let marks = [];

  function update() {
    const found = store.state.runData?.trade_off;
    trials = trialsOf(found);
    const any = trials.length > 0;
    nothing.hidden = any;
    box.hidden = caption.hidden = !any;
    table.fill(any ? rowsOf : null);
    if (!any) return;
    const best = trials.filter(({ optimal }) => optimal);
    const infinite = trials.filter(({ error }) => error === Infinity);
    caption.textContent = `${plural(trials.length, "trial")}, ${best.length} of them Pareto-optimal ` +
      `(filled): none has more FLOPs in 16 bits and less error. Error: ${found.title}.` +
      (infinite.length ? ` Not finite: ${infinite.length} (triangles).` : "");
    surface.canvas.setAttribute("aria-label", caption.textContent);
    surface.setHeight(AREA.top + AREA.height + AREA.axis);
  }

  /** @returns {[any[], any[][]]} */
  function rowsOf() {
    return [[["FLOPs in 16 bits", formatShare], ["Error", errorInWords], "Pareto-optimal", "In float32"],
      trials.map(({ share, error, optimal, float32 }) => {
        return [share, error, optimal ? "yes" : "no",
          float32.join(", ") || "nothing"];
      })];
  }

  function draw(context, width) {
    const bottom = AREA.top + AREA.height;
    const [low, high] = decadesOf(trials);
    const x = linearScale([0, 1], [AREA.left, width - AREA.right]);
    const y = linearScale([low, high], [bottom - 8, AREA.top + 14]);
    for (const tick of exponentTicks(low, high, 8)) {
      drawLine(context, [[AREA.left, y(tick)], [width - AREA.right, y(tick)]], themeColor("--grid"));
      context.textAlign = "right";
      context.fillStyle = themeColor("--muted");
      context.fillText(formatNumber(10 ** tick), AREA.left - 6, y(tick));
    }
    drawLine(context, [[AREA.left, bottom], [width - AREA.right, bottom]], themeColor("--axis"));
    context.textAlign = "center";
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      context.fillStyle = themeColor("--muted");
      context.fillText(`${100 * share} %`, x(share), bottom + 12);
    }
    drawAxisName(context, "FLOPs in 16 bits", (AREA.left + width) / 2, bottom + 27);
    drawAxisName(context, "error", 8, AREA.top + AREA.height / 2, true);
    const heightOf = (error) => (error === Infinity ? AREA.top :
      y(error > 0 ? Math.log10(error) : low));
    marks = trials.filter(({ error }) => !Number.isNaN(error)).map((trial) => {
      return { x: x(trial.share), y: heightOf(trial.error), trial };
    });
    const curve = marks.filter(({ trial }) => trial.optimal && trial.error < Infinity)
      .sort((one, other) => one.x - other.x);
    const corners = curve.flatMap((mark, at) => {
      return at ? [[curve[at - 1].x, mark.y], [mark.x, mark.y]] : [[mark.x, mark.y]];
    });
    drawLine(context, corners, themeColor("--line-1"), 1.5);
    for (const mark of marks) {
      const { optimal, error } = mark.trial;
      const color = themeColor(optimal ? "--line-1" : "--axis");
      drawMarker(context, error === Infinity ? "triangle" : "circle", mark.x, mark.y, color);
    }
  }

  surface.canvas.addEventListener("pointermove", (event) => {
    const mark = nearestMark(marks, pointerIn(surface.canvas, event), 12);
    if (!mark) return hideTooltip();
    const { share, error, float32 } = mark.trial;
    showTooltip(event, [
      `${formatShare(share)} of FLOPs in 16 bits, error ${errorInWords(error)}`,
      `in float32: ${listSome(float32, 8) || "nothing"}`,
    ]);
  });
  surface.canvas.addEventListener("pointerleave", hideTooltip);
  store.on(["runData"], seenFirst(root, update));
  store.on(["theme"], surface.redraw);
  return root;
}
