import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

// MIXPREC_STATIC points to another copy of the front end.
const folder = process.env.MIXPREC_STATIC ??
  fileURLToPath(new URL("../keras_mixprec/tensorboard_plugin/static", import.meta.url));
const load = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);

const scales = await load("scales");
const format = await load("format");
const palette = await load("palette");
const metrics = await load("metrics");
const names = await load("names");
const precision = await load("precision");
const heatData = await load("heat_data");
const histogram = await load("histogram_data");
const fits = await load("fits");
const eventText = await load("event_text");
const summary = await load("summary");
const speed = await load("speed");
const comparison = await load("comparison");
const float32Run = await load("float32_run");
const lossCurve = await load("loss_curve");
const layerColumns = await load("layer_columns");
const layerBlocks = await load("layer_blocks");
const link = await load("link");
const wanted = await load("wanted");
const { createStore } = await load("store");

// The units of all metrics, from the test that runs this file.
const UNITS = JSON.parse(process.env.MIXPREC_KNOWN).units;

const FLOAT16 = {
  name: "float16", maximum_exponent: 16, normal_exponent: -14, subnormal_exponent: -24,
};

test("a linear scale inverts", () => {
  const scale = scales.linearScale([10, 20], [100, 300]);
  assert.equal(scale(15), 200);
  assert.equal(scale.invert(200), 15);
});

test("ticks are round and whole steps", () => {
  assert.deepEqual(scales.niceTicks(0, 2000, 4), [0, 500, 1000, 1500, 2000]);
  assert.deepEqual(scales.niceTicks(0, 3, 10), [0, 1, 2, 3]);
  assert.deepEqual(scales.exponentTicks(1, 20, 6), [4, 8, 12, 16, 20]);
});

test("values are looked up at the latest step at or before", () => {
  assert.equal(scales.countAtMost([1, 3, 5], 3), 2);
  assert.equal(scales.valueAtStep([0, 5], [7, 8], 4), 7);
  assert.equal(scales.valueAtStep([5, 9], [7, 8], 1), 7);
  assert.equal(scales.valueAtStep([], [], 1), null);
});

test("zooming out past the limits resets", () => {
  assert.equal(scales.zoomedDomain([0, 100], 50, 2, [0, 100]), null);
  assert.deepEqual(scales.zoomedDomain([0, 100], 50, 0.5, [0, 100]), [25, 75]);
});

test("the nearest mark within reach is hit", () => {
  const marks = [{ x: 0, y: 0 }, { x: 10, y: 0 }];
  assert.equal(scales.nearestMark(marks, { x: 8, y: 1 }, 9), marks[1]);
  assert.equal(scales.nearestMark(marks, { x: 30, y: 0 }, 9), null);
  assert.equal(scales.labelStride(4, 11), 3);
});

test("a mark that a triangle would hide stands beside it", () => {
  const mark = (shape, x, y = 0) => ({ shape, x, y });
  const placed = (marks) => scales.setApart(marks, 100).map(({ shape, x }) => [shape, x]);
  assert.deepEqual(placed([mark("triangle", 50), mark("diamond", 52)]), [["diamond", 59], ["triangle", 50]]);
  assert.deepEqual(placed([mark("triangle", 95), mark("diamond", 95)]), [["diamond", 86], ["triangle", 95]]);
  assert.deepEqual(placed([mark("triangle", 50, 9), mark("diamond", 50)])[0], ["diamond", 50]);
});

test("numbers and powers read well", () => {
  assert.equal(format.formatPower(-24), "2⁻²⁴");
  assert.equal(format.formatScale(32768), "2¹⁵");
  assert.equal(format.formatNumber("-inf"), "−∞");
  assert.equal(format.formatNumber("nan"), "NaN");
  assert.equal(format.formatInteger(1234567), "1\u202f234\u202f567");
  assert.equal(
    format.readable("Loss scale: 2**15 -> 2**-14, x = 2**0.5"),
    "Loss scale: 2¹⁵ -> 2⁻¹⁴, x = 2**0.5",
  );
  assert.equal(format.listSome(["a", "b", "c"], 2), "a, b and 1 more");
});

test("each kind of metric has its alarms", () => {
  assert.equal(palette.alarmLevel("headroom", -Infinity), "bad");
  assert.equal(palette.alarmLevel("headroom", 0), "bad");
  assert.equal(palette.alarmLevel("headroom", 1.5), "warning");
  assert.equal(palette.alarmLevel("headroom", -1, true), "beyond");
  assert.equal(palette.alarmLevel("headroom", -Infinity, true), "bad");
  assert.equal(palette.alarmLevel("headroom", 1.5, true), "roomy");
  assert.equal(palette.alarmLevel("count", 1), "bad");
  assert.equal(palette.alarmLevel("error", 0.1), "warning");
  assert.equal(palette.alarmLevel("share", NaN), "none");
});

test("the page knows every unit of keras_mixprec/metrics.py", () => {
  for (const unit of UNITS) {
    assert.ok(palette.LEGENDS[unit], `add "${unit}" to LEGENDS of palette.js, and its colours`);
    assert.ok(metrics.WORDS[unit], `add "${unit}" to WORDS of metrics.js`);
  }
});

test("every value that was measured has a colour", () => {
  const values = [-Infinity, -1, 0, 1e-9, 1e-3, 0.5, 3, 1e9, Infinity];
  for (const kind of UNITS) {
    assert.equal(palette.valueColor(kind, NaN), null);
    for (const value of values) {
      if (kind !== "headroom" && value < 0) continue;
      const color = palette.valueColor(kind, value);
      assert.ok(color.every((channel) => channel >= 0 && channel <= 255), kind);
    }
  }
});

test("all zero has a colour of its own, and so has what a wider dtype holds", () => {
  assert.equal(palette.alarmLevel("headroom", Infinity), "zero");
  const values = [1e9, 24, 20, 15, 10, 5, 2.5, 1, -1, -Infinity];
  const colors = values.map((value) => palette.valueColor("headroom", value).join());
  assert.ok(!colors.includes(palette.valueColor("headroom", Infinity).join()));
  assert.ok(!colors.includes(palette.valueColor("headroom", -1, true).join()));
  assert.equal(metrics.valueInWords("headroom", Infinity), "all values are zero");
  assert.equal(palette.alarmLevel("share", Infinity), "zero");
  assert.equal(metrics.valueInWords("share", Infinity), "all values are zero");
  const share = (value) => palette.valueColor("share", value).join();
  assert.ok(![0, 0.5, 1].map(share).includes(share(Infinity)));
  assert.equal(
    metrics.valueInWords("headroom", -2.5, "float32", "float16"),
    "110 bits left in float32, 2.5 bits beyond float16",
  );
});

