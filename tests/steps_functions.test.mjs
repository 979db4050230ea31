import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

const folder = fileURLToPath(
  new URL("../keras_mixprec/tensorboard_plugin/static", import.meta.url),
);
const load = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);

const { alignedScale, alignedSteps, axesOf, axisOf, lastStepOf, stepInWords } = await load("axis");
const { courseOf } = await load("course");
const { countsByKind } = await load("event_groups");
const { momentInWords } = await load("format");
const { leastHeadroom } = await load("least_headroom");
const { differencesOf } = await load("difference");
const { setupDifference, wholeFindings } = await load("run_setup");
const { partnerOf, worthInWords } = await load("worth");
const { skippedInWords } = await load("skips");

test("skipped steps are counted between the rows of the loss scale, too", () => {
  // At the floor there is a row for each reading; each step of 3 to 50 was skipped.
  const line = { steps: [0, 2, 3, 50, 100], scale: [4, 2, 1, 1, 1], skipped: [0, 1, 2, 49, 60] };
  const said = [0, 1, 2, 3, 29, 50, 99, 100, 120].map((step) => skippedInWords(line, step));
  assert.deepEqual(said, [
    "0 skipped so far", "0 skipped so far", "1 skipped so far", "2 skipped so far",
    "28 skipped so far", "49 skipped so far", "49 skipped up to step 50, 60 up to step 100",
    "60 skipped so far", "60 skipped so far",
  ]);
});

const LAYER = {
  path: "a", compute_dtype: "float16", passed_from: null, inside: null, least_headroom: 9,
  worst_step: 8, least_gradient_headroom: 1.7, worst_gradient_step: 4,
};
const RUN = { layers: [LAYER], format: { name: "float16" }, events: [], finding: null, stuck: 0 };

test("gradients of a run that skips all of its steps have no headroom", () => {
  const [activations, gradients] = leastHeadroom(RUN);
  assert.deepEqual([activations.text, activations.level], ["9 bits", undefined]);
  assert.deepEqual([gradients.text, gradients.level], ["1.7 bits", "warning"]);
  assert.match(gradients.title, /^a, after step 4, loss scale included, of finite readings/);
  // Neither where no reading was finite, of which there is no number.
  for (const layer of [LAYER, { ...LAYER, least_gradient_headroom: null }]) {
    const [, stuck] = leastHeadroom({ ...RUN, layers: [layer], stuck: 182 });
    assert.deepEqual([stuck.text, stuck.level], ["▲ not finite", "bad"]);
    assert.match(stuck.title, /in the last 182 steps/);
  }
});

test("step 0 is before the first", () => {
  assert.equal(momentInWords(0), "before the first step");
  assert.equal(momentInWords(1200, ""), "step 1\u202f200");
  assert.equal(stepInWords({ name: "step" }, 4, "after"), "after step 4");
});

test("what 16 bits bring is said of a run beside one in float32 of its folder", () => {
  const run = { run: "mixed/mixprec", layers: [LAYER], policy: "mixed_float16" };
  const speedOf = (median, lacks = null, off = 1) => ({ lacks, medians: { samples_per_second: { median, off } } });
  const row = (name, policy, speed, more = {}) => ({
    run: name, policy, layers: 1, speed, peak_memory: null, output_bytes_saved: null, last_loss: 0.5, ...more,
  });
  const wide = row("float32/mixprec", "float32", speedOf(1000), { output_bytes_saved: 0 });
  const said = (speed, more) => worthInWords([row(run.run, run.policy, speed, more), wide], run);
  const slow = "mixed is slower than float32, at 0.34x (0.34x to 0.34x) its speed; " +
    "last loss 0.5 instead of 0.5; peak memory not measured; by their dtypes its layers' outputs " +
    "take 50\u202f% less: float32 is the faster one on this device.";
  assert.equal(said(speedOf(340), { output_bytes_saved: 0.5 }), slow);
  assert.match(said(speedOf(1900)), /: 16 bits are worth it on this device\.$/);
  assert.match(said(speedOf(1050)), /: 16 bits are hardly faster on this device\.$/);
  // What the card of speed does not tell apart, this line does not either.
  assert.match(said(speedOf(1900, null, 1000)),
    /^mixed against float32: no difference in speed seen .*: 16 bits are no faster on this device\.$/);
  const few = speedOf(1900, { what: "readings", text: "3 readings of the time of a step, 5 are needed" });
  assert.match(said(few), /speeds are not compared: mixed has 3 readings of .* not measured\.$/);
  // What is faster since it updates nothing is no choice.
  const skips = speedOf(1900, { what: "trained", text: "all of the timed steps skipped: no speed of training" });
  assert.match(said(skips), /mixed has all of the timed steps skipped: no speed of training; .* not measured\.$/);
  // What is faster and wrong is none either.
  assert.match(said(speedOf(1900), { finding: { repaired: false } }), /memory not measured\.$/);
  assert.equal(said(null), null);
  const other = { ...run, run: wide.run, policy: "float32" };
  assert.equal(worthInWords([row(run.run, run.policy, speedOf(340), { output_bytes_saved: 0.5 }), wide], other), slow);
  assert.equal(worthInWords([wide], other), null);
  assert.equal(partnerOf([row("a", "float32", speedOf(1), { layers: 2 })], run, true), undefined);
});

