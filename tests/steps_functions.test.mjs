import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

const folder = fileURLToPath(
  new URL("../keras_mixprec/tensorboard_plugin/static", import.meta.url),
);
const load = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);

const { stepInWords } = await load("axis");
const { momentInWords } = await load("format");
const { leastHeadroom } = await load("least_headroom");
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