test("a layer has at each step the dtype that it was computed in", () => {
  const layer = { compute_dtype: "float32", dtypes: [[0, "float16"], [28, "float32"]] };
  const found = [0, 28, 29].map((step) => precision.dtypeAt(layer, step));
  assert.deepEqual(found, ["float16", "float16", "float32"]);
  assert.equal(precision.widerAt(layer, 28, "float16"), null);
  assert.equal(precision.widerAt(layer, 29, "float16"), "float32");
  assert.equal(precision.dtypeAt({ compute_dtype: "float16" }, 3), "float16");
  assert.ok(precision.isWider("bfloat16", "float16"));
  assert.ok(!precision.isWider("float32", "bfloat16"));
});

test("a finding is repaired once its layer computes in what it needs", () => {
  const layers = [{ path: "a", repaired_verdicts: ["forward_overflow"] }];
  const finding = (verdict) => ({ verdict, layer: "a" });
  assert.ok(precision.isRepaired(finding("forward_overflow"), layers));
  assert.ok(!precision.isRepaired(finding("precision_loss"), layers));
  assert.ok(!precision.isRepaired(finding("forward_overflow"), [{ path: "a" }]));
  assert.ok(!precision.isRepaired({ verdict: "underflow", layer: null }, layers));
});

test("what has room in a wider dtype is none of the colours of the scale", () => {
  const roomy = palette.valueColor("headroom", 5, true);
  for (let bits = 0.1; bits <= 30; bits += 0.1) {
    const color = palette.valueColor("headroom", bits);
    assert.ok(Math.max(...color.map((one, place) => Math.abs(one - roomy[place]))) > 40);
  }
});

test("the ramp grows lighter", () => {
  const light = (rgb) => 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2];
  for (let place = 0; place < 1; place += 0.05) {
    assert.ok(light(palette.rampColor(place)) < light(palette.rampColor(place + 0.05)));
  }
});

// CIE L*a*b* of sRGB, in which a distance of about 2 is just seen.
function labOf(rgb) {
  const linear = rgb.map((channel) => {
    const part = channel / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const rows = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]];
  const [x, y, z] = rows.map((row, place) => {
    const white = [0.95047, 1, 1.08883][place];
    const part = row.reduce((sum, factor, index) => sum + factor * linear[index], 0) / white;
    return part > 0.008856 ? Math.cbrt(part) : 7.787 * part + 16 / 116;
  });
  return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
}

test("two bits of headroom more are seen wherever they are", () => {
  for (let bits = 2; bits <= 22; bits += 1) {
    const [one, two] = [bits, bits + 2].map((value) => labOf(palette.valueColor("headroom", value)));
    assert.ok(one[0] - two[0] > 5, `lightness at ${bits} bits`);
    assert.ok(Math.hypot(...one.map((part, place) => part - two[place])) > 9, `colour at ${bits} bits`);
  }
  // What is close to an alarm is none.
  const apart = labOf(palette.valueColor("headroom", 2)).map((part, place) => {
    return part - labOf(palette.levelColor("warning"))[place];
  });
  assert.ok(Math.hypot(...apart) > 30);
});

test("metrics are grouped by the part of a layer that they are about", () => {
  const groups = metrics.groupMetrics([
    { name: "a", group: "Weights" }, { name: "b", group: "Other" },
    { name: "c", group: "Weights" },
  ]);
  const names = [...groups].map(([group, own]) => [group, own.map((m) => m.name)]);
  assert.deepEqual(names, [["Weights", ["a", "c"]], ["Other", ["b"]]]);
  assert.match(metrics.valueInWords("headroom", -Infinity), /overflow/);
});

function heatBuffer(head, values) {
  let text = JSON.stringify(head);
  text += " ".repeat((4 - (text.length % 4)) % 4);
  const buffer = new ArrayBuffer(4 + text.length + values.length * 2);
  const view = new DataView(buffer);
  view.setUint32(0, text.length, true);
  new Uint8Array(buffer, 4).set(new TextEncoder().encode(text));
  const bits = new Uint32Array(new Float32Array(values).buffer);
  bits.forEach((word, index) => {
    view.setUint16(4 + text.length + index * 2, word >>> 16, true);
  });
  return buffer;
}

const HEAD = {
  layers: ["a", "b"], from: [0, 10, 20], until: [9, 19, 29], pool: "min",
  bad_input: { rows: [1], columns: [2] },
};

test("a heat answer is decoded", () => {
  const values = [1, 2, 3, NaN, -Infinity, 0.5];
  const heat = heatData.decodeHeat(heatBuffer(HEAD, values));
  assert.deepEqual([...heat.values], values);
  assert.deepEqual(heat.layers, ["a", "b"]);
  assert.ok(heatData.isBadInput(heat, 1, 2));
  assert.ok(!heatData.isBadInput(heat, 0, 2));
  assert.ok(!heatData.isBadInput(heat, 1, 0));
});

test("where measuring ended is the last step with any value", () => {
  const values = [1, NaN, NaN, NaN, 2, NaN];
  assert.equal(heatData.lastMeasured({ ...HEAD, values }), 19);
  assert.equal(heatData.lastMeasured({ ...HEAD, values: values.map(() => NaN) }), null);
  assert.equal(heatData.lastMeasured(null), null);
});

test("columns leave no gaps between them", () => {
  const edges = heatData.columnEdges([0, 50, 100], [0, 50, 100]);
  assert.deepEqual(edges, [-25, 25, 75, 125]);
  assert.equal(heatData.columnAt(edges, 24), 0);
  assert.equal(heatData.columnAt(edges, 25), 1);
  assert.equal(heatData.columnAt(edges, 200), -1);
});

test("one bad column stays visible however narrow the picture is", () => {
  const count = 1000;
  const steps = Array.from({ length: count }, (_, step) => step);
  for (const [pool, bad] of [["min", -1], ["max", 9]]) {
    for (const width of [1, 7, 333, 999, 2500]) {
      const values = new Float32Array(count).fill(5);
      values[617] = bad;
      const heat = { layers: ["a"], from: steps, until: steps, pool, values };
      const edges = heatData.columnEdges(steps, steps);
      const scale = scales.linearScale([-0.5, count - 0.5], [0, width]);
      const pixels = heatData.columnsOfPixels(edges, scale, width);
      assert.ok(heatData.poolRow(heat, 0, pixels).values.includes(bad), `${pool} ${width}`);
    }
  }
});

test("calls belong to the layer of the table", () => {
  const paths = new Set(["dense", "odd#1"]);
  assert.equal(heatData.pathOfCall("dense#2", paths), "dense");
  assert.equal(heatData.pathOfCall("odd#1", paths), "odd#1");
});

test("the histogram is the latest at or before the step, else the first", () => {
  const data = { steps: [32, 64], exponents: [[0], [1]], counts: [[5], [6]], low: [0, 1] };
  assert.equal(histogram.histogramAt(data, 63).step, 32);
  assert.equal(histogram.histogramAt(data, 1).step, 32);
  assert.equal(histogram.histogramAt(data, null).step, 64);
  assert.equal(histogram.histogramAt(null, 3), null);
});