const fit = (run, tuner, settings) => ({
  run, policy: "mixed_float16", events: [{ kind: "train_begin", tuner, settings }],
});

test("what was set otherwise in two runs is said as far as it was logged", () => {
  const setup = { optimizer: "SGD", learning_rate: 0.5, first_loss_scale: 32768 };
  const [one, other] = [fit("a", true, setup), fit("b", false, { ...setup, learning_rate: 0.01 })];
  assert.equal(setupDifference(one, other),
    "Set otherwise in a | b, which need not be why their results differ: " +
    "learning rate 0.5 | 0.01; tuner PrecisionTuner | none.");
  assert.equal(setupDifference(one, { ...one, run: "b" }), "In a and b, what the logs have was set alike.");
  assert.equal(setupDifference(fit("a", true), { ...other, events: one.events, policy: "float32" }),
    "Set otherwise in a | b, which need not be why their results differ: policy mixed_float16 | float32. " +
    "Optimizer and learning rate are not in both logs.");
});

test("findings of a run as a whole are none of a layer", () => {
  const verdict = { kind: "verdict", verdict: "divergence", step: 3, layer: null };
  assert.equal(wholeFindings({ events: [verdict, { ...verdict, layer: "a" }] }), "divergence at step 3");
  assert.equal(wholeFindings({ events: [] }), "");
});

test("an error against float32 has its step", () => {
  const ranges = { layers: { a: { error: 0.25, error_step: 50 } } };
  const layer = { ...LAYER, verdicts: [], dtypes: [[0, "float16"]] };
  const run = { ...RUN, layers: [layer] };
  const [{ cells }] = differencesOf(run, run, ranges, ranges, "all");
  assert.deepEqual(cells.find(({ id }) => id === "error").notes, [" at step 50", " at step 50"]);
});

test("a reading that looks safe says what was found beside it", () => {
  const layer = { ...LAYER, dtypes: [[0, "float16"]], least_gradient_headroom: 6 };
  const tiles = (...events) => leastHeadroom({ ...RUN, layers: [layer], events });
  const verdict = { kind: "verdict", verdict: "forward_overflow", layer: "a", step: 3, numbers: {} };
  const [found] = tiles(verdict);
  assert.deepEqual([found.text, found.level, found.event], ["▲ overflow found", "bad", verdict]);
  assert.match(found.title, /^overflow found in a, at step 3, .* 9 bits at least/);
  assert.equal(tiles({ ...verdict, numbers: { overflows_in_steps: 30 } })[0].text, "9 bits");
  const skip = { kind: "skipped_step", step: 9, at_step: 5 };
  const [activations, gradients] = tiles(skip);
  assert.equal(activations.text, "9 bits");
  assert.deepEqual([gradients.text, gradients.level], ["6 bits, then overflow", "skip"]);
  assert.match(gradients.title, /1 step behind that reading overflowed and was skipped$/);
  assert.equal(tiles({ ...skip, at_step: 3 })[1].text, "6 bits");
  assert.equal(tiles({ ...skip, bad_input: { x: 0 } })[1].text, "6 bits");
  assert.equal(tiles({ ...skip, at_step: 9, loss: ["nan"] })[0].text, "9 bits, then overflow");
});

