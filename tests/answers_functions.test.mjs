// The arithmetic of the cards that answer "what if", against numbers of NumPy and ml_dtypes.
import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

const folder = fileURLToPath(
  new URL("../keras_mixprec/tensorboard_plugin/static", import.meta.url),
);
const load = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);
const whatIf = await load("what_if");

// Of `test_plugin_answers.py`: what casts of real numbers came to.
const { formats, casts, windows } = JSON.parse(process.env.MIXPREC_CASTS);
const formatOf = (name) => formats.find((one) => one.name === name);
const moments = (range) => ({ first: range, last: range, worst: range });

test("a range overflows or vanishes in a format as ml_dtypes casts it", () => {
  assert.ok(casts.length > 20);
  for (const { dtype, range, state } of casts) {
    const found = whatIf.judgePart(moments(range), formatOf(dtype), "worst");
    assert.equal(found.state, state, JSON.stringify({ dtype, range, found }));
  }
});

test("gradients survive at the loss scales at which NumPy's do", () => {
  for (const { range, lowest, highest } of windows) {
    const found = whatIf.gradientWindow(moments(range), formatOf("float16"), "worst");
    assert.deepEqual(found, { lowest, highest });
  }
});

const range = (largest, low = null) => moments({ largest, largest_step: 3, low, low_step: 3 });
const layer = (path, more = {}) => {
  return { path, share_of_flops: 0.25, dtypes: [[0, "float16"]], fed_by: [], ...more };
};

test("a plan holds the fewest layers in float32, each with its reason", () => {
  const layers = [
    layer("a"), layer("b", { fed_by: ["a"] }), layer("c"), layer("d"), layer("e"),
    layer("f", { dtypes: [[0, "float32"]] }),
  ];
  const ranges = {
    formats,
    layers: {
      a: { activation: range(17) }, b: { activation: range(1) },
      c: { activation: range(1), gradient: range(-3, -20) },
      d: { activation: range(1), refused: { float16: ["forward_overflow"] } },
      f: { activation: range(1) },
    },
  };
  const plan = whatIf.smallestPlan(layers, ranges, "float16");
  assert.deepEqual([...plan.reasons.keys()], ["a", "b", "d", "f"]);
  assert.match(plan.reasons.get("b"), /^it receives what a computes/);
  assert.match(plan.reasons.get("d"), /forward overflow/);
  assert.deepEqual(plan.unmeasured, ["e"]);
  const wide = whatIf.smallestPlan(layers, ranges, "bfloat16");
  assert.deepEqual([...wide.reasons.keys()], ["f"]);
});

test("what became infinite is not known in a wider format", () => {
  const lost = { nonfinite: { step: 4, dtype: "float16" }, activation: range(3) };
  const stateIn = (name) => whatIf.judgeLayer(lost, formatOf(name), formats, "worst").state;
  assert.equal(stateIn("float16"), "overflows");
  assert.equal(stateIn("bfloat16"), "unknown");
  const measured = { ...lost, activation: range(20) };
  assert.equal(whatIf.judgeLayer(measured, formatOf("bfloat16"), formats, "worst").state, "fits");
});

test("the loss scale suits the layers with the most FLOPs", () => {
  const of = (lowest, highest, cost) => ({ window: { lowest, highest }, cost });
  const layers = [of(0, 4, 1), of(8, 12, 3), of(10, 20, 3)];
  assert.equal(whatIf.bestScale(layers, [-14, 126]), 12);
  assert.equal(whatIf.bestScale([], [-14, 126]), 15);
});