test("what is not finite has no place in the histogram, but a share", () => {
  const at = (exponents, counts) => {
    return histogram.histogramAt({
      steps: [1], exponents: [exponents], counts: [counts], low: [null],
    });
  };
  assert.deepEqual(at([128], [8]), { step: 1, bars: [], nonfinite: 1, low: null });
  const mixed = at([0, 1, 128], [2, 4, 2]);
  assert.deepEqual(mixed.bars.map((bar) => bar.exponent), [0, 1]);
  assert.equal(mixed.nonfinite, 0.25);
  assert.equal(at([0], [3]).nonfinite, 0);
});

test("parts that add up are not 99 % of what is all but two", () => {
  assert.equal(histogram.partInWordsOf(36862 / 36864), "99.99\u202f%");
  assert.equal(histogram.partInWordsOf(2 / 36864), "<\u202f0.01\u202f%");
  assert.equal(histogram.partInWordsOf(0.5), "50\u202f%");
  assert.equal(histogram.partInWordsOf(1), "100\u202f%");
});

test("zones follow the format", () => {
  assert.equal(histogram.zoneOf(16, FLOAT16), "overflow");
  assert.equal(histogram.zoneOf(15, FLOAT16), "normal");
  assert.equal(histogram.zoneOf(-15, FLOAT16), "subnormal");
  assert.equal(histogram.zoneOf(-25, FLOAT16), "vanishes");
});

test("events read as sentences, unknown kinds too", () => {
  const skip = { kind: "skipped_step", step: 5, at_step: 4, scale: 1024, variables: [] };
  assert.match(eventText.describeEvent(skip), /2¹⁰/);
  assert.equal(eventText.momentOf(skip), 4);
  const found = { a: ["inf", "nan"], b: ["nan"], c: [] };
  const search = { ...skip, kinds: { a: ["inf", "-inf"] } };
  assert.match(eventText.describeEvent(search), /The loss scale was too high for them: .* harmless/);
  assert.doesNotMatch(eventText.describeEvent({ ...search, loss: ["inf"] }), /harmless/);
  assert.match(eventText.describeEvent({ ...skip, kinds: found }), /not finite \(inf, nan\)\.$/);
  const counts = { inf: 2, "-inf": 0, nan: 1 };
  assert.equal(
    eventText.describeEvent({ kind: "nonfinite_losses", step: 9, counts }),
    "Non-finite loss: inf in 2 batches, nan in 1.",
  );
  assert.equal(
    eventText.describeEvent({
      kind: "nonfinite_gradients", step: 9, optimizer: "d", counts: { nan: 1 },
    }),
    "Non-finite gradients of d: nan in 1 step.",
  );
  const block = {
    kind: "skipped_steps_not_kept", step: 50, first_step: 5, last_step: 12, count: 7,
  };
  assert.equal(
    eventText.describeEvent(block),
    "7 more skipped steps between steps 5 and 12, of which the log has the number alone.",
  );
  assert.equal(eventText.laneOf(block), "skipped");
  assert.equal(eventText.momentOf(block), 5);
  assert.equal(
    eventText.describeEvent({ kind: "new", step: 1, wall_time: 2, x: [1] }),
    'new {"x":[1]}',
  );
  assert.match(eventText.describeEvent({ kind: "toString", step: 1 }), /toString/);
  const scale = {
    kind: "before_training", step: 0, finding: "weights_beyond_format", level: "bad",
    layer: "a", message: "It is 0.", advice: "Scale it.",
  };
  assert.equal(eventText.describeEvent(scale), "Before training: a: It is 0. Scale it.");
  assert.equal(eventText.eventTitle(scale), "weights beyond format");
  assert.equal(eventText.laneOf(scale), "verdicts");
  const kinds = [
    "before_training", "skipped_steps_not_kept", "loss_scale_not_known", "train_begin", "demote", "shrink", "promote", "start", "loss_scaling",
    "give_up", "rebuild", "probe_compiled", "probe_failed", "trend", "first_scale",
    "ranges_measured", "ranges_withheld", "zero_gradients", "graph_rewrite", "ignored_variable",
    "stopped", "train_end", "step_raised", "fit_raised", "diagnosis_failed", "verdict", "log_gap", "plan_not_written",
    "undo", "loss_scale_kept", "loss_scale_low", "loss_scale_recovered", "nonfinite_losses", "nonfinite_gradients", "no_loss_scaling",
  ];
  for (const kind of kinds) {
    const event = { kind, step: 1, wall_time: 0, verdict: "policy" };
    assert.equal(typeof eventText.describeEvent(event), "string");
  }
});

test("each bad batch has its own rows", () => {
  const skip = (at_step, bad_input) => {
    return { kind: "skipped_step", step: 60, at_step, scale: 8, bad_input };
  };
  const members = [skip(51, { x: 3 }), skip(52, { x: 0, y: 7 }), skip(53)];
  assert.deepEqual(eventText.eventDetails({ ...members[0], members }), [
    "batch of step 51: not finite, first in row 3 of the batch's x (rows count from 0)",
    "batch of step 52: not finite, first in row 0 of the batch's x, row 7 of the batch's y (rows count from 0)",
  ]);
  assert.deepEqual(eventText.eventDetails(members[0]), [
    "batch of step 51: not finite, first in row 3 of the batch's x (rows count from 0)",
  ]);
  const batches = [{ epoch: 1, batch: 4, step: 15, rows: { x: 3 } }];
  const all = { kind: "bad_batches", step: 60, count: 1, batches };
  assert.deepEqual(eventText.eventDetails(all), [
    "batch of step 15: not finite, first in row 3 of the batch's x (rows count from 0)",
  ]);
  assert.equal(eventText.describeEvent(all), "Inputs not finite in the batch of step 15.");
  assert.equal(eventText.describeEvent({ ...all, count: 18 }),
    "Inputs not finite in 18 batches, the first at step 15.");
  const numbers = { epoch: 1, batch: 4, batches: "epoch 1 batch 4", samples_of_x: [3, 9] };
  const verdict = { kind: "verdict", verdict: "bad_data", step: 60, numbers };
  assert.deepEqual(eventText.eventDetails(verdict), [
    "samples of x, counted from 0 in the whole array: 3, 9",
  ]);
});

const LAYER = {
  path: "a", class: "Dense", compute_dtype: "float16", verdicts: [],
  demoted_at: null, least_headroom: null,
};

