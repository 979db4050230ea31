// What is a fault of a format and what is not, as the page says and colours it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

const folder = fileURLToPath(
  new URL("../keras_mixprec/tensorboard_plugin/static", import.meta.url),
);
const load = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);
const whatIf = await load("what_if");
const map = await load("model_map");
const heatRows = await load("heat_rows");
const metrics = await load("metrics");
const palette = await load("palette");
const wanted = await load("wanted");
const eventText = await load("event_text");
const format = await load("format");
const course = await load("course");
const difference = await load("difference");
const { insideInWords } = await load("inside");

const FLOAT16 = {
  name: "float16", maximum_bits: Math.log2(65504), maximum_exponent: 16, normal_exponent: -14,
  subnormal_exponent: -24,
};
const HEADROOM = { name: "activation_headroom_bits", kind: "headroom" };
const ERROR = { name: "forward_error_against_float32", kind: "error" };

const layer = (path, more = {}) => ({
  path, compute_dtype: "float16", dtypes: [[0, "float16"]], demoted_at: null, inside: null,
  verdicts: [], least_headroom: 9, share_of_flops: 0.5, fed_by: [], ...more,
});
const heat = (values, more = {}) => ({
  layers: ["a"], from: [0, 1, 2], until: [0, 1, 2], pool: "min", values,
  badInput: { rows: new Set(), columns: new Set() }, ...more,
});
const BAD = { badInput: { rows: new Set([0]), columns: new Set([1]) } };

function stateOf(values, own, metric, more = {}) {
  const worst = map.worstByLayer(
    heat(values, more), new Map([["a", own]]), (call) => call, metric.kind,
  );
  return map.describeReading(worst.get("a"), own, metric, FLOAT16);
}

test("a batch that was not finite is no overflow under a pixel", () => {
  const pixels = { first: Int32Array.of(0, 1), last: Int32Array.of(0, 2) };
  const never = () => false;
  const found = heatRows.poolRows(heat([9, NaN, 5], BAD), [0], pixels, "headroom", never);
  assert.deepEqual([...found.ranks].map((rank) => heatRows.GRAVEST[rank]), ["quiet", "input"]);
  assert.equal(found.columns[1], 1);
  const worse = heatRows.poolRows(heat([9, NaN, -1], BAD), [0], pixels, "headroom", never);
  assert.equal(heatRows.GRAVEST[worse.ranks[1]], "bad");
  assert.notDeepEqual(palette.levelColor("input"), palette.levelColor("bad"));
});

test("the map leaves out batches that were not finite", () => {
  assert.equal(stateOf([9, NaN, 5], layer("a"), HEADROOM, BAD).words, "5 bits left");
  const nothing = stateOf([NaN, NaN, NaN], layer("a"), HEADROOM, BAD);
  assert.deepEqual([nothing.words, nothing.level], [metrics.BAD_INPUT, "input"]);
  assert.equal(stateOf([NaN, NaN, NaN], layer("a"), HEADROOM).words, "not measured");
  assert.match(metrics.leftOut([1500, 2000]), /steps 1\u202f500, 2\u202f000 \(bad data\)/);
  assert.equal(metrics.leftOut([]), "");
});

test("the map is of what is so since a repair", () => {
  const own = layer("a", { compute_dtype: "float32", dtypes: [[0, "float16"], [1, "float32"]] });
  assert.equal(stateOf([-Infinity, -Infinity, 5], own, HEADROOM).words,
    "117 bits left in float32, 5 bits if it were float16");
  const before = stateOf([0.999, NaN, NaN], own, ERROR, { pool: "max" });
  assert.equal(before.words, "relative error 0.999 before the first step, before it was in float32");
  assert.equal(before.level, "beyond");
  const first = { ...own, dtypes: [[0, "float32"]], demoted_at: 0 };
  assert.match(stateOf([0.999, NaN, NaN], first, ERROR, { pool: "max" }).words, /before it was/);
  assert.equal(stateOf([0.999, NaN, NaN], layer("a"), ERROR, { pool: "max" }).level, "warning");
});

test("a repaired layer leaves no mark of an alarm", () => {
  const [bad, quiet] = ["bad", "quiet"].map((level) => heatRows.GRAVEST.indexOf(level));
  const row = { ranks: [bad, quiet], columns: [0, 1] };
  assert.ok(heatRows.isBadSince(row, { until: [5, 9] }, 4));
  assert.ok(!heatRows.isBadSince(row, { until: [5, 9] }, 5));
});

test("an overflow inside of a layer is said with what float16 holds", () => {
  const own = layer("a", { inside: { step: 80, largest: 4125380 }, least_headroom: -6 });
  const { words, level } = stateOf([9, 9, 9], own, HEADROOM);
  assert.match(words, /^overflow inside the layer: numbers up to .*float16 holds up to 65\u202f504/);
  assert.equal(level, "bad");
  const wide = { ...own, compute_dtype: "float32" };
  assert.equal(stateOf([9, 9, 9], wide, HEADROOM).level, "beyond");
  assert.match(insideInWords(wide, FLOAT16).long, /^beyond float16 inside the layer.*computed in float32$/);
  assert.equal(insideInWords(layer("a"), FLOAT16), null);
  const details = eventText.eventDetails({
    kind: "verdict", numbers: { largest_inside_in_float32: 4125380 },
  });
  assert.match(details[0], /^largest number inside the layer.*float16 holds up to 65\u202f504$/);
});

const moments = (largest, low) => {
  const range = { largest, largest_step: 1, low, low_step: 1 };
  return { first: range, last: range, worst: range };
};

