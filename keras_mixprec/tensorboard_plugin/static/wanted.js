import { dataUrl } from "./api.js";
import { worstLayer } from "./layer_columns.js";
import { mainEvent } from "./levels.js";

export function isReadable(runs, name) {
  return (runs ?? []).some((run) => run.run === name && !run.newer_schema);
}

/**
 * The run to begin with: the one that was written to last, which its reader has just started,
 * but one in 16 bits where there is one, which a run in float32 is only compared with.
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

// With no layer chosen the histogram of the likeliest culprit is worth showing.
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

/** Explains a layer that is shown although none is chosen. */
export function whyShown(state) {
  const name = state.layer === null ? histogramLayer(state) : null;
  return name === null ? "" : " (click another one to see it here)";
}

// The headroom of a part, unless the heatmap shows it already, or is about to.
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
    // There is something to compare it with first, whichever is read sooner.
    compareData: runData ? runPath(compare) : null,
    heat: heatPath(run, runData),
    compareHeat: heatPath(compare, compareData),
    // After what is looked at first: all runs have to be read for it.
    summaries: runData && runs?.length > 1 ? dataUrl("summaries") : null,
    partHeat: run && runData?.run === run && partMetric(state) ?
      dataUrl("heat", { run, metric: partMetric(state) }) : null,
    // Reading them takes long where there are many layers: when they are to be seen.
    whatIf: wantsWhatIf && isReadable(runs, run) ? dataUrl("what_if", { run }) : null,
    histogram: layer && run ? dataUrl("histogram", { run, layer, part }) : null,
  };
}
