import { chooseLayer } from "./actions.js";
import { breakable, card, element, fillSelect } from "./dom.js";
import {
  formatInteger, formatNumber, formatPower, formatShare, listSome, momentInWords, plural, readable,
} from "./format.js";
import { seenFirst } from "./frames.js";
import { pathOfCall } from "./heat_data.js";
import { ALL_ZERO, leftOut } from "./metrics.js";
import {
  GRAVE, MOMENTS, PLANNED, SPARE_BITS, foundElsewhere, foundInWords, judgeLayer, planFile,
  isAllZero, scaleInWords, smallestPlan, whyNoPlan, withLost,
} from "./what_if.js";

const ALL = "";
const ROWS_SHOWN = 200;
// Not that of a finding's fix, whose code saves a `plan.json`.
const PLAN_FILE = "what_if_plan.json";
const ORDER = [...GRAVE, "passed", "unknown", "zero", "fits"];
const LEVEL = {
  overflows: "bad", refused: "bad", "no scale": "bad", vanishes: "warning", close: "warning",
};
const GLYPH = { bad: "▲ ", warning: "◆ " };
const CANNOT = "Ranges are of what layers return. A layer may overflow on the way to that, or " +
  "lose digits. Loss scales are for the gradients of outputs and weights; which small ones of weights count " +
  "is not in the log. Before training check the plan with keras_mixprec.diagnose on a batch.";
const NO_RANGES = "Nothing was measured of the layers of this run. MixPrecMonitor measures " +
  "them at every probe_every steps, within max_overhead of the time.";

// Every folder that layers are in, before them.
export function layersAndBlocks(layers) {
  const folders = new Set(layers.flatMap(({ path }) => {
    const parts = path.split("/");
    return parts.slice(0, -1).map((_, depth) => parts.slice(0, depth + 1).join("/"));
  }));
  const paths = new Set(layers.map(({ path }) => path));
  const blocks = [...folders].map((path) => [`${path}/`, `${path} and all in it`]);
  return [[ALL, "all layers"], ...blocks, ...[...paths].map((path) => [path, path])];
}

function isOf(path, chosen) {
  return chosen.endsWith("/") ? path.startsWith(chosen) || `${path}/` === chosen :
    chosen === ALL || path === chosen;
}

function partInWords({ state, bits, step, lost, origin }, name) {
  if (state === "passed") return `${origin.short}: not known`;
  if (state === "zero") return origin?.short ?? ALL_ZERO;
  const at = step === null ? "" : `, ${momentInWords(step, "after")}`;
  if (lost) return state === "overflows" ? `not finite${at}` : `not finite in ${lost}${at}: not known`;
  if (state === "unknown") return "not measured";
  const number = formatNumber(Number(Math.abs(bits).toFixed(1)));
  if (state === "overflows") return `overflow: ${number} bits beyond ${name}${at}`;
  const left = `${number} bits left${at}`;
  return state === "vanishes" ? `${left}; small ones that count become 0` : left;
}

function windowInWords(window) {
  if (!window) return "not measured";
  const { lowest, highest } = window;
  if (lowest > highest) return "no loss scale fits";
  if (lowest === -Infinity) return `up to ${formatPower(highest)}`;
  return `${formatPower(lowest)} to ${formatPower(highest)}`;
}