test("a sound run leads to the gravest that has an open finding", () => {
  const row = (run, state, gravity) => ({ run, gravity, headline: { state } });
  const rows = [row("a", "healthy", 19), row("b", "warning", 5), row("c", "failing", 0)];
  assert.deepEqual(summary.graverRun(rows, "a"), { run: "c", state: "failing", others: 1 });
  assert.deepEqual(summary.graverRun(rows, "b"), { run: "c", state: "failing", others: 0 });
  assert.equal(summary.graverRun([rows[0], rows[1], row("f", "warning", 6)], "b"), null);
  assert.equal(summary.graverRun([...rows, row("g", "severe", 3)], "g"), null);
  assert.equal(summary.graverRun([rows[0], row("d", "repaired", 15)], "a"), null);
  // A row that is still to be read has no more than a name.
  assert.equal(summary.graverRun([rows[0], { run: "e", unread: true }], "a"), null);
  assert.equal(summary.graverRun(null, "a"), null);
});

test("the key figures name what the sentence begins with", () => {
  const verdict = (name, step) => ({ kind: "verdict", verdict: name, step });
  const run = {
    last_step: 200, layers: [LAYER], skipped: 4,
    finding: { event: 1, repaired: false, level: "bad" },
    events: [verdict("scale_collapsed", 1), verdict("forward_overflow", 2)],
  };
  const chips = Object.fromEntries(
    summary.keyFigures(run).map((chip) => [chip.name, chip]),
  );
  assert.equal(chips["main finding"].event.step, 2);
  assert.equal(chips["main finding"].text, "▲ forward overflow");
  assert.equal(chips["skipped steps"].text, "4 (2\u202f%)");
});

test("figures say which of several fits they are of", () => {
  const events = [0, 160].map((step) => ({ kind: "train_begin", step }));
  const run = { last_step: 320, layers: [LAYER], skipped: 160, events };
  const shown = Object.fromEntries(summary.keyFigures(run).map(({ name, text }) => [name, text]));
  assert.equal(shown.steps, "320 in 2 fits");
  assert.equal(shown["skipped steps"], "160 of 320 (50\u202f%)");
  assert.equal(fits.lastFit(run), "fit 2 of 2, steps 161 to 320");
  assert.equal(fits.lastFit({ ...run, events: [events[0]] }), null);
});

test("what float32 products are computed in does not look like the dtype of the run", () => {
  const run = { last_step: 1, layers: [LAYER], skipped: 0, events: [] };
  const text = "TF32, convolutions in float32, set on JAX on a GPU";
  const chips = summary.keyFigures({ ...run, matmul_precision: text });
  const chipOf = (found) => found.find(({ name }) => name === "float32 products");
  assert.equal(chipOf(chips).text, "in TF32");
  assert.match(chipOf(chips).title, /^no dtype of the run: .* multiplied in TF32, convolutions in float32, set on/);
  const full = summary.keyFigures({ ...run, matmul_precision: "float32, all that torch on this CPU has" });
  assert.equal(chipOf(full).text, "in full precision");
  assert.equal(summary.keyFigures(run).length, chips.length - 1);
});

test("the key figures have the share of FLOPs in 16 bits before and after", () => {
  const run = { last_step: 1, layers: [LAYER], skipped: 0, events: [] };
  const shown = (share_of_flops) => summary.keyFigures({ ...run, share_of_flops })
    .find(({ name }) => name === "FLOPs in 16 bits")?.text;
  assert.equal(shown({ before: 0.993, now: 0.83 }), "99.3\u202f% → 83\u202f%");
  assert.equal(shown({ before: 1, now: 1 }), "100\u202f%");
  assert.equal(shown({ before: null, now: null }), undefined);
});

test("how fast beside float32 is said of a run that is all in float32 alone", () => {
  const low = runOf("low", { samples_per_second: 1900 }, ["float16"]);
  const wide = runOf("wide", { samples_per_second: 1000 }, ["float32"]);
  assert.equal(comparison.speedAgainstFloat32(low, wide), "Faster than in float32, at 1.9x (1.9x to 1.9x) the speed of wide.");
  const [lossy, exact] = [{ ...low, loss: { values: [2, 0.907] } }, { ...wide, loss: { values: [0.159] } }];
  assert.match(comparison.speedAgainstFloat32(lossy, exact), /wide; last loss 0.907 \(there: 0.159\)\.$/);
  assert.match(comparison.comparison(lossy, exact), /; last loss 0.907 \(wide: 0.159\); /);
  assert.equal(comparison.speedAgainstFloat32(wide, low), null);
  assert.equal(comparison.speedAgainstFloat32(low, null), null);
  const larger = { ...wide, layers: [...wide.layers, { path: "b", compute_dtype: "float32" }] };
  assert.equal(comparison.speedAgainstFloat32(low, larger), null);
});

test("a repaired finding is green", () => {
  const layers = [{ ...LAYER, repaired_verdicts: ["forward_overflow"] }];
  const events = [{ kind: "verdict", verdict: "forward_overflow", step: 1, layer: "a" }];
  const run = { last_step: 9, layers, skipped: 0, events };
  const shown = (repaired) => summary.keyFigures({
    ...run, finding: { event: 0, repaired, level: "bad" },
  }).at(-1);
  assert.equal(shown(true).level, "fine");
  assert.equal(shown(true).text, "✓ forward overflow, repaired");
  assert.equal(shown(false).level, "bad");
});

test("a finding is as grave as Python says, wherever it stands", () => {
  for (const level of ["bad", "warning", "info"]) {
    const event = { kind: "verdict", verdict: "underflow", step: 1, layer: "a", level: "info" };
    const finding = { event: 0, repaired: false, level };
    assert.equal(summary.keyFigures({
      last_step: 9, layers: [LAYER], skipped: 0, events: [event], finding,
    }).at(-1).level, level);
    assert.equal(summary.describeVerdict({ ...event, level }, []).level, level);
  }
});

test("a run that nothing was measured of is not green", () => {
  const run = { last_step: 9, layers: [LAYER], skipped: 0, events: [], finding: null };
  const shown = (more) => summary.keyFigures({ ...run, ...more }).at(-1);
  const unknown = shown({ headline: { text: "", state: "not_measured" } });
  assert.deepEqual([unknown.text, unknown.level], ["not measured", undefined]);
  assert.equal(shown({ headline: { state: "healthy" } }).level, "fine");
  const zero = { kind: "zero_gradients", step: 9, message: "a" };
  const found = shown({ events: [zero], finding: { event: 0, repaired: false, level: "warning" } });
  assert.deepEqual([found.text, found.level], ["◆ zero gradients", "warning"]);
  assert.equal(summary.STATES.not_measured.level, "unknown");
});

const BLOCK = [
  "", "/self_attention", "/self_attention/query", "/self_attention/attention_output",
  "/self_attention_layer_norm", "/feedforward_intermediate_dense",
];
const DEEP = ["token_embedding", ...[...Array(12).keys()].flatMap((block) => {
  return BLOCK.map((part) => `bert_base_en_backbone/transformer_encoder_${block}${part}`);
}), "pool"];

