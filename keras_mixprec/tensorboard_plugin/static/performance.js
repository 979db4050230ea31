import { createSurface, drawAxisName, drawLine, drawStepAxis } from "./canvas.js";
import { comparison } from "./comparison.js";
import { dataTable } from "./data_table.js";
import { breakable, card, element } from "./dom.js";
import { lastFit, stepsOfFit } from "./fits.js";
import { createFloat32Help } from "./float32_run.js";
import { formatAmount, formatInteger, formatNumber } from "./format.js";
import { labelOfRun, shortRun } from "./names.js";
import { linearScale, stepDomain } from "./scales.js";
import { aboutSpeed, valueOf } from "./speed.js";
import { BY_STEP } from "./step_axis.js";
import { themeColor } from "./theme.js";

const NOT_TIMED = "had too few steps without a probe or a diagnosis (more steps, or a larger " +
  "probe_every, leave some), or the log is of an older version.";
const TIMES = { left: 66, right: 14, top: 8, height: 56, axis: 26 };

export function createPerformance(store) {
  const line = element("p", { class: "against", hidden: true });
  const span = element("p", { class: "hint", hidden: true });
  const about = element("p", { class: "hint about-speed", hidden: true });
  const rows = element("tbody");
  const head = element("thead");
  const box = element("div", { class: "canvas-box" });
  const times = dataTable("Time of a step");
  const nothing = element("p", { class: "absent", hidden: true });
  const all = element("div", {}, span, about, element("table", {}, head, rows), box, times.root);
  const root = card("performance", "Speed", [], createFloat32Help(store), line, nothing, all);
  const surface = createSurface(box, {
    role: "img", "aria-label": "Time of a step, by steps",
  }, draw);
  surface.setHeight(TIMES.top + TIMES.height + TIMES.axis);

  const runsOf = ({ runData, compareData }) => {
    return [runData, compareData].filter((data) => data?.performance);
  };

  function fill() {
    const { runData, compareData } = store.state;
    const known = runsOf(store.state);
    // Not of a log that is no training.
    const trained = runData?.events.some(({ kind }) => kind === "train_begin");
    root.hidden = !known.length && !trained;
    nothing.replaceChildren(...breakable(untimed(runData, compareData)));
    nothing.hidden = !nothing.textContent;
    all.hidden = !known.length;
    const both = runData && compareData;
    line.replaceChildren(...breakable(both ? comparison(runData, compareData) : ""));
    line.hidden = !both;
    if (!known.length) return;
    const spans = known.map((data) => spanOf(data, known.length > 1)).filter(Boolean);
    span.replaceChildren(...breakable(spans.join("; ")));
    span.hidden = !spans.length;
    const notes = known.flatMap((data) => aboutSpeed(data).map((text) => nameBefore(text, data, known)));
    about.replaceChildren(...breakable(notes.join(" ")));
    about.hidden = !notes.length;
    head.replaceChildren(...compareData ? [headOf(known, runData)] : []);
    const figures = known[0].performance.figures.filter(({ name }) => {
      return known.some((data) => valueOf(data, name) !== null);
    });
    rows.replaceChildren(policyRow(known), ...lossRow(known), ...figures.map(({ name, explanation, kind }) => {
      return element("tr", { "data-figure": name, title: explanation },
        element("th", { scope: "row" }, titleOf(known, name)),
        ...known.map((data) => {
          const all = name === "measured_steps" ? ` of ${formatInteger(stepsOfFit(data))}` : "";
          return element("td", { class: "number" }, formatAmount(valueOf(data, name), kind) + all);
        }));
    }));
    times.fill(() => [["run", ["step", formatInteger], ["time of a step", (value) => formatAmount(value, "seconds")]], known.flatMap(timesOf)]);
    surface.redraw();
  }

  // A run without a tuner has a row of the monitor alone.
  function titleOf(known, name) {
    const titles = known.map(({ performance }) => {
      return performance.figures.find((figure) => figure.name === name)?.title;
    });
    return [...new Set(titles)].filter(Boolean).join(" | ");
  }

  // Of two runs, too: their speeds are not compared then, and nobody else says why.
  function untimed(runData, compareData) {
    const [first, second] = [runData, compareData].filter((data) => data && !data.performance);
    if (!first) return "";
    if (!compareData) return `No step of this run was timed: it ${NOT_TIMED}`;
    const other = first === runData ? compareData : runData;
    const whose = second ? "either run" : shortRun(first.run, other?.run);
    return `No step of ${whose} was timed, so speeds are not compared: it ${NOT_TIMED}`;
  }

  function nameBefore(text, data, known) {
    const other = known.find((one) => one !== data);
    return other ? `${shortRun(data.run, other.run)}: ${text}` : text;
  }

  // The figures are of the last fit, the curve of step times as well.
  function spanOf(data, named) {
    const text = lastFit(data);
    const { runData, compareData } = store.state;
    const other = data === runData ? compareData : runData;
    return text && (named ? `${shortRun(data.run, other.run)}: ${text}` : `Of ${text}`);
  }

  // What a run ends in may be what a tuner has made of it.
  function policyRow(known) {
    return element("tr", { "data-figure": "policy", title: "the policy of its layers when the run began" },
      element("th", { scope: "row" }, "compiled with"),
      ...known.map(({ policy }) => element("td", { class: "number" }, policy)));
  }

  // How fast a run is says nothing without what it came to.
  function lossRow(known) {
    if (!known.some((data) => data.loss)) return [];
    return [element("tr", { "data-figure": "last_loss", title: "the last loss that was logged" },
      element("th", { scope: "row" }, "last loss"),
      ...known.map(({ loss }) => element("td", { class: "number" },
        loss ? formatNumber(loss.values.at(-1)) : "–")))];
  }

  function timesOf({ run, performance: { steps, figures } }) {
    const { values } = figures.find((figure) => figure.name === "step_time");
    return steps.map((step, index) => [run, step, values[index]]);
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
    const last = Math.max(0, ...known.map((data) => data.last_step));
    const curves = known.map((data) => {
      const { steps, figures } = data.performance;
      const { values } = figures.find((figure) => figure.name === "step_time");
      return { data, points: steps.map((step, index) => [step, values[index]]) };
    });
    const most = Math.max(...curves.flatMap(({ points }) => points.map(([, time]) => time)));
    const domain = stepDomain(last, store.state.zoom);
    const bottom = TIMES.top + TIMES.height;
    const x = linearScale(domain, [TIMES.left, width - TIMES.right]);
    const y = linearScale([0, most], [bottom, TIMES.top]);
    drawLine(context, [[TIMES.left, bottom], [width - TIMES.right, bottom]], themeColor("--axis"));
    context.textAlign = "right";
    context.fillStyle = themeColor("--muted");
    for (const time of [0, most]) {
      context.fillText(formatAmount(time, "seconds"), TIMES.left - 6, y(time));
    }
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
  store.on(["zoom", "theme"], surface.redraw);
  return root;
}
