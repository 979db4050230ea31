import { courseOf, headroomOfPart } from "./course.js";
import { DIFFERENCES, differencesOf } from "./difference.js";
import { dtypeBars } from "./dtype_bars.js";
import { isOfRun, pathOfCall } from "./heat_data.js";
import { worstOfRows } from "./heat_rows.js";
import { histogramAt } from "./histogram_data.js";
import { layerChoice } from "./layer_blocks.js";
import { worstByLayer } from "./model_map.js";
import { trialsOf } from "./pareto.js";
import { valueOf } from "./speed.js";
import { histogramLayer, metricOf } from "./wanted.js";
import { judgeLayer, MOMENTS, withLost } from "./what_if.js";

function runsOf({ runData, compareData }) {
  return [runData, compareData].filter(Boolean);
}

function timelineRows(state) {
  return runsOf(state).flatMap(({ run, scale, loss }) => [
    ...scale.flatMap((line) => line.steps.map((step, index) => ({
      run, step, optimizer: line.optimizer, loss_scale: line.scale[index],
      skipped_so_far: line.skipped[index],
    }))),
    ...(loss?.steps ?? []).map((step, index) => ({ run, step, loss: loss.values[index] })),
  ]);
}

// Of the whole run where there is no step.
function speedRows(state) {
  return runsOf(state).filter((data) => data.performance).flatMap((data) => {
    const { steps, figures } = data.performance;
    const { run } = data;
    return figures.flatMap(({ name, values }) => [
      { run, figure: name, step: null, value: valueOf(data, name) },
      ...values.map((value, index) => ({ run, figure: name, step: steps[index], value })),
    ]);
  });
}

function heatExport(state) {
  const { runData, heat } = state;
  if (!isOfRun(heat, runData)) return [];  // It may be loading.
  const layers = new Map(runData.layers.map((layer) => [layer.path, layer]));
  return worstOfRows(heat, layers, layerChoice(state), runData.format.name).map(({ name, value, step }) => {
    return { layer: name, metric: heat.metric, worst: value, step };
  });
}

function histogramRows(state) {
  const taken = histogramAt(state.histogram, state.step);
  return (taken?.bars ?? []).map(({ exponent, count }) => {
    return { layer: histogramLayer(state), part: state.part, step: taken.step, exponent, count };
  });
}

function mapRows({ runData, heat }) {
  const layers = new Map(runData.layers.map((layer) => [layer.path, layer]));
  const metric = isOfRun(heat, runData) ? metricOf(runData, heat.metric) : null;
  const worst = metric ? worstByLayer(heat, layers, pathOfCall, metric.kind) : new Map();
  return runData.layers.map(({ path, fed_by: feeders }) => ({
    layer: path, fed_by: feeders ?? null, metric: heat?.metric ?? null,
    worst: worst.get(path)?.value ?? null, step: worst.get(path)?.step ?? null,
  }));
}

// Powers of two by step.
function courseRows(state) {
  const { runData, histogram, part } = state;
  const layer = histogramLayer(state) ?? state.layer;
  const course = courseOf(
    headroomOfPart(state), histogram, layer, runData.format.maximum_bits,
  );
  const rows = new Map();
  const rowAt = (step) => {
    if (!rows.has(step)) rows.set(step, { layer, part, step, not_finite: false });
    return rows.get(step);
  };
  for (const step of course.nonfinite) rowAt(step).not_finite = true;
  for (const name of /** @type {const} */ (["largest", "median", "smallest"])) {
    for (const [step, bits] of course[name]) rowAt(step)[`${name}_log2`] = bits;
  }
  return [...rows.values()].sort((one, other) => one.step - other.step);
}

function dtypeRows({ runData }) {
  const bars = dtypeBars(runData.layers, runData.events, Math.max(1, runData.last_step));
  return bars.flatMap(({ path, bars: own }) => own.map(({ from, until, dtype, reason }) => {
    return { layer: path, from_step: from, to_step: until, dtype, because: reason };
  }));
}

// Every layer in every format, of each reading that can be chosen.
function whatIfRows({ runData, ranges }) {
  if (ranges?.run !== runData.run) return [];
  return ranges.formats.flatMap((format) => MOMENTS.flatMap(([reading]) => {
    return runData.layers.map((layer) => {
      const { path } = layer;
      const known = withLost(ranges.layers[path], layer);
      const own = judgeLayer(known, format, ranges.formats, reading);
      return {
        layer: path, format: format.name, reading, state: own.state,
        activation_bits_left: own.activation.bits, activation_step: own.activation.step,
        weight_bits_left: own.weight.bits, verdicts: own.refused,
        lowest_scale_log2: own.gradient?.lowest ?? null,
        highest_scale_log2: own.gradient?.highest ?? null,
      };
    });
  }));
}

function differenceRows({ runData, compareData, ranges, compareRanges }) {
  if (!compareData) return [];
  const own = ranges?.run === runData.run ? ranges : null;
  const others = compareRanges?.run === compareData.run ? compareRanges : null;
  return differencesOf(runData, compareData, own, others, "all").map(({ path, cells }) => {
    const values = DIFFERENCES.flatMap(({ id }, place) => {
      const [one, two] = cells[place].values;
      return [[id, one], [`${id}_of_other`, two]];
    });
    return { layer: path, ...Object.fromEntries(values), run: runData.run, other: compareData.run };
  });
}

/**
 * What each card holds, by its id: all that it would show if it were scrolled through.
 * @type {Record<string, (state: any) => object[]>}
 */
export const TABLES = {
  runs: ({ summaries }) => (summaries ?? []).filter((row) => row.headline).map(({
    headline, share_of_flops, unread, ...row
  }) => {
    return {
      ...row, state: headline.state, share_before: share_of_flops.before,
      share_now: share_of_flops.now,
    };
  }),
  timeline: timelineRows,
  performance: speedRows,
  heatmap: heatExport,
  histogram: histogramRows,
  layers: (state) => state.runData.layers.filter(layerChoice(state).keeps),
  events: ({ runData, hiddenKinds }) => {
    return runData.events.filter(({ kind }) => !hiddenKinds.has(kind));
  },
  map: mapRows,
  course: courseRows,
  dtypes: dtypeRows,
  "what-if": whatIfRows,
  difference: differenceRows,
  pareto: ({ runData }) => trialsOf(runData.trade_off),
};