test("what tells long names apart stays visible", () => {
  const labels = names.shortNames(DEEP, 32);
  const label = (block, part) => {
    return labels.get(`bert_base_en_backbone/transformer_encoder_${block}${part}`);
  };
  assert.equal(label(11, BLOCK[2]), "…encoder_11/self_attention/query");
  assert.equal(label(3, BLOCK[3]), "…encoder_3/…/attention_output");
  assert.equal(labels.get("pool"), "pool");
  assert.match(label(7, BLOCK[5]), /^…encoder_7\/feed.*ate_dense$/);
});

test("no two labels are alike, and none is longer than it may be", () => {
  const equal = (count) => [...Array(count).keys()].map((n) => {
    return `${"x".repeat(50)}${n}${"y".repeat(50)}`;
  });
  const towers = ["text", "image"].flatMap((tower) => DEEP.map((path) => {
    return `${tower}_encoder_with_a_name/${path}`;
  }));
  for (const paths of [DEEP, equal(200), towers, ["a"], []]) {
    for (const length of [20, 32, 36]) {
      const labels = [...names.shortNames(paths, length).values()];
      assert.equal(new Set(labels).size, paths.length);
      assert.ok(labels.every((label) => label.length <= length));
    }
  }
});

test("runs are told apart without what both end with", () => {
  assert.equal(names.shortRun("tuned/mixprec", "float16/mixprec"), "tuned");
  assert.equal(names.shortRun("mixprec", "a/mixprec"), "mixprec");
  assert.equal(names.shortRun("tuned/mixprec"), "tuned/mixprec");
});

test("the newest run that can be read is shown first, and one in 16 bits before one in float32", () => {
  const runs = [
    { run: "a", written: 1 }, { run: "b", written: 3 }, { run: "c", written: 2 },
    { run: "d", written: 4, newer_schema: true },
  ];
  assert.equal(wanted.firstShown(runs), "b");
  assert.equal(wanted.firstShown([]), null);
  assert.equal(wanted.firstShown([runs[3]]), "d");
  const wide = { run: "wide", written: 9, in_16_bits: false };
  assert.equal(wanted.firstShown([...runs, wide]), "b");
  assert.equal(wanted.firstShown([wide, { ...runs[0], in_16_bits: true }]), "a");
  assert.equal(wanted.firstShown([wide, runs[3]]), "wide");
});

test("what is beyond 16 bits is no fault of a layer in float32", () => {
  const state = (bits, type) => summary.describeHeadroom(bits, type, "float16");
  assert.deepEqual(state(-3, "float16"), { level: "bad", text: "▲ overflow" });
  assert.deepEqual(state(-3, "float32"), { level: "beyond", text: "beyond float16" });
  assert.deepEqual(state(1.25, "float32"), { level: "roomy", text: "113 bits" });
  assert.deepEqual(state(Infinity, "float16"), { level: "zero", text: "all zero" });
  assert.deepEqual(state(-Infinity, "float32"), { level: "bad", text: "▲ not finite" });
  assert.deepEqual(state(1.25, "float16"), { level: "warning", text: "1.3 bits" });
});

test("sorting keeps missing values last both ways", () => {
  const layers = [3, null, 1].map((value) => ({ value }));
  const values = (descending) => layerColumns.sortLayers(
    layers, (layer) => layer.value, descending,
  ).map((layer) => layer.value);
  assert.deepEqual(values(false), [1, 3, null]);
  assert.deepEqual(values(true), [3, 1, null]);
});

test("the filter matches all its words", () => {
  assert.ok(layerColumns.matchesFilter(LAYER, "dense float16"));
  assert.ok(!layerColumns.matchesFilter(LAYER, "dense float32"));
  for (const text of ["fp16", "half", "FP16 den", "16", "float16"]) {
    assert.ok(layerColumns.matchesFilter(LAYER, text), text);
  }
  const wide = { ...LAYER, compute_dtype: "bfloat16", verdicts: ["forward_overflow"] };
  assert.ok(layerColumns.matchesFilter(wide, "bf16 16 forward overflow"));
  assert.ok(!layerColumns.matchesFilter(wide, "float16"));
});

test("links are read and written", () => {
  const state = { run: "a/b", layer: "x y#1", step: 3, compare: null };
  assert.deepEqual(link.readHash(link.writeHash(state)), {
    run: "a/b", layer: "x y#1", step: 3,
  });
  assert.deepEqual(link.readLink({ part: "constructor", step: "x" }), {});
  assert.equal(
    link.hostLink("http://h/", { run: "a", step: 3 }),
    "http://h/#mixed_precision&p.mixed_precision.run=a&p.mixed_precision.step=3",
  );
});

test("a link made for TensorBoard is read back", () => {
  const state = { run: "a b/c+d", layer: "x&y=1#2", step: 0 };
  const { hash } = new URL(link.hostLink("http://h/", state));
  assert.deepEqual(link.readHostHash(hash), state);
});

test("paths are asked for only once their run can be read", () => {
  const runs = [{ run: "a", newer_schema: false }, { run: "b", newer_schema: true }];
  const state = { runs, run: "b", compare: null, metric: "m", part: "activation",
    layer: null, runData: null, compareData: null };
  assert.ok(Object.values(wanted.wantedPaths(state)).every((path) => path === null));
  const runData = {
    run: "a", events: [], layers: [], heat: { metrics: [{ name: "m" }] },
    histograms: { activation: ["l"] },
  };
  assert.deepEqual(wanted.wantedPaths({ ...state, run: "a", runData }), {
    runData: "./data/run?run=a",
    compareData: null,
    heat: "./data/heat?run=a&metric=m",
    compareHeat: null,
    partHeat: null,
    ranges: null,
    compareRanges: null,
    histogram: "./data/histogram?run=a&layer=l&part=activation",
    summaries: "./data/summaries",
    partHeat: null,
    ranges: null,
    compareRanges: null,
  });
  const near = { ...state, run: "a", compare: "b", runData, wantsRanges: true };
  const { ranges, compareRanges } = wanted.wantedPaths(near);
  assert.deepEqual([ranges, compareRanges], ["./data/ranges?run=a", null]);
});

test("a loss that hardly moves does not look like one that falls", () => {
  assert.deepEqual(lossCurve.lossAxis([0.5, 2.5]), [0.5, 2.5]);
  const [low, high] = lossCurve.lossAxis([2.29, 2.31]);
  // A tenth of 2.31, with 2.3 in the middle.
  assert.ok(Math.abs(high - low - 0.231) < 1e-12 && Math.abs(low + high - 4.6) < 1e-12);
  assert.deepEqual(lossCurve.lossAxis([0, 0]), [0, 0]);
  assert.deepEqual(scales.niceTicks(0.004, 0.011, 4, 0), [0.004, 0.006, 0.008, 0.01]);
});

test("a store tells only those whose keys changed", () => {
  const store = createStore({ a: 1, b: 2 });
  const heard = [];
  store.on(["a"], (state) => heard.push(state.a));
  store.set({ b: 3 });
  store.set({ a: 1 });
  store.set({ a: 2 });
  assert.deepEqual(heard, [2]);
});

