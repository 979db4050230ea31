import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

const folder = fileURLToPath(
  new URL("../keras_mixprec/tensorboard_plugin/static", import.meta.url),
);
const load = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);

const { canBeByReading, heatAxis, isByReading, readingAxis } = await load("reading_axis");
const { drawSoon } = await load("frames");

const HEAT = { from: [1, 50, 99], until: [1, 50, 100] };

test("a reading takes one unit, and what lies between two none", () => {
  const axis = readingAxis(HEAT);
  assert.deepEqual([1, 25, 50, 75, 99.5].map(axis.of), [0.5, 1, 1.5, 2, 2.5]);
  assert.deepEqual([-9, 0, 200].map(axis.of), [0, 0, 3]);
  assert.deepEqual([0.5, 1.5, 2.25].map(axis.stepAt), [1, 50, 99]);
  const ticks = axis.ticks(0, 3, 5);
  assert.deepEqual(ticks, [0.5, 1.5, 2.5]);
  assert.deepEqual(ticks.map(axis.label), ["1", "50", "99"]);
  assert.deepEqual(axis.ticks(0, 3, 1), [0.5, 2.5]);
});

test("few readings are columns unless the reader wants steps to scale", () => {
  const state = { axis: "step", toScale: null, runData: { last_step: 100 } };
  assert.ok(isByReading(state, HEAT));
  assert.ok(!isByReading({ ...state, toScale: true }, HEAT));
  assert.ok(!isByReading({ ...state, runData: { last_step: 20 } }, HEAT));
  assert.ok(isByReading({ ...state, toScale: false, runData: { last_step: 20 } }, HEAT));
  // All that there is was measured.
  assert.ok(!canBeByReading(state, { from: [1, 2, 3], until: [1, 2, 3] }));
  const clock = { time: { steps: [0, 100], values: [0, 9] } };
  const byTime = { ...state, axis: "time", runData: { last_step: 100, clock } };
  assert.ok(!canBeByReading(byTime, HEAT));
});

test("between two readings that are zoomed into steps are to scale", () => {
  const state = { axis: "step", toScale: null, runData: { last_step: 100 } };
  assert.equal(heatAxis(state, HEAT, [0, 100]).of(50), 1.5);
  assert.equal(heatAxis(state, HEAT, [20, 40]).of(30), 30);
});

test("what is asked for while a frame is drawn is drawn in it, each once", () => {
  const frames = [];
  globalThis.requestAnimationFrame = (next) => frames.push(next);
  const done = [];
  const picture = () => done.push("picture");
  const card = () => {
    done.push("card");
    drawSoon(picture);
    drawSoon(card);
  };
  drawSoon(card);
  drawSoon(card);
  assert.equal(frames.length, 1);
  frames.shift()();
  assert.deepEqual(done, ["card", "picture"]);
  assert.equal(frames.length, 1);
});