test("what a run lost as a whole is no difference of its layers", () => {
  const layer = { ...LAYER, verdicts: [], dtypes: [[0, "float16"]] };
  const lost = { ...layer, least_headroom: "-inf", lost_because: "training diverged" };
  const run = (own) => ({ ...RUN, layers: [own] });
  const [row] = differencesOf(run(lost), run(layer), null, null, "all");
  assert.ok(!row.differs);
  assert.equal(row.cells.find(({ id }) => id === "headroom").notes[0], ": training diverged");
  const [tile] = leastHeadroom(run(lost));
  assert.deepEqual([tile.text, tile.title], ["▲ not finite", "in all layers, because training diverged"]);
});

test("readings of a range are those of the heatmap", () => {
  const heat = { layers: ["a"], from: [1, 20], until: [1, 20], values: [-Infinity, -Infinity] };
  const bins = [[3, 128], [3, 128]];
  const histogram = { steps: [10, 20], exponents: bins, counts: [[1, 2], [1, 2]], low: [3, 3] };
  const found = courseOf(heat, histogram, "a", 16);
  // The one after step 10 is part of a column that ends with another.
  assert.deepEqual([found.nonfinite, found.readings], [[1, 20], 2]);
  const behind = courseOf(heat, { ...histogram, steps: [20, 40] }, "a", 16);
  assert.deepEqual([behind.nonfinite, behind.readings], [[1, 20, 40], 3]);
  assert.equal(courseOf(null, histogram, "a", 16).readings, 2);
});

test("events are counted as the figures above count them", () => {
  const skip = (step, optimizer) => ({ kind: "skipped_step", step, at_step: step, optimizer });
  const verdict = (layer, more) => ({ kind: "verdict", verdict: "forward_overflow", layer, step: 9, ...more });
  const events = [
    ...[1, 2, 3, 7].flatMap((step) => [skip(step, "a"), skip(step, "b")]),
    verdict("x"), verdict("y", { same_as: "x" }),
    { kind: "skipped_steps_not_kept", first_step: 9, last_step: 40, count: 30, step: 40 },
  ];
  const found = countsByKind([{ events, skipped: 24 }]);
  assert.deepEqual(found, [
    { kind: "skipped_step", count: 4, rows: 4 }, { kind: "verdict", count: 2, rows: 1 },
    { kind: "skipped_steps_not_kept", count: 20, rows: 1 },
  ]);
  const [{ count, rows }] = countsByKind([{ events: [skip(1), skip(2)], skipped: 2 }]);
  assert.deepEqual([count, rows], [2, 1]);
});

test("two runs are placed by their own epochs, side by side", () => {
  const run = (steps, name) => ({
    run: name, last_step: steps.at(-1), clock: { epoch: { steps, values: [0, 1, 2] }, time: null },
  });
  const [runData, compareData] = [run([0, 8, 16], "a"), run([0, 20, 40], "b")];
  const state = { axis: "epoch", runData, compareData };
  const { toShown, toOwn } = alignedSteps(state, compareData);
  assert.deepEqual([toShown(10), toShown(40), toOwn(12)], [4, 16, 30]);
  assert.equal(alignedSteps(state, runData).toShown(5), 5);
  assert.equal(axisOf(state).name, "epoch");
  assert.equal(axisOf(state, compareData).of(30), 1.5);
  const ends = (own) => lastStepOf({ ...state, axis: own });
  assert.deepEqual([ends("epoch"), ends("step"), ends("time")], [16, 40, 40]);
  assert.deepEqual(axesOf(state).map(({ why }) => why), [null, null, "not in both logs"]);
  const lacking = { ...state, compareData: { ...compareData, clock: {} } };
  assert.equal(axisOf(lacking).name, "step");
  assert.equal(alignedSteps(lacking, lacking.compareData).toShown(10), 10);
  const scale = alignedScale(state, compareData, Object.assign((step) => 2 * step, { invert: (x) => x / 2 }));
  assert.deepEqual([scale(40), scale.invert(32), scale.base(5)], [32, 40, 10]);
});