// What two runs are compared by, of a reading every 10 steps.
const speedOfRun = (figures, off = 0.001) => ({
  skipped: 0, lacks: null,
  medians: Object.fromEntries(["samples_per_second", "step_time"].filter((name) => figures[name])
    .map((name) => [name, { median: figures[name], off: off * figures[name] }])),
});

const runOf = (name, figures, types, lacks = null) => ({
  run: `${name}/mixprec`,
  layers: types.map((type) => ({ compute_dtype: type })),
  policy: types.includes("float16") ? "mixed_float16" : "float32",
  performance: {
    figures: Object.entries({ measured_steps: 60, ...figures })
      .map(([key, value]) => ({ name: key, value, values: [value] })),
    speed: { ...speedOfRun(figures), lacks },
  },
});

test("two runs are compared in a line, by what is known of both", () => {
  const wide = { samples_per_second: 1000, step_time: 0.1, peak_memory: 5e9 };
  const low = { samples_per_second: 1900, step_time: 0.05, peak_memory: 2.95e9 };
  const [one, other] = [
    runOf("tuned", low, ["float16", "float32", "float32"]), runOf("wide", wide, []),
  ];
  assert.equal(comparison.comparison(one, other),
    "tuned is faster than wide, at 1.9x (1.9x to 1.9x) its speed; 41\u202f% less peak memory; " +
    "compiled with mixed_float16 (wide: float32)");
  assert.equal(comparison.comparison(other, one),
    "wide is slower than tuned, at 0.53x (0.53x to 0.53x) its speed; 69\u202f% more peak memory; " +
    "compiled with float32 (tuned: mixed_float16)");
  for (const { performance } of [one, other]) {
    performance.figures = [];
    delete performance.speed.medians.samples_per_second;
  }
  assert.equal(comparison.comparison(one, other),
    "tuned is faster than wide, at 2.0x (2.0x to 2.0x) its speed; peak memory not measured; " +
    "compiled with mixed_float16 (wide: float32)");
  assert.match(comparison.comparison(one, { ...other, performance: null }), /: speeds not known; /);
});

test("memory that was not measured is none that outputs of 16 bits do not save", () => {
  const [low, wide] = [["low", 0.5], ["wide", 0]].map(([name, output_bytes_saved]) =>
    runOf(name, { step_time: 1, output_bytes_saved }, []));
  const said = "peak memory not measured; by their dtypes its layers' outputs take 50\u202f% less";
  assert.equal(speed.memoryBeside(low, wide), said);
  // Rows of the table of runs say the same.
  assert.equal(speed.memoryBeside({ output_bytes_saved: 0.5 }, { output_bytes_saved: 0 }), said);
  assert.equal(speed.memoryBeside({ peak_memory: 1 }, { peak_memory: 2 }), "50\u202f% less peak memory");
});

test("a run in 16 bits lacks one in float32 until it is compared with it", () => {
  const [low, wide] = [runOf("a/low", {}, ["float16"]), runOf("wide", {}, ["float32"])];
  const lacks = (state) => float32Run.missingFloat32({ runs: [{}, {}], runData: low, ...state });
  const rows = [
    { run: low.run, layers: 1, policy: "mixed_float16" }, { run: wide.run, layers: 1, policy: "float32" },
  ];
  assert.equal(lacks({ summaries: rows }), wide.run);
  assert.equal(lacks({ summaries: rows, compareData: wide }), null);
  // Of one in float32 the same is seen beside the one in 16 bits.
  assert.equal(lacks({ summaries: rows, runData: wide }), low.run);
  assert.equal(lacks({ summaries: rows, runData: wide, compareData: low }), null);
  assert.equal(lacks({ summaries: [rows[1]], runData: wide }), null);
  assert.equal(lacks({ summaries: [rows[0], { run: "b", unread: true }] }), null);
  assert.equal(lacks({ summaries: [rows[0]] }), "");
  // That of another model.
  assert.equal(lacks({ summaries: [{ run: wide.run, layers: 2, policy: "float32" }] }), "");
  assert.equal(lacks({ runs: [{}] }), "");
});

const float32Code = await load("float32_code");
const worth = await load("worth");
const FEW = { what: "readings", text: "3 readings of the time of a step, 5 are needed" };

test("the code for a run in float32 makes one that can be compared", () => {
  const code = (run, settings, more = {}) => float32Code.float32Code({
    ...runOf(run, {}, ["float16"]), last_step: 400, events: [{ kind: "train_begin", step: 0, settings }], ...more,
  });
  assert.match(code("a/low", {}), /MixPrecMonitor\("logs\/a\/float32"\)$/);
  assert.match(code("low", {}, { run: "mixprec" }), /MixPrecMonitor\("logs\/float32"\)/);
  assert.match(code("a/low", { log_dir: "/tmp/runs/a/low" }), /MixPrecMonitor\("\/tmp\/runs\/a\/float32"\)/);
  // As often as this run was read.
  assert.match(code("low", { update_freq: 4, max_overhead: 0.02, probe_every: 0 }),
    /MixPrecMonitor\("logs\/float32", update_freq=4, probe_every=0\)/);
  const { performance } = runOf("low", {}, ["float16"], FEW);
  assert.match(code("low", { update_freq: 50, probe_every: 1 }, { performance }),
    /MixPrecMonitor\("logs\/float32", update_freq=40, max_overhead=1\)/);
  // One that cannot be compared since it skipped its steps was read as rarely.
  const skipped = runOf("low", {}, ["float16"], { what: "trained", text: "all of the timed steps skipped" });
  assert.match(code("low", {}, { performance: skipped.performance, last_step: 200 }),
    /MixPrecMonitor\("logs\/float32", update_freq=20, max_overhead=1\)/);
  assert.match(code("low", {}, { performance: skipped.performance, last_step: 500 }), /MixPrecMonitor\("logs\/float32"\)/);
});

test("a run that no other can be compared with says so before it asks for one", () => {
  const run = (lacks, last_step) => ({ ...runOf("low", {}, ["float16"], lacks), last_step, events: [] });
  const advice = (...of) => float32Code.lackAdvice(run(...of));
  assert.equal(advice(null, 400), "");
  assert.equal(advice(FEW, 200), " Its speed could not be compared with that of any other, since it has " +
    "3 readings of the time of a step, 5 are needed. Train it again first, with " +
    "MixPrecMonitor(..., update_freq=20, max_overhead=1).");
  assert.match(advice(FEW, 30), /again first, for 100 steps at least and with .*update_freq=10, max/);
  const skipped = { what: "trained", text: "all of the timed steps skipped: no speed of training" };
  assert.match(advice(skipped, 400), /no speed of training\. Repair it first, as said on top\.$/);
  assert.match(float32Code.lackAdvice({ ...run(null, 400), performance: null }), /has no timed step\. Train it again/);
});