function planOf(overflowing, refused = []) {
  const own = { activation: moments(1, -3), gradient: moments(-12, -20) };
  const layers = {
    a: own, b: { ...own, ...refused.length ? { refused: { float16: refused } } : {} },
  };
  const ranges = { formats: [FLOAT16], layers, overflowing_scale: overflowing };
  return whatIf.smallestPlan([layer("a"), layer("b")], ranges, "float16");
}

test("a plan does not lower a loss scale that the run had room for", () => {
  // 1.5 bits are left at 2**15, and the first step that is skipped has bad data.
  const run = { last_step: 300, scale: [{ steps: [0, 7, 29], scale: [2 ** 15, 2 ** 14, 2 ** 13], skipped: [0, 1, 2] }] };
  const found = (largest, overflowing, more = run, own = {}) => {
    const ranges = { formats: [FLOAT16], overflowing_scale: overflowing, layers: { a: {
      activation: moments(1, -3), gradient: moments(largest, -20),
    } } };
    return whatIf.smallestPlan([layer("a", own)], ranges, "float16", more);
  };
  const tight = FLOAT16.maximum_bits - 15 - 1.5;
  assert.equal(found(tight, null).scale, 15);
  assert.equal(whatIf.scaleInWords(found(tight, null)),
    "Loss scale 2¹⁵, at which this run had room, though less than 2 bits of it.");
  assert.equal(found(tight, null, {}).scale, 14);
  assert.equal(whatIf.scaleInWords(found(tight, null, {})), "Loss scale 2¹⁴.");
  // Where gradients overflowed, or would, or were in float32 then, nothing is proven.
  assert.equal(found(tight, 15).scale, 14);
  assert.ok(found(tight + 2, null).scale < 15);
  const moved = { dtypes: [[0, "float16"], [2, "float32"], [20, "float16"]] };
  assert.equal(found(tight, null, run, moved).scale, 14);
  // All steps at 2**15 were skipped.
  const skips = { last_step: 2, scale: [{ steps: [0, 1], scale: [2 ** 15, 2 ** 14], skipped: [0, 1] }] };
  assert.deepEqual(whatIf.provenScales(skips, null), [{ bits: 14, step: 2 }]);
  // A run without a change of the loss scale has one row.
  const steady = { last_step: 9, scale: [{ steps: [0], scale: [2 ** 15], skipped: [0] }] };
  assert.deepEqual(whatIf.provenScales(steady, null), [{ bits: 15, step: 9 }]);
});

test("a plan stays below the loss scales at which steps were skipped", () => {
  assert.equal(planOf(null).scale, 15);
  assert.equal(whatIf.scaleInWords(planOf(null)), "Loss scale 2¹⁵.");
  assert.equal(planOf(13).scale, 12);
  assert.equal(planOf(12.5).scale, 12);
  assert.match(whatIf.scaleInWords(planOf(13)), /^Loss scale 2¹²: from 2¹³ on .* skipped/);
  assert.match(whatIf.scaleInWords(planOf(-14)), /^No loss scale is known/);
  const blamed = planOf(13, ["backward_overflow"]);
  assert.equal(blamed.scale, 15);
  assert.match(whatIf.scaleInWords(blamed), /may be due to the layers with a verdict/);
});

test("zeros were measured, and have no range", () => {
  const found = course.courseOf(heat([Infinity, Infinity, Infinity]), null, "a", 16);
  assert.deepEqual([found.isZero, found.largest], [true, []]);
  assert.ok(whatIf.isAllZero(layer("a", { least_headroom: "inf" })));
  assert.ok(!whatIf.isAllZero(layer("a", { least_headroom: null })));
});

test("an error of before a repair is said to be one", () => {
  const wide = layer("a", { compute_dtype: "float32", demoted_at: 7 });
  const run = (own) => ({ layers: [own] });
  const ranges = { layers: { a: { error: 0.999, error_step: 7 } } };
  const notes = (own) => difference.differencesOf(run(own), run(layer("a")), ranges, null, "all")[0]
    .cells.find(({ id }) => id === "error").notes;
  assert.deepEqual(notes(wide), [" at step 7, before it was in float32", ""]);
  assert.deepEqual(notes(layer("a")), [" at step 7", ""]);
});

test("names of code are plain text, and of events say what happened", () => {
  assert.equal(format.readable("every `probe_every` steps, 2**15"), "every probe_every steps, 2¹⁵");
  assert.equal(eventText.eventTitle({ kind: "probe_compiled" }), "probed step compiled");
  assert.match(eventText.describeEvent({ kind: "probe_compiled", seconds: 2 }), /measures every layer/);
});

test("why a layer is shown that nobody chose", () => {
  const of = (finding, layers, chosen = null) => wanted.whyShown({
    part: "activation", layer: chosen, runData: {
      format: FLOAT16,
      finding, layers, events: [{ kind: "verdict", layer: "b" }],
      histograms: { activation: ["a", "b"] },
    },
  });
  const layers = [layer("a"), layer("b", { least_headroom: 12 })];
  assert.match(of({ event: 0 }, layers), /layer of the main finding/);
  assert.match(of(null, layers), /least headroom of the layers with a histogram/);
  assert.match(of(null, layers.map((one) => ({ ...one, least_headroom: null }))), /first layer/);
  assert.equal(of(null, layers, "a"), "");
  const wide = layers.map((one) => ({ ...one, compute_dtype: "float32" }));
  assert.match(of(null, wide), /with a histogram, if they were float16;/);
});
