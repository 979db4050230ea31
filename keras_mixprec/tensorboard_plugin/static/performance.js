import { compareWith } from "./actions.js";
import { createSurface, drawAxisName, drawLine, drawStepAxis } from "./canvas.js";
import { copyButton } from "./copy.js";
import { dataTable } from "./data_table.js";
import { breakable, card, element } from "./dom.js";
import { formatInteger, formatNumber, formatSeconds } from "./format.js";
import { labelOfRun, shortRun } from "./names.js";
import { linearScale, stepDomain } from "./scales.js";
import { BY_STEP } from "./step_axis.js";
import { themeColor } from "./theme.js";

const TIMES = { left: 66, right: 14, top: 8, height: 56, axis: 26 };

export function createPerformance(store) {
  const help = element("div", { class: "float32-help", hidden: true });
  const about = element("p", { class: "hint about-speed", hidden: true });
  const rows = element("tbody");
  const head = element("thead");
  const box = element("div", { class: "canvas-box" });
  const times = dataTable("Time of a step");
  const all = element("div", {}, about, element("table", {}, head, rows), box, times.root);
  const root = card("performance", "Speed", [], help, all);
  const surface = createSurface(box, {
    role: "img", "aria-label": "Time of a step, by steps",
  }, draw);
  surface.setHeight(TIMES.top + TIMES.height + TIMES.axis);

  const runsOf = ({ runData, compareData }) => {
    return [runData, compareData].filter((data) => data?.performance);
  };

  const figureOf = ({ performance }, name) => performance.figures.find((figure) => figure.name === name);

  function fill() {
    const { runData, compareData } = store.state;
    const known = runsOf(store.state);
    // Not of a log that is no training.
    root.hidden = !known.length && !runData?.speed_notes.length;
    const notes = [runData, compareData].filter(Boolean).flatMap((data) => {
      const name = compareData ? `${shortRun(data.run, (data === runData ? compareData : runData).run)}: ` : "";
      return data.speed_notes.map((text) => name + text);
    });
    about.replaceChildren(...breakable(notes.join(" ")));
    about.hidden = !notes.length;
    for (const node of [head.parentElement, box]) node.hidden = !known.length;
    times.fill(known.length ? () => [
      ["run", ["step", formatInteger], ["time of a step", formatSeconds]], known.flatMap(timesOf),
    ] : null);
    if (!known.length) return;
    head.replaceChildren(...compareData ? [headOf(known, runData)] : []);
    const shown = known[0].performance.figures.filter(({ name }) => {
      return known.some((data) => figureOf(data, name)?.value !== null);
    });
    rows.replaceChildren(
      rowOf("policy", "compiled with", "the policy of its layers when the run began", known.map(({ policy }) => policy)),
      // How fast a run is says nothing without what it came to.
      rowOf("last_loss", "last loss", "the last loss that was logged", known.map(({ loss }) => {
        return loss ? formatNumber(loss.values.at(-1)) : "–";
      })),
      ...shown.map(({ name, title, explanation }) => {
        return rowOf(name, title, explanation, known.map((data) => figureOf(data, name)?.text ?? "–"));
      }));
    surface.redraw();
  }

  function rowOf(name, label, title, texts) {
    return element("tr", { "data-figure": name, title }, element("th", { scope: "row" }, label),
      ...texts.map((text) => element("td", { class: "number" }, text)));
  }

  // Where the folder has what this run is to be compared with, or how to make it.
  function offer() {
    const { runs, runData, compareData, summaries } = store.state;
    const partner = summaries?.find(({ run }) => run === runData?.run)?.partner;
    const isRead = runs?.length < 2 || (summaries && !summaries.some(({ unread }) => unread));
    const make = !partner && isRead ? runData?.float32_run : null;
    help.hidden = Boolean(compareData) || (!partner && !make);
    help.replaceChildren(...partner ? [element("button", {
      type: "button", class: "quiet", onclick: () => compareWith(store, partner),
    }, `Compare with ${partner}`)] : make ? [
      element("p", { class: "hint" }, ...breakable(make.text)),
      element("pre", {}, element("code", {}, make.code)), copyButton("Copy code", () => make.code),
    ] : []);
  }

  function timesOf(data) {
    const { values } = figureOf(data, "step_time");
    return data.performance.steps.map((step, index) => [data.run, step, values[index]]);
  }

  function headOf(known, runData) {
    const names = known.map((data) => {
      const other = known.find((one) => one !== data);
      const compared = data !== runData;
      return element("th", {
        class: compared ? "of-run compared" : "of-run", scope: "col", title: data.run,
      }, labelOfRun(data.run, other?.run));
    });
    return element("tr", {}, element("td"), ...names);
  }

  function draw(context, width) {
    const { runData, compareData } = store.state;
    const known = runsOf(store.state);
    if (!known.length) return;
    const last = Math.max(0, ...known.map((data) => data.last_step));
    const curves = known.map((data) => ({ data, points: timesOf(data).map(([, step, time]) => [step, time]) }));
    const most = Math.max(...curves.flatMap(({ points }) => points.map(([, time]) => time)));
    const domain = stepDomain(last, store.state.zoom);
    const bottom = TIMES.top + TIMES.height;
    const x = linearScale(domain, [TIMES.left, width - TIMES.right]);
    const y = linearScale([0, most], [bottom, TIMES.top]);
    drawLine(context, [[TIMES.left, bottom], [width - TIMES.right, bottom]], themeColor("--axis"));
    context.textAlign = "right";
    context.fillStyle = themeColor("--muted");
    for (const time of [0, most]) context.fillText(formatSeconds(time), TIMES.left - 6, y(time));
    drawAxisName(context, "step time", 8, TIMES.top + TIMES.height / 2, true);
    drawStepAxis(context, x, BY_STEP, domain, width / 110, { start: TIMES.left, y: bottom });
    context.save();
    context.beginPath();
    context.rect(TIMES.left, 0, width - TIMES.right - TIMES.left, bottom + 1);
    context.clip();
    for (const { data, points } of curves) {
      const places = points.map(([step, time]) => [x(step), y(time)]);
      // A single row is shown as a dash.
      if (places.length === 1) places.unshift([places[0][0] - 6, places[0][1]]);
      const compared = data === compareData && data !== runData;
      drawLine(context, places, themeColor(compared ? "--compare" : "--line-1"), 1.5,
        compared ? [5, 3] : []);
    }
    context.restore();
  }

  store.on(["runData", "compareData"], fill);
  store.on(["runs", "runData", "compareData", "summaries"], offer);
  store.on(["zoom", "theme"], surface.redraw);
  return root;
}