test("a run in float32 that was read too rarely is to be made again", () => {
  const run = { ...runOf("low", { step_time: 1 }, ["float16"]), last_step: 200, events: [] };
  const row = (lacks) => ({ run: "wide/mixprec", speed: { ...speedOfRun({ step_time: 1 }), lacks } });
  const found = "Was it worth it? This is seen beside wide/mixprec, which was compiled with float32.";
  assert.equal(float32Run.partnerInWords(run, row(null)), found);
  assert.equal(float32Run.partnerInWords(run, row(FEW)), `${found} Their speeds cannot be compared: wide has ` +
    "3 readings of the time of a step, 5 are needed. Train what has too few again, with " +
    "MixPrecMonitor(..., update_freq=20, max_overhead=1).");
});

test("a run that a tuner moved to float32 is none to compare with", () => {
  const low = { ...runOf("low", { step_time: 1 }, ["float16"]), share_of_flops: { now: 0.934 } };
  const moved = { ...runOf("moved", { step_time: 2 }, ["float32"]), share_of_flops: { now: 0 } };
  const wide = { ...moved, run: "wide/mixprec" };
  moved.policy = "mixed_float16";
  assert.equal(comparison.speedAgainstFloat32(low, moved), null);
  const lacks = float32Run.missingFloat32({ runs: [{}], runData: moved, summaries: [] });
  assert.equal(lacks, "");
  assert.equal(comparison.comparison(low, moved),
    "low is faster than moved, at 2.0x (2.0x to 2.0x) its speed; peak memory not measured; both compiled with " +
    "mixed_float16; 93\u202f% of FLOPs in 16 bits (moved: 0\u202f%)");
  assert.equal(comparison.comparison(wide, moved), comparison.comparison(moved, wide));
  // What it computes nothing in was not worth anything in it.
  assert.match(comparison.comparison(moved, wide),
    /^moved against wide: .*; compiled with mixed_float16 \(wide: float32\); 0\u202f% of FLOPs/);
  const none = "This run computed nothing in 16 bits: what they would bring it does not show.";
  assert.equal(float32Run.nothingIn16Bits(moved), none);
  assert.equal(float32Run.nothingIn16Bits({ ...moved, layers: [
    { compute_dtype: "float32", dtypes: [[0, "float16"], [50, "float32"]] },
  ] }), none.replace(":", " after step 50:"));
  assert.deepEqual([low, wide].map(float32Run.nothingIn16Bits), ["", ""]);
  const row = (run) => ({ ...run, layers: 1, speed: run.performance.speed });
  assert.equal(worth.worthInWords([row(moved), row(wide)], moved), null);
  assert.equal(worth.partnerOf([row(moved), row(low)], wide, false).run, low.run);
});

test("the speed of a run with an open finding does not recommend it", () => {
  const figures = { samples_per_second: 1900, step_time: 0.05 };
  const sound = runOf("wide", { samples_per_second: 1000, step_time: 0.1 }, ["float32"]);
  const event = { kind: "verdict", verdict: "forward_overflow", layer: "a", level: "bad" };
  const broken = {
    ...runOf("broken", figures, ["float16"]), events: [event],
    finding: { event: 0, repaired: false },
  };
  const end = "; open finding of broken: forward overflow";
  assert.ok(comparison.comparison(broken, sound).endsWith(end));
  assert.ok(comparison.comparison(sound, broken).endsWith(end));
  const beside = comparison.speedAgainstFloat32({ ...broken, layers: sound.layers }, sound);
  assert.match(beside, /the speed of wide; open finding: forward overflow\.$/);
  broken.finding.repaired = true;
  assert.doesNotMatch(comparison.comparison(broken, sound), /open/);
});

test("a difference in speed is told only where it is more than the spread", () => {
  const run = (name, factor, lacks = null) => {
    const made = runOf(name, {}, ["float32"], lacks);
    made.performance.speed.medians = { samples_per_second: { median: factor * 99, off: factor * 5 } };
    return made;
  };
  const { ratio, low, high } = speed.speedRatio(run("a", 1.1), run("b", 1));
  assert.ok(Math.abs(ratio - 1.1) < 1e-12);
  assert.ok(Math.abs(low - 1.1 * 94 / 104) < 1e-9);
  assert.ok(Math.abs(high - 1.1 * 104 / 94) < 1e-9);
  assert.match(comparison.speedAgainstFloat32(run("a", 1.1), run("b", 1)), /^No difference .* seen/);
  assert.match(comparison.speedAgainstFloat32(run("a", 2), run("b", 1)), /^Faster than in float32, at 2.0x \(1.8x to 2.2x\) the speed of b/);
  const short = run("b", 1, { what: "steps", text: "19 steps measured, 20 are needed" });
  assert.equal(comparison.speedAgainstFloat32(run("a", 2), short), null);
  assert.match(comparison.comparison(run("a", 2), short), /not compared: b has 19 steps measured, 20 are needed/);
  assert.match(comparison.comparison(run("a", 1, FEW), run("b", 1, FEW)), /both have 3 readings of the time of a step, 5 are needed/);
});

test("two times of a step are not taken for each other", () => {
  const figures = { step_time: 0.0367, step_time_median: 0.0238 };
  assert.deepEqual(speed.aboutSpeed(runOf("a", figures, [])), ["The step time is the mean, which a few slow " +
    "steps raise: half of the steps took at most 23.8\u202fms."]);
  assert.deepEqual(speed.aboutSpeed(runOf("a", { ...figures, step_time: 0.025 }, [])), []);
});

test("the speed of skipped steps is said to be none of training", () => {
  const lack = { what: "trained", text: "97% of the timed steps skipped: no speed of training" };
  assert.deepEqual(speed.aboutSpeed(runOf("a", { step_time: 1 }, [], lack)),
    ["This run has 97% of the timed steps skipped: no speed of training, since a step that updates no " +
      "weights takes less time."]);
});

test("a figure is written by its unit", () => {
  assert.equal(format.formatAmount(0.0021, "seconds"), "2.1\u202fms");
  assert.equal(format.formatAmount(4.5e-5, "seconds"), "45\u202fµs");
  assert.equal(format.formatAmount(2.5e9, "bytes"), "2.33\u202fGiB");
  assert.equal(format.formatAmount(13850.4, "rate"), "13\u202f850");
  assert.equal(format.formatAmount(null, "share"), "–");
  assert.equal(format.formatAmount(0.99974, "share"), "99.97\u202f%");
  assert.equal(format.formatAmount(1, "share"), "100\u202f%");
});

test("events of the tuner and the end of training are whole sentences", () => {
  const start = { kind: "start", step: 65, message: "starts from plan.json" };
  assert.equal(eventText.describeEvent(start), "The tuner starts from plan.json.");
  const summary = "Mixed precision: a overflowed; 3 steps,\n    none skipped.\nLayers: 1.";
  assert.equal(
    eventText.describeEvent({ kind: "train_end", step: 3, summary }),
    "Mixed precision: a overflowed; 3 steps, none skipped.",
  );
});

