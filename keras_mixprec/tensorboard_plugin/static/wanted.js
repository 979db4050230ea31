import { dataUrl } from "./api.js";
import { worstVerdict } from "./event_text.js";

export function isReadable(runs, name) {
  return (runs ?? []).some((run) => run.run === name && !run.newer_schema);
}

export function metricOf(data, name) {
  return data?.heat?.metrics.find((metric) => metric.name === name) ?? null;
}

// With no layer chosen the histogram of the likeliest culprit is worth showing.
export function histogramLayer(state) {
  const listed = state.runData?.histograms?.[state.part] ?? [];
  if (state.layer !== null) return listed.includes(state.layer) ? state.layer : null;
  const culprit = worstVerdict(state.runData?.events ?? [])?.layer;
  return listed.includes(culprit) ? culprit : listed[0] ?? null;
}

export function wantedPaths(state) {
  const { runs, run, compare, metric, part, runData, compareData } = state;
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
    compareData: runPath(compare),
    heat: heatPath(run, runData),
    compareHeat: heatPath(compare, compareData),
    histogram: layer && run ? dataUrl("histogram", { run, layer, part }) : null,
  };
}
