import { dataTable } from "./data_table.js";
import { card, element } from "./dom.js";
import { formatInteger, readable } from "./format.js";
import { isLeftOut, isOfRun, lastMeasured } from "./heat_data.js";
import { createHeatLegend } from "./heat_legend.js";
import { createHeatmap } from "./heatmap.js";
import { worstOfRows } from "./heat_rows.js";
import { layerChoice } from "./layer_blocks.js";
import { BAD_INPUT, valueInWords } from "./metrics.js";
import { everWider, isAsIf, isWider } from "./precision.js";
import { metricOf } from "./wanted.js";

// If the last reading is before this share of the steps, the card says that readings are missing.
const LATE = 0.9;

// Scrolls two lists together. The shorter list stops at its end, and must not scroll the longer
// list back.
function scrollTogether(one, other) {
  let moved = null;
  const follow = (leader, follower) => leader.addEventListener("scroll", () => {
    if (moved === leader) {
      moved = null;
      return;
    }
    const before = follower.scrollTop;
    follower.scrollTop = leader.scrollTop;
    if (follower.scrollTop !== before) moved = follower;
  });
  follow(one, other);
  follow(other, one);
}

export function createHeatCard(store) {
  const select = element("select", {
    id: "metric", "aria-label": "Quantity shown in the heatmap",
    "aria-describedby": "metric-meaning",
    onchange: () => store.set({ metric: select.value }),
  });
  const fit = element("input", {
    type: "checkbox", id: "fit",
    onchange: () => store.set({ fit: fit.checked }),
  });
  const fitLabel = element("label", { class: "check" }, fit, "fit all rows");
  const meaning = element("p", { id: "metric-meaning", class: "hint" });
  const withheld = element("p", { class: "withheld", hidden: true });
  const missing = element("p", { class: "nothing", hidden: true });
  const ownTitle = element("h3", { hidden: true });
  const otherTitle = element("h3", { hidden: true });
  const own = createHeatmap(store, "heat", "runData");
  const other = createHeatmap(store, "compareHeat", "compareData");
  scrollTogether(own, other);
  const legendBox = element("div", { class: "heat-legend" });
  const maps = element("div", { class: "heat-maps" }, ownTitle, own, otherTitle, other);
  const keys = element("ul", { class: "swatches" });
  const body = element("div", { class: "heat-body" }, maps, legendBox, keys);
  const table = dataTable("Worst value of each layer");
  const kindOf = () => metricOf(store.state.runData, store.state.metric)?.kind;
  const formatOf = () => store.state.runData?.format?.name ?? "float16";
  const isShownAsIf = () => isAsIf(store.state.runData?.layers ?? [], formatOf());
  const someHeat = (is) => [store.state.heat, store.state.compareHeat].some((heat) => {
    return Boolean(heat && is(heat));
  });
  const legend = createHeatLegend(legendBox, keys, {
    kind: kindOf, format: formatOf, isAsIf: isShownAsIf,
    hasBadInput: () => someHeat((heat) => isLeftOut(heat)),
    hasPassed: () => someHeat(({ origins }) => origins.length > 0),
    hasRoomy: () => !isShownAsIf() && [store.state.runData, store.state.compareData].some((run) => {
      return Boolean(run?.layers.some((layer) => everWider(layer, formatOf())));
    }),
  });

  function fillMetrics() {
    const { runData, metric } = store.state;
    const metrics = runData?.heat?.metrics ?? [];
    const groups = new Set(metrics.map(({ group }) => group));
    select.replaceChildren(...[...groups].map((label) => {
      return element("optgroup", { label }, ...metrics.filter(({ group }) => group === label)
        .map(({ name, title }) => element("option", { value: name }, title)));
    }));
    select.value = metric ?? "";
  }

  function formatInWords() {
    const { layers } = store.state.runData;
    const dtypes = new Set(layers.map(({ compute_dtype: dtype }) => dtype));
    const wide = [...dtypes].filter((dtype) => isWider(dtype, formatOf())).join(" or ");
    if (isShownAsIf()) return ` All layers are in ${wide}. The chart shows their headroom as if they were in ${formatOf()}.`;
    return wide ? ` Each layer has its own format, ${formatOf()} or ${wide}.` : ` The format is ${formatOf()}.`;
  }

  function readingsInWords() {
    const { heat, runData } = store.state;
    if (!heat) return "";
    if (heat.from.some((step, column) => step !== heat.until[column])) return " Each column shows the worst of several readings.";
    return ` Each column is one reading: ${formatInteger(heat.from.length)} of ${formatInteger(runData.last_step)} steps.`;
  }

  // Says when the measurements ended. A run that is between two readings has not stopped measuring.
  function endOfMeasuring() {
    const { runData, heat } = store.state;
    const last = lastMeasured(heat);
    if (last === null || last >= LATE * runData.last_step) return null;
    return `Measured to step ${formatInteger(last)} of ${formatInteger(runData.last_step)}: ` +
      "the headroom does not include later steps.";
  }

  function update() {
    const { runData, heat, compare, compareData, compareHeat, metric } = store.state;
    if (metric && select.value !== metric) select.value = metric;
    const { explanation = "", kind } = metricOf(runData, metric) ?? {};
    meaning.textContent = explanation + (kind === "headroom" ? formatInWords() : "") + readingsInWords();
    const measured = Boolean(runData?.heat);
    withheld.textContent = readable([endOfMeasuring(), runData?.withheld].filter(Boolean).join(" "));
    withheld.hidden = !withheld.textContent;
    missing.hidden = measured && Boolean(heat);
    missing.textContent = measured ? "No values of this quantity here." :
      "No range of any layer was measured in this run.";
    body.hidden = !heat;
    select.disabled = !measured;
    ownTitle.hidden = otherTitle.hidden = !compare;
    ownTitle.textContent = runData?.run ?? "";
    otherTitle.textContent = compareData ? compareData.run +
      (compareHeat ? "" : ": has no values of this quantity") : "";
    other.hidden = !compareHeat;
  }

  // Updates the table of the heatmap's rows, because a screen reader cannot read a chart.
  function updateTable() {
    const { runData, heat } = store.state;
    const metric = metricOf(runData, heat?.metric);
    if (!isOfRun(heat, runData) || !metric) return table.fill(null);
    const layers = new Map(runData.layers.map((layer) => [layer.path, layer]));
    table.fill(() => [["layer", metric.title, ["after step", formatInteger]],
      worstOfRows(heat, layers, layerChoice(store.state), formatOf()).map(({ name, value, step, wider, isBad, origin }) => [
        name, isBad && Number.isNaN(value) ? BAD_INPUT : origin ? origin.short :
          valueInWords(metric.kind, value, wider, formatOf()),
        step,
      ])]);
  }

  store.on(["runData"], fillMetrics);
  store.on(["runData", "heat", "filter", "onlyProblems", "folded"], updateTable);
  store.on(["runData", "heat", "compare", "compareData", "compareHeat", "metric"], update);
  store.on(["runData", "metric", "theme", "heat", "compareHeat"], legend.redraw);
  const root = card(
    "heatmap", "Layers over time", [fitLabel, select], meaning, withheld, missing, body,
    table.root,
  );
  store.on(["awaited"], ({ awaited }) => {
    root.setAttribute("aria-busy", String(Boolean(awaited.heat || awaited.compareHeat)));
  });
  return root;
}
