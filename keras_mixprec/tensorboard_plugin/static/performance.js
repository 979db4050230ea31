import { createSurface, drawLine } from "./canvas.js";
import { dataTable } from "./data_table.js";
import { card, element } from "./dom.js";
import { formatAmount } from "./format.js";
import { shortRun } from "./names.js";
import { linearScale, stepDomain } from "./scales.js";
import { comparison, valueOf } from "./summary.js";
import { themeColor } from "./theme.js";

const HEIGHT = 44;

export function createPerformance(store) {
  const line = element("p", { class: "against", hidden: true });
  const rows = element("tbody");
  const head = element("thead");
  const box = element("div", { class: "canvas-box" });
  const times = dataTable("Time of a step");
  const root = card("performance", "Speed", [], line,
    element("table", {}, head, rows), box, times.root);
  const surface = createSurface(box, {
    role: "img", "aria-label": "Time of a step, by steps",
  }, draw);
  surface.setHeight(HEIGHT);

  const runsOf = ({ runData, compareData }) => {
    return [runData, compareData].filter((data) => data?.performance);
  };

  function fill() {
    const { runData, compareData } = store.state;
    const known = runsOf(store.state);
    root.hidden = !known.length;
    if (!known.length) return;
    const text = known.length > 1 ? comparison(runData, compareData) : null;
    line.textContent = text ?? "";
    line.hidden = !text;
    head.replaceChildren(...compareData ? [headOf(known, runData)] : []);
    const figures = known[0].performance.figures.filter(({ name }) => {
      return known.some((data) => valueOf(data, name) !== null);
    });
    rows.replaceChildren(...figures.map(({ name, title, explanation, kind }) => {
      return element("tr", { "data-figure": name, title: explanation },
        element("th", { scope: "row" }, title),
        ...known.map((data) => {
          return element("td", { class: "number" }, formatAmount(valueOf(data, name), kind));
        }));
    }));
    times.fill(() => [["run", "step", "time of a step"], known.flatMap(timesOf)]);
    surface.redraw();
  }

  function timesOf({ run, performance: { steps, figures } }) {
    const { values, kind } = figures.find((figure) => figure.name === "step_time");
    return steps.map((step, index) => [run, step, formatAmount(values[index], kind)]);
  }

  function headOf(known, runData) {
    const names = known.map((data) => {
      const other = known.find((one) => one !== data);
      const compared = data !== runData;
      return element("th", {
        class: compared ? "of-run compared" : "of-run", scope: "col", title: data.run,
      }, shortRun(data.run, other?.run));
    });
    return element("tr", {}, element("td"), ...names);
  }

  function draw(context, width, height) {
    const { runData, compareData } = store.state;
    const known = runsOf(store.state);
    const last = Math.max(0, ...known.map((data) => data.last_step));
    const curves = known.map((data) => {
      const { steps, figures } = data.performance;
      const { values } = figures.find((figure) => figure.name === "step_time");
      return { data, points: steps.map((step, index) => [step, values[index]]) };
    });
    const most = Math.max(...curves.flatMap(({ points }) => points.map(([, time]) => time)));
    const x = linearScale(stepDomain(last, store.state.zoom), [0, width]);
    const y = linearScale([0, most], [height - 2, 4]);
    drawLine(context, [[0, y(0)], [width, y(0)]], themeColor("--axis"));
    for (const { data, points } of curves) {
      const places = points.map(([step, time]) => [x(step), y(time)]);
      // A single row is shown as a dash.
      if (places.length === 1) places.unshift([places[0][0] - 6, places[0][1]]);
      const compared = data === compareData && data !== runData;
      drawLine(context, places, themeColor(compared ? "--compare" : "--line-1"), 1.5,
        compared ? [5, 3] : []);
    }
  }

  store.on(["runData", "compareData"], fill);
  store.on(["zoom", "theme"], surface.redraw);
  return root;
}