test("a verdict says since when steps have failed", () => {
  const event = {
    kind: "verdict", verdict: "forward_overflow", layer: "a", step: 3, failing_since: 2, advice: "Do.",
  };
  assert.equal(eventText.describeEvent(event), "a, failing since step 2: Do.");
});

const eventGroups = await load("event_groups");

test("steps skipped in a row are one event, of each optimizer its own", () => {
  const skip = (at_step, more = {}) => {
    return { kind: "skipped_step", step: at_step + 1, at_step, scale: 2 ** (9 - at_step), ...more };
  };
  const events = [
    skip(1), skip(1, { optimizer: "d" }), skip(2), { kind: "verdict", step: 3 }, skip(3), skip(5),
  ];
  const shown = eventGroups.groupEvents(events);
  assert.deepEqual(shown.map((event) => event.members?.length ?? 1), [3, 1, 1, 1]);
  assert.match(
    eventText.describeEvent(shown[0]),
    /^3 updates skipped in a row, steps 1 to 3, at loss scale 2⁸ → 2⁶/,
  );
  assert.ok(eventGroups.isChosenEvent(shown[0], eventText.eventKey(events[4])));
  assert.equal(eventGroups.lastMomentOf(shown[0]), 3);
});

test("layers are in blocks by their folders, and a folder of one is none", () => {
  const layer = (path, bits = 9) => ({ ...LAYER, path, least_headroom: bits });
  const tree = layerBlocks.layerTree(
    ["a/b/x", "a/b/y", "a/c/z", "only/one", "flat"].map((path) => layer(path)),
  );
  assert.deepEqual(layerBlocks.allBlocks(tree).map(({ block }) => block), ["a", "a/b"]);
  assert.deepEqual(layerBlocks.blocksToFold(tree, 5), ["a/b"]);
  const choice = { keeps: () => true, folded: new Set(["a/b"]) };
  const rows = layerBlocks.layerRows(tree, choice);
  const shown = rows.map((row) => row.block ?? row.layer.path);
  assert.deepEqual(shown, ["a", "a/b", "a/c/z", "only/one", "flat"]);
});

test("of a block the worst is told, in which a wider dtype is no fault", () => {
  const wide = { ...LAYER, compute_dtype: "float32", least_headroom: -3 };
  const low = { ...LAYER, least_headroom: 1 };
  assert.equal(layerColumns.worstLayer([wide, low, LAYER], "float16"), low);
  assert.ok(layerBlocks.hasProblem(low, "float16"));
  assert.ok(!layerBlocks.hasProblem(wide, "float16"));
});

const exportsOf = await load("exports");

test("a table as CSV quotes what has a comma, a quote or a line in it", () => {
  assert.equal(
    exportsOf.csvOf([{ a: 1, b: 'x,"y"' }, { a: null, c: ["z"] }]),
    'a,b,c\r\n1,"x,""y""",\r\n,,"[""z""]"\r\n',
  );
});

test("no cell of a CSV is a formula, and numbers stay numbers", () => {
  const cells = ["=1+1", "@a", "+a", "-a", " =a", "\ta", "-1e-3", "dense", "-inf"];
  const lines = exportsOf.csvOf(cells.map((cell) => ({ "=cell": cell })));
  const shown = ["'=cell", "'=1+1", "'@a", "'+a", "'-a", "' =a", "'\ta", "-1e-3", "dense", "-inf"];
  assert.equal(lines, [...shown, ""].join("\r\n"));
  assert.equal(exportsOf.csvOf([{ a: -3 }, { a: -Infinity }]), "a\r\n-3\r\n-inf\r\n");
});

test("a loss has a gap where it is not finite, and the scale of what is in view", () => {
  const loss = { steps: [2, 4, 6, 8, 10], values: [9, 1, "nan", 3, 2] };
  const found = lossCurve.finiteStretches(loss);
  assert.deepEqual(found, [[[2, 9], [4, 1]], [[8, 3], [10, 2]]]);
  assert.deepEqual(lossCurve.lossRange([found], [0, 20]), [1, 9]);
  assert.deepEqual(lossCurve.lossRange([found], [5, 20]), [2, 3]);
  assert.equal(lossCurve.lossRange([found], [11, 20]), null);
  assert.deepEqual(lossCurve.finiteStretches(null), []);
});

test("where a loss is not finite is marked and said", () => {
  const loss = { steps: [50, 100, 150, 200], values: [9, "nan", "nan", 2] };
  assert.deepEqual(lossCurve.lossGaps(loss), [[50, 150]]);
  assert.match(lossCurve.gapsInWords(loss), /^NaN or infinite in 2 of 4 readings: marked/);
  const lost = { steps: [50, 200], values: ["nan", "nan"] };
  assert.deepEqual(lossCurve.lossGaps(lost), [[0, 200]]);
  assert.equal(lossCurve.gapsInWords(lost), "NaN or infinite in all 2 readings, up to step 200");
  assert.equal(lossCurve.gapsInWords({ steps: [1], values: [2] }), "");
});

test("an only reading does not squash the curve of another run", () => {
  const [dot, curve] = [[[[50, 10812]]], [[[50, 0.6], [100, 0.1]]]];
  assert.deepEqual(lossCurve.scaledCurves([dot, curve]), [curve]);
  assert.deepEqual(lossCurve.scaledCurves([dot]), [dot]);
});

test("a loss says up to which step it is a mean", () => {
  const loss = { steps: [50, 64], values: [0.5, "NaN"] };
  assert.equal(lossCurve.lossInWords(loss, 10), "0.5, mean up to step 50");
  assert.equal(lossCurve.lossInWords(loss, 63), "0.5, mean up to step 50");
  assert.equal(lossCurve.lossInWords(loss, 64), "NaN, mean up to step 64");
  assert.equal(lossCurve.lossInWords(null, 64), null);
});

test("the second call of a layer is called so", () => {
  assert.equal(names.callName("dense#1", new Set(["dense"])), "dense, call 2");
  assert.equal(names.callName("dense#1", new Set(["dense#1"])), "dense#1");
});

test("no two modules define the same name, since the page is one script", async () => {
  const { readdirSync, readFileSync } = await import("node:fs");
  const defined = readdirSync(folder).filter((name) => name.endsWith(".js")).flatMap((name) => {
    const source = readFileSync(`${folder}/${name}`, "utf8");
    const starts = /^(?:export )?(?:async )?(?:function|const|let|class) (\w+)/gm;
    return [...source.matchAll(starts)].map(([, found]) => found);
  });
  const twice = defined.filter((name, index) => defined.indexOf(name) !== index);
  assert.deepEqual(twice, []);
});
