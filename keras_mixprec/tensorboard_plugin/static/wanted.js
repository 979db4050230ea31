import { dataUrl } from "./api.js";
import { worstLayer } from "./layer_columns.js";
import { mainEvent } from "./levels.js";

export function isReadable(runs, name) {
  return (runs ?? []).some((run) => run.run === name && !run.newer_schema);
}

/**
 * Returns the run to show first: the one with the latest data, which the user has probably just
 * started. Runs in 16 bits come before float32 runs, which usually serve only for comparison.
 * @param {any[]} runs
 * @returns {string | null}
 */
export function firstShown(runs) {
  const readable = runs.filter((entry) => !entry.newer_schema);
  const low = readable.filter((entry) => entry.in_16_bits !== false);
  const [newest] = [...[low, readable].find(({ length }) => length) ?? runs].sort((one, other) => {
    return (other.written ?? 0) - (one.written ?? 0);
  });
  return newest?.run ?? null;
}

export function metricOf(data, name) {
  return data?.heat?.metrics.find((metric) => metric.name === name) ?? null;
}

// Returns the layer of the histogram. If no layer is chosen, returns the likeliest culprit.
export function histogramLayer(state) {
  const { layers = [], histograms } = state.runData ?? {};
  const listed = new Set(histograms?.[state.part] ?? []);
  if (state.layer !== null) return listed.has(state.layer) ? state.layer : null;
  const culprit = state.runData && mainEvent(state.runData)?.layer;
  if (listed.has(culprit)) return culprit;
  const [first] = listed;
  const known = layers.filter((layer) => listed.has(layer.path));
  return known.length ? worstLayer(known).path : first ?? null;
}

/** Explains why a layer is shown although none is chosen. */
export function whyShown(state) {
  const name = state.layer === null ? histogramLayer(state) : null;
  return name === null ? "" : " (click another one to see it here)";
}

// Returns the headroom metric of the chosen part, or null if the heatmap loads that metric.
function partMetric({ runData, part, metric }) {
  const name = `${part}_headroom_bits`;
  return metric !== null && name !== metric && metricOf(runData, name) ? name : null;
}

export function wantedPaths(state) {
  const { runs, run, compare, metric, part, runData, compareData, wantsWhatIf } = state;
  const heatPath = (name, data) => {
    if (!name || data?.run !== name || !metricOf(data, metric)) return null;
    return dataUrl("heat", { run: name, metric });
  };
  const runPath = (name) => {
    return isReadable(runs, name) ? dataUrl("run", { run: name }) : null;
  };
  const layer = runData?.run === run ? histogramLayer(state) : null;
  return {
    runData: runPath(run),
    // The compared run loads after the first run, because a comparison needs both.
    compareData: runData ? runPath(compare) : null,
    heat: heatPath(run, runData),
    compareHeat: heatPath(compare, compareData),
    // The table loads after the shown run, because the server must read all runs for the table.
    summaries: runData && runs?.length > 1 ? dataUrl("summaries") : null,
    partHeat: run && runData?.run === run && partMetric(state) ?
      dataUrl("heat", { run, metric: partMetric(state) }) : null,
    // Reading all ranges takes long with many layers, so wait until the card is in view.
    whatIf: wantsWhatIf && isReadable(runs, run) ? dataUrl("what_if", { run }) : null,
    histogram: layer && run ? dataUrl("histogram", { run, layer, part }) : null,
  };
}