export function createWhatIf(store) {
  const which = element("select", {
    id: "what-if-layer", "aria-label": "Layer or block", onchange: () => fill(),
  });
  const type = element("select", {
    id: "what-if-format", "aria-label": "Format", onchange: () => fill(),
  });
  const when = element("select", {
    id: "what-if-moment", "aria-label": "Of which reading", onchange: () => fill(),
  });
  fillSelect(when, MOMENTS, "worst");
  const answer = element("p", { class: "words", role: "status" });
  const rows = element("tbody");
  const heads = ["Layer", "Activations", `Gradients fit loss scales (${SPARE_BITS} bits to spare)`, "Weights"];
  const table = element("table", {}, element("thead", {}, element("tr", {},
    ...heads.map((head) => element("th", { scope: "col", class: "plain" }, head)))), rows);
  const scroller = element("div", { class: "table-scroll short" }, table);
  const download = element("a", { class: "button", download: PLAN_FILE }, `Download it for apply_policy (${PLAN_FILE})`);
  const plan = element("p", {});
  const caution = element("p", { class: "withheld caution", role: "status", hidden: true });
  const nothing = element("p", { class: "absent", hidden: true });
  const body = element("div", {}, answer, scroller,
    element("h3", {}, "Smallest plan that these ranges allow"), plan,
    caution, element("p", {}, CANNOT), download);
  const root = card("what-if", "What if", [which, type, when], nothing, body);
  root.classList.add("wide");
  const near = new IntersectionObserver((seen) => {
    if (seen.some((one) => one.isIntersecting)) store.set({ wantsRanges: true });
  }, { rootMargin: "200px" });
  near.observe(root);

  let offered;
  let listed;

  function offer() {
    const options = layersAndBlocks(store.state.runData?.layers ?? []);
    const before = which.value;
    const names = options.join("\n");
    if (names !== listed) {
      listed = names;
      fillSelect(which, options, options.some(([value]) => value === before) ? before : ALL);
    }
    // A run that has gone on keeps what was chosen here.
    const run = store.state.runData?.run;
    if (run === offered) return fill();
    offered = run;
    follow();
  }

  function follow() {
    const { layer } = store.state;
    const known = new Set([...which.options].map(({ value }) => value));
    const path = layer === null ? null : pathOfCall(layer, known);
    if (known.has(path)) which.value = path;
    fill();
  }

  function fill() {
    const { runData, ranges } = store.state;
    const ready = ranges && runData && ranges.run === runData.run;
    const measured = ready && Object.keys(ranges.layers).length > 0;
    body.hidden = which.hidden = type.hidden = when.hidden = !measured;
    nothing.hidden = Boolean(measured);
    nothing.textContent = !ready ? "Reading the ranges of all layers …" :
      readable([NO_RANGES, runData.withheld].filter(Boolean).join(" "));
    if (!measured) return;
    const names = ranges.formats.map(({ name }) => name);
    if (type.options.length !== names.length) {
      const usual = names.includes(runData.format?.name) ? runData.format.name : names[0];
      fillSelect(type, names.map((name) => [name, name]), usual);
    }
    fillTable(runData, ranges);
    fillPlan(runData, ranges);
  }

  function fillTable(runData, ranges) {
    const format = ranges.formats.find(({ name }) => name === type.value);
    const found = runData.layers
      .filter(({ path }) => isOf(path, which.value))
      .map((layer) => {
        const known = withLost(ranges.layers[layer.path], layer);
        const own = judgeLayer(known, format, ranges.formats, when.value);
        const origin = layer.passed;
        const why = own.activation.state !== "unknown" ? null :
          isAllZero(layer) ? "zero" : origin ? "passed" : null;
        const activation = why ? { ...own.activation, state: why, origin } : own.activation;
        const state = why && own.state === "unknown" ? why : own.state;
        return { path: layer.path, hasWeights: layer.parameters !== 0, ...own, activation, state };
      })
      .sort((one, other) => ORDER.indexOf(one.state) - ORDER.indexOf(other.state));
    const count = (state) => found.filter((one) => one.state === state).length;
    const lost = found.filter((one) => one.state === "overflows" && one.activation.lost).length;
    const parts = [
      [count("overflows") - lost, "would overflow"], [lost, "not finite in this run"],
      [count("refused"), "with a verdict of the run"],
      [count("no scale"), "no loss scale would fit"],
      [count("vanishes"), "would lose small numbers that count"],
      [count("close"), `within ${SPARE_BITS} bits of overflowing`],
      [count("passed"), "not known: not finite through no fault of theirs"], [count("unknown"), "not measured"], [count("zero"), "with zeros alone"], [count("fits"), "would fit"],
    ].filter(([n]) => n);
    answer.textContent = `In ${format.name}, of ${plural(found.length, "layer")}: ` +
      parts.map(([n, text]) => `${formatInteger(n)} ${text}`).join(", ") + ".";
    rows.replaceChildren(...found.slice(0, ROWS_SHOWN).map(row));
  }

  function row({ path, hasWeights, state, activation, gradient, weight, refused }) {
    const level = LEVEL[state];
    const cell = (text, bad = null) => element("td", {}, bad ? badgeOf(text, bad) : text);
    const levelOf = (part) => LEVEL[part.state] ?? null;
    const gone = gradient && gradient.lowest > gradient.highest ? "bad" : null;
    return element("tr", { "data-layer": path, class: level ?? null },
      element("th", { scope: "row", class: "plain" }, element("button", {
        type: "button", title: path, onclick: () => chooseLayer(store, path),
      }, ...breakable(path))),
      refused.length && LEVEL[activation.state] !== "bad" ? cell(foundInWords(refused), "bad") :
        cell(partInWords(activation, type.value), levelOf(activation)),
      cell(windowInWords(gradient), gone),
      hasWeights ? cell(partInWords(weight, type.value), levelOf(weight)) : cell("none"));
  }

  function badgeOf(text, level) {
    return element("span", { class: `badge ${level}` }, GLYPH[level] + text);
  }

  function fillPlan(runData, ranges) {
    const { layers } = runData;
    const possible = PLANNED.includes(type.value);
    const why = whyNoPlan(runData);
    download.hidden = !possible || why !== null;
    caution.hidden = true;
    if (why) {
      plan.textContent = why;
      return;
    }
    if (!possible) {
      plan.textContent = `A plan holds ${PLANNED.join(" and ")}: ${type.value} is ` +
        (type.value === "float32" ? "what needs none." : "set by Keras' quantize.");
      return;
    }
    const found = smallestPlan(layers, ranges, type.value, runData);
    const wide = [...found.reasons];
    const text = wide.length ? `${plural(wide.length, "layer")} in float32: ` +
      listSome(wide.map(([path, reason]) => `${path} (${reason})`), 4) : "No layer in float32";
    const share = Number.isNaN(found.share) ? "" :
      ` ${formatShare(found.share)} of FLOPs in ${type.value}.`;
    const scale = ` ${scaleInWords(found)}`.trimEnd();
    const open = found.unmeasured.length ? ` Without a finite reading: ${
      listSome(found.unmeasured, 4)}.` : "";
    const behind = [...found.behind].map(([path, own]) => {
      return ` Not known, behind ${path}: ${listSome(own, 4)}.`;
    }).join("");
    const left = leftOut(runData.bad_input);
    plan.textContent = `${text}.${share}${scale}${behind}${open}${left && ` ${left}`}`;
    const known = foundElsewhere(store.state.summaries, runData, found);
    caution.hidden = !known.length;
    caution.textContent = `◆ Of layers that this plan keeps in ${type.value}, other runs found: ${
      listSome(known.map((one) => `${one.verdict.replaceAll("_", " ")} in ${one.layer} (${one.run})`), 4)}.`;
    download.href = `data:application/json,${
      encodeURIComponent(JSON.stringify(planFile(layers, found), null, 2))}`;
  }

  store.on(["runData"], seenFirst(root, offer));
  store.on(["layer"], seenFirst(root, follow));
  store.on(["ranges", "summaries"], seenFirst(root, fill));
  return root;
}
